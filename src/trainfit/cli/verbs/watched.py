"""What verbs about watched runs share: a change that is tried, and their results printed."""

from __future__ import annotations

import argparse
import dataclasses
import shlex
import sys
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

from trainfit.cli.common import UsageError
from trainfit.cli.output import given_output, print_lines
from trainfit.cli.results_options import VERIFY_RUNS, VERIFY_STEPS
from trainfit.memory.snapshot_report import explain_snapshot
from trainfit.plan.command.options import marked
from trainfit.plan.command.prefix import words_to_start
from trainfit.plan.command.tunables import (
    LOADER_SWITCHES,
    as_switch,
    fill,
    opposite_switch,
    placeholders,
)
from trainfit.report.layout import Line
from trainfit.report.sections.batch import METHODS
from trainfit.report.sections.comparison import comparison_subject, tried_subject
from trainfit.report.sections.watch import watch_subject
from trainfit.report.writers.terminal import screen
from trainfit.report.writers.terminal import whole as explained
from trainfit.results.batch import NoiseResult
from trainfit.results.files.errors import ResultFileError
from trainfit.results.runs.watched import RunRecord, memory_path, noise_path
from trainfit.results.text import printable, wrapped
from trainfit.results.watch import AdviceVerification, Comparison, WatchResult
from trainfit.watch.judge import judge
from trainfit.watch.verify import LEAST_RECORDED, short_run, verify

# ---
# Prints what was said of watched runs, as every verb does that has such a result.


Result = WatchResult | Comparison | AdviceVerification


def print_result(result: Result, *, json: bool, whole: bool, stderr: bool = False) -> None:
    """One JSON document on stdout, or a screen, in colour on a terminal; ``whole``: with every
    finding, its cause and evidence."""
    if json:
        print(result.to_json(), flush=True)
    else:
        print_lines(_lines(result, whole), stderr=stderr)


def print_noise(folder: Path, *, wanted: bool, stderr: bool) -> None:
    """A line on the noise scale of a run's first rank, and what explains it; nothing where it was
    not ``wanted``, nor measured."""
    path = noise_path(folder / "rank0")
    stream = sys.stderr if stderr else sys.stdout
    if path.is_file():
        result = NoiseResult.load(path)
        print(wrapped(result.line, "", "  "), file=stream)
        print(f"  measured on {METHODS[result.method]}", file=stream)
        if result.noise is not None:
            name = shlex.quote(printable(str(path)))
            print(f"trainfit batch explain {name} --to BATCH", file=stream)
    elif wanted:
        print("noise scale not measured; -v gives the reason", file=stream)


def with_memory(result: WatchResult, folders: Sequence[Path]) -> WatchResult:
    """``result`` with what the memory snapshots of its ranks explain, where memory ran out while
    its history was recorded."""
    paths = [
        path for folder in folders for path in sorted(folder.glob(memory_path(Path("*")).name))
    ]
    if not paths:
        return result
    try:
        report = explain_snapshot(paths[0])
    except ResultFileError as error:
        return dataclasses.replace(result, notes=(*result.notes, str(error)))
    ended = [finding for finding in result.findings if finding.kind == "gpu_out_of_memory"]
    others = [finding for finding in result.findings if finding.kind != "gpu_out_of_memory"]
    note = f"the memory when it ran out: trainfit memory {shlex.quote(str(paths[0]))}"
    return dataclasses.replace(
        result,
        findings=(*ended, *report.findings, *others),
        notes=(note, *result.notes),
    )


def _lines(result: Result, whole: bool) -> Sequence[Line]:
    if isinstance(result, WatchResult):
        subject = watch_subject(result)
    elif isinstance(result, Comparison):
        subject = comparison_subject(result)
    else:
        subject = tried_subject(result)
    return (explained if whole else screen)(subject)


# ---
# ``trainfit watch --verify``: the command's placeholders, its runs, and the verdict printed.


#: Placeholders that are on or off.
_SWITCHED = ("amp", *LOADER_SWITCHES)


def verified(options: argparse.Namespace, command: Sequence[str], folder: Path) -> int:
    """Verify and print; returns the exit code: 1 where the change makes it worse, 2 where it cannot
    be told."""
    output = given_output(options.output)
    steps = VERIFY_STEPS if options.verify_steps is None else options.verify_steps
    if steps < LEAST_RECORDED:
        raise UsageError(
            f"--verify-steps {steps} is too few for a comparison; give {LEAST_RECORDED} or more"
        )
    _, said = words_to_start(command)
    if said:
        print(f"trainfit: {said}", file=sys.stderr)
    filled, count = _FilledCommand(command), options.verify_runs or VERIFY_RUNS
    print(
        f"trainfit: the command is run {count} times as it is, until "
        f"{steps} steps or its end; it writes what it always writes",
        file=sys.stderr,
    )
    made = 0

    def run(words: Sequence[str], variables: Mapping[str, str]) -> RunRecord:
        nonlocal made
        made += 1
        started, _ = words_to_start(words)
        return short_run(started, variables, folder / f"run{made}", steps)

    def tell(line: str) -> None:
        print(f"trainfit: {line}", file=sys.stderr, flush=True)

    result = verify(filled, run, judge, tell, count=count)
    if output is not None:
        result.save(output)
    print_result(result, json=options.json, whole=options.explain, stderr=True)
    return {"worse": 1, "cannot tell": 2}.get(result.verdict, 0)


class _FilledCommand:
    """A command by its placeholders, the user's and those of options whose names tell what they
    are. Raises :class:`CommandError` for a misspelt one."""

    def __init__(self, words: Sequence[str]) -> None:
        self._words = marked(words)
        self._present = placeholders(self._words)

    @property
    def names(self) -> Iterable[str]:
        return self._present

    def present(self, name: str) -> str:
        return self._present[name]

    def spelled(self, name: str, value: str) -> str:
        """A switch in the spelling that the command has; numbers are no switches here."""
        present = self._present[name]
        now, wanted = as_switch(present), as_switch(value)
        if name not in _SWITCHED or now is None or wanted is None:
            return value
        return present if now == wanted else opposite_switch(present)

    def fill(self, values: Mapping[str, str]) -> Sequence[str]:
        return [fill(word, {**self._present, **values}) for word in self._words]
