"""``trainfit compare``: say what changed from one watched run to another."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

from trainfit.cli.common import UsageError
from trainfit.cli.output import given_output
from trainfit.cli.verbs.watched import print_result
from trainfit.results.runs.watched import RunRecord, load_run
from trainfit.results.watch import WatchResult
from trainfit.watch.compare import compare


def run(options: argparse.Namespace, command: Sequence[str]) -> int:
    """Compare and print; returns the exit code."""
    output = given_output(options.output, [options.before, options.after])
    result = compare(
        _run(options.before),
        _run(options.after),
        allow_other_hardware=options.other_hardware,
    )
    if output is not None:
        result.save(output)
    print_result(result, json=options.json, whole=options.explain)
    return {"slower": 1, "cannot tell": 2}.get(result.verdict, 0)


def _run(path: Path) -> RunRecord:
    """Of a run's folder, or of the folder that a file of `trainfit watch --output` is about."""
    if not path.is_file():
        return load_run(path)
    header, named = (result := WatchResult.load(path)).header, Path(result.folder)
    for folder in dict.fromkeys((named, path.parent / named)):
        if result.folder and (folder / f"rank{header.rank}.json").is_file():
            run = load_run(folder)
            if (run.header.started_unix, run.header.pid) == (header.started_unix, header.pid):
                return run
    raise UsageError(
        f"{str(path)!r} has medians, and a comparison needs every step, which are in the run's "
        f"folder {result.folder!r}: it is not there; give the folder of the run"
    )
