"""``trainfit doctor --script``: reads a training script for habits that cost memory or speed.

The script and the user's own files that it imports are parsed; nothing is executed or imported.
A rule speaks only where the reading is certain (docs/script-rules.md has them all).
"""

from __future__ import annotations

from pathlib import Path

from trainfit.lint.reading.flow import follow
from trainfit.lint.reading.imports import read_files
from trainfit.lint.reading.project import Project
from trainfit.lint.reading.source import UnreadableError, UnreadableScriptError
from trainfit.lint.rules import RULES
from trainfit.lint.thread_pools import worker_pools
from trainfit.results.machine.doctor import Finding, ScriptReport


def read_script(path: Path) -> ScriptReport:
    """All findings in a script and its own imports, by file and line.

    Raises :class:`UnreadableScriptError` where the script itself cannot be read.
    """
    try:
        files, unread = read_files(path)
        project = Project(files, is_whole=not unread)
        follow(project)
        found = {_key(each): each for rule in RULES for each in rule(project)}
    except UnreadableError as error:
        raise UnreadableScriptError(path, error.reason, error.remedy) from None
    for name in sorted(project.too_deep):
        unread.append(f"{name}: partly nested too deeply; that part is skipped")
    order = {file.source.name: file.number for file in files}
    findings = sorted(found.values(), key=lambda f: (order[f.file], f.line, f.column, f.rule))
    return ScriptReport(
        str(path),
        tuple(file.source.name for file in files),
        tuple(findings),
        tuple(unread),
        worker_pools(project),
    )


def _key(finding: Finding) -> tuple[str, str, int]:
    """One finding a rule and line is enough."""
    return finding.rule, finding.file, finding.line
