"""What the static reading of a script found, as text."""

from __future__ import annotations

from itertools import groupby

from trainfit.results.format import count
from trainfit.results.machine.doctor import Finding, ScriptReport
from trainfit.results.text import columns, printable, wrapped

_INDENT = " " * 4


def script_text(report: ScriptReport) -> str:
    """Findings by file and line: where, the line as it stands, the reason, what to write."""
    read = count(len(report.files), "file")
    if report.findings:
        names = {each.file for each in report.findings}
        where = f" in {count(len(names), 'file')}" if len(names) > 1 else ""
        title = f"{count(len(report.findings), 'finding')}{where}; {read} read"
    else:
        title = f"nothing found; {read} read"
    lines = [wrapped(f"Script {printable(report.script)}: {title}", "", "  ")]
    order = {name: number for number, name in enumerate(report.files)}
    ordered = sorted(
        report.findings, key=lambda f: (order.get(f.file, len(order)), f.file, f.line, f.column)
    )
    for _, findings in groupby(ordered, key=lambda each: each.file):
        for finding in findings:
            lines += ["", *_finding(finding)]
    if report.unread:
        lines += [""] if report.findings else []
        lines += [wrapped(f"not read: {printable(each)}", "  ", _INDENT) for each in report.unread]
    return "\n".join(lines)


def _finding(finding: Finding) -> list[str]:
    place = f"{printable(finding.file)}:{finding.line}:{finding.column}"
    source = printable(finding.source.expandtabs(4).strip())
    if len(source) > columns() - 6:
        source = source[: columns() - 8] + " …"
    return [
        f"  {place} {printable(finding.rule)}",
        _INDENT + "| " + source,
        wrapped(printable(finding.reason), _INDENT, _INDENT),
        wrapped(printable(finding.rewrite), _INDENT + "> ", _INDENT + "  "),
    ]
