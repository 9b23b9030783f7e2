"""``trainfit doctor --script``: reads a training script for habits that cost memory or speed.

The script and the user's own files that it imports are parsed; nothing is executed or imported. A
rule speaks only where the reading is certain (docs/script-rules.md has them all).

Which lines of a library's code a script reaches, by the names that it and its files mention.

A script that comes with its library (timm's train.py) imports hundreds of files, of whose functions
a run calls few. What is wrong in one that nothing calls spoils no run.
"""

from __future__ import annotations

import ast
import os
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Final

from trainfit.findings.worker_start import is_main_guard
from trainfit.lint import autograd_rules, in_vain, loading_rules, step_rules
from trainfit.lint.flow import follow
from trainfit.lint.imports import (
    NEAREST_CHARACTERS,
    File,
    Source,
    UnreadableError,
    UnreadableScriptError,
    around_package,
    read_files,
)
from trainfit.lint.mistakes import mistakes
from trainfit.lint.project import Project
from trainfit.lint.workers import worker_pools
from trainfit.results.doctor import ScriptReport, WorkerPools
from trainfit.results.findings import Finding
from trainfit.results.text import count

#: What makes the folder next to it a library that is installed, not only a part of a script.
_BUILDS: Final = ("pyproject.toml", "setup.py", "setup.cfg")
_NAMED = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)


def unreached(files: Sequence[File], words: Collection[str] = ()) -> dict[str, list[range]]:
    """The lines of functions and classes that nothing mentions of what may run, for each file of a
    library among those that a script (the first) imports.

    ``words`` are the command's: by one of them, or by a text in the script, a registry may find a
    function. What runs when a file is imported is all but the bodies of functions and what is for
    the file as a program; of a class that is mentioned, every method may run.
    """
    libraries = [file for file in files[1:] if _is_of_library(file.source.path)]
    if not libraries:
        return {}
    defined: dict[str, list[ast.AST]] = defaultdict(list)
    mentioned = _mentions(files[0].source.nodes, texts=True) | set(words)
    for file in files[1:]:
        if file not in libraries:
            mentioned |= _mentions(file.source.nodes, texts=True)
    for file in libraries:
        for node in file.source.tree.body:
            if isinstance(node, _NAMED):
                defined[node.name].append(node)
                for decorator in node.decorator_list:
                    mentioned |= _mentions(ast.walk(decorator))
            elif isinstance(node, ast.If) and is_main_guard(node):
                for other in node.orelse:
                    mentioned |= _mentions(ast.walk(other))
            elif not isinstance(node, ast.Import | ast.ImportFrom) and not _exports(node):
                mentioned |= _mentions(ast.walk(node))
    left = list(mentioned)
    while left:
        for each in defined.pop(left.pop(), ()):
            new = _mentions(ast.walk(each)) - mentioned
            mentioned |= new
            left += new
    found = {id(each) for nodes in defined.values() for each in nodes}
    return {
        file.source.name: [
            range(node.lineno, (node.end_lineno or node.lineno) + 1)
            for node in file.source.tree.body
            if id(node) in found and isinstance(node, _NAMED)
        ]
        for file in libraries
    }


def _is_of_library(path: Path) -> bool:
    """Is the file in a package that the folder around it says how to build?"""
    folder, package = around_package(path)
    around = (folder, folder.parent) if folder.name == "src" else (folder,)
    return bool(package) and any((each / name).is_file() for each in around for name in _BUILDS)


def _exports(node: ast.stmt) -> bool:
    """Is it ``__all__ = …``, which calls nothing?"""
    targets = node.targets if isinstance(node, ast.Assign) else []
    return any(isinstance(target, ast.Name) and target.id == "__all__" for target in targets)


def _mentions(nodes: Iterable[ast.AST], *, texts: bool = False) -> set[str]:
    """Names in them, of attributes as well, and what their texts say."""
    mentions = set()
    for node in nodes:
        if isinstance(node, ast.Name):
            mentions.add(node.id)
        elif isinstance(node, ast.Attribute):
            mentions.add(node.attr)
        elif texts and isinstance(node, ast.Constant) and isinstance(node.value, str):
            mentions.add(node.value)
    return mentions


# ---
# The rules: each maps the reading of a script to findings, certain ones only.


RULES: Final[tuple[Callable[[Project], Iterator[Finding]], ...]] = (
    loading_rules.hard_coded_cuda,
    loading_rules.data_parallel,
    loading_rules.no_autocast,
    loading_rules.cuda_in_dataset,
    loading_rules.data_on_gpu_before_loop,
    loading_rules.non_blocking_without_pinning,
    autograd_rules.no_no_grad,
    step_rules.sync_every_step,
    autograd_rules.loss_kept_with_graph,
    step_rules.retain_graph,
    step_rules.iterator_restarted,
    step_rules.state_not_copied,
    step_rules.mistaken,
    in_vain.result_dropped,
    in_vain.steps_after_loop,
)


#: Those of them that ask what values are, and whether a file may have what they are about.
_BY_VALUES: Final[
    tuple[tuple[Callable[[Source], bool], Callable[[Project], Iterator[Finding]]], ...]
] = (
    (step_rules.keeps_state, step_rules.state_not_copied),
    (in_vain.drops_results, in_vain.result_dropped),
    (in_vain.has_late_steps, in_vain.steps_after_loop),
)


