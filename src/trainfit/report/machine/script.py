"""What the static reading of a script found, as text."""

from __future__ import annotations

from trainfit.report.screen import ScreenBlock, block, clipped, lines_of, made
from trainfit.results.format import count
from trainfit.results.machine.doctor import Finding, ScriptReport
from trainfit.results.text import printable, wrapped

_INDENT = " " * 4


def script_text(report: ScriptReport) -> str:
    """Findings by file and line: where, the line as it stands, the reason, what to write."""
    lines = [wrapped(_title(report), "", "  ")]
    for finding in _ordered(report):
        lines += ["", *_finding(finding)]
    if report.unread:
        lines += [""] if report.findings else []
        lines += [wrapped(f"not read: {printable(each)}", "  ", _INDENT) for each in report.unread]
    return "\n".join(lines)


def script_blocks(report: ScriptReport) -> list[ScreenBlock]:
    """The same for the screen: where, and what to write, before the reason."""
    found = [block(_title(report), style="title")]
    for number, finding in enumerate(_ordered(report)):
        place, source, reason, rewrite = (lines_of(part) for part in _finding(finding))
        found += [
            ScreenBlock((*place, *source, *rewrite), 2 + 2 * number, notes=1),
            ScreenBlock(tuple(reason), 50 + number),
        ]
    for each in report.unread:
        found.append(made(wrapped(f"not read: {printable(each)}", "  ", _INDENT), 20))
    return found


def _title(report: ScriptReport) -> str:
    read = count(len(report.files), "file")
    if report.findings:
        names = {each.file for each in report.findings}
        where = f" in {count(len(names), 'file')}" if len(names) > 1 else ""
        title = f"{count(len(report.findings), 'finding')}{where}; {read} read"
    else:
        title = f"nothing found; {read} read"
    return f"Script {printable(report.script)}: {title}"


def _ordered(report: ScriptReport) -> list[Finding]:
    """In the order in which the files were read."""
    order = {name: number for number, name in enumerate(report.files)}
    return sorted(
        report.findings, key=lambda f: (order.get(f.file, len(order)), f.file, f.line, f.column)
    )


def _finding(finding: Finding) -> list[str]:
    place = f"{printable(finding.file)}:{finding.line}:{finding.column}"
    source = printable(finding.source.expandtabs(4).strip())
    # The user's own line, whose place is above it.
    return [
        f"  {place} {printable(finding.rule)}",
        clipped(_INDENT + "| " + source),
        wrapped(printable(finding.reason), _INDENT, _INDENT),
        wrapped(printable(finding.rewrite), _INDENT + "> ", _INDENT + "  "),
    ]