def mistakes_in(
    path: Path, ran: Collection[str] = (), words: Collection[str] = ()
) -> tuple[Finding, ...]:
    """Lines of a script, or of a file of its own that it imports, that cannot do what they are for;
    none where it cannot be read. Where the files that a run ``ran`` are known, of these alone: an
    import in a branch may be another command's. Of a library that the script comes with, only what
    it may call: ``words`` of the command may name that."""
    try:
        files, unread = read_files(path, NEAREST_CHARACTERS)
        findings = [mistake for file in files for mistake in mistakes(file.source)]
        if any(may(file.source) for may, _ in _BY_VALUES for file in files):
            project = Project(files, is_whole=not unread)
            follow(project)
            findings += [kernel for _, rule in _BY_VALUES for kernel in rule(project)]
    except UnreadableError:
        return ()
    return _of_run(findings, files, ran, words)


def settings_in(
    path: Path,
    ran: Collection[str],
    words: Collection[str],
    *,
    is_deterministic: bool,
    is_full: bool,
) -> tuple[Finding, ...]:
    """Lines behind what a run had: deterministic algorithms, a search of its own for what fits
    where memory ``is_full``. As in :func:`mistakes_in`, of files that it ran."""
    rules = [
        rule
        for rule, is_asked in (
            (step_rules.deterministic, is_deterministic),
            (step_rules.tries_less, is_full),
        )
        if is_asked
    ]
    try:
        files, _ = read_files(path, NEAREST_CHARACTERS) if rules else ([], [])
    except UnreadableError:
        return ()
    kernels = [kernel for rule in rules for file in files for kernel in rule(file.source)]
    firsts = {finding.kind: finding for finding in reversed(_of_run(kernels, files, ran, words))}
    return tuple(firsts.values())


def _of_run(
    findings: Sequence[Finding],
    files: Sequence[File],
    ran: Collection[str],
    words: Collection[str],
) -> tuple[Finding, ...]:
    """Those in files that a run ``ran``, and in what of a library it may call."""
    other = {
        file.source.name
        for file in files[1:]
        if ran and os.path.realpath(file.source.path) not in ran
    }
    apart = unreached(files, words) if findings else {}
    return tuple(
        finding
        for finding in findings
        if finding.at is None
        or (
            finding.at.file not in other
            and not any(finding.at.line in lines for lines in apart.get(finding.at.file, ()))
        )
    )


def read_script(path: Path) -> ScriptReport:
    """All findings in a script and its own imports, by file and line.

    Raises :class:`UnreadableScriptError` where the script itself cannot be read.
    """
    try:
        files, unread = read_files(path)
        project = Project(files, is_whole=not unread)
        follow(project)
        found = {_key(kernel): kernel for rule in RULES for kernel in rule(project)}
    except UnreadableError as error:
        raise UnreadableScriptError(path, error.reason, error.remedy) from None
    for name in sorted(project.too_deep):
        unread.append(f"{name}: partly nested too deeply; that part is skipped")
    order = {file.source.name: file.number for file in files}
    findings = sorted(found.values(), key=lambda f: (order[f.at.file], *_place(f)))
    return ScriptReport(
        str(path),
        tuple(file.source.name for file in files),
        tuple(findings),
        tuple(unread),
        worker_pools(project),
    )


def read_scripts(
    paths: Sequence[Path],
) -> tuple[ScriptReport | None, list[UnreadableScriptError]]:
    """The findings of several scripts as one report, and those that cannot be read.

    A finding in a file that several of them import is named once. ``None``: none could be read.
    """
    reports, errors = [], []
    for path in dict.fromkeys(paths):
        try:
            reports.append(read_script(path))
        except UnreadableScriptError as error:
            errors.append(error)
    if len(reports) < 2:
        return (reports[0] if reports else None), errors
    more = f"{reports[0].script} and {count(len(reports) - 1, 'more script')}"
    found = {_key(finding): finding for report in reports for finding in report.findings}
    joined = ScriptReport(
        more,
        tuple(dict.fromkeys(name for report in reports for name in report.files)),
        tuple(sorted(found.values(), key=lambda f: (f.at.file, *_place(f)))),
        tuple(dict.fromkeys(each for report in reports for each in report.unread)),
        _joined(report.pools for report in reports),
    )
    return joined, errors


def _joined(pools: Iterable[WorkerPools | None]) -> WorkerPools:
    known = [pool for pool in pools if pool is not None]
    workers = [pool.workers for pool in known if pool.has_workers]
    numbers = [worker for worker in workers if worker is not None]
    return WorkerPools(
        any(pool.has_workers for pool in known),
        max(numbers) if numbers and len(numbers) == len(workers) else None,
        tuple(dict.fromkeys(use for pool in known for use in pool.uses)),
    )


def _key(finding: Finding) -> tuple[str, str, int]:
    """One finding a rule and line is enough."""
    return finding.kind, finding.at.file, finding.at.line


def _place(finding: Finding) -> tuple[int, int, str]:
    return finding.at.line, finding.at.column, finding.kind
