"""A job for :mod:`trainfit.plan.gpus.comparison`, from result files."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from pathlib import Path

from trainfit.plan.gpus.comparison import Job
from trainfit.results.files.errors import ResultFileError, TrainfitError
from trainfit.results.plan.result import PlanResult
from trainfit.results.runs.recording import Recording


class JobError(TrainfitError):
    """Recordings that are of no one job; the message says why, and what would do."""


def job_of_plan(result: PlanResult, path: Path) -> Job:
    """What a plan was made from; raises :class:`ResultFileError` for ``path``."""
    if not result.recordings:
        raise ResultFileError(
            path, "it has no recordings in it", "re-create it with `trainfit plan --output FILE`"
        )
    kept = [(each.batch_size, each.recording(path)) for each in result.recordings]
    batch, recording = kept[0]
    _require_step(recording, path)
    pair = [(at, other) for at, other in kept[-2:] if at is not None]
    return Job(result.command, batch, recording, _pair(pair), result.samples)


def job_of_recordings(found: Sequence[tuple[Path, Recording]]) -> Job:
    """From one recording, or from two of the same command at different batch sizes."""
    for path, recording in found:
        _require_step(recording, path)
    if len(found) > 2:
        raise JobError("--for expects one or two recordings: two batch sizes give all others")
    path, recording = found[0]
    batches = [_batch_size(each) for _, each in found]
    job = Job(_command(recording) or path.name, batches[0], recording)
    if len(found) == 1:
        return job
    other_path, other = found[1]
    if None in batches or batches[0] == batches[1]:
        raise JobError(
            f"{str(path)!r} and {str(other_path)!r} are of batch sizes {batches[0]} and "
            f"{batches[1]}: record one with another --batch-size"
        )
    if _command(recording) != _command(other):
        raise JobError(f"{str(path)!r} and {str(other_path)!r} are of different commands")
    pair = [(at, each) for at, (_, each) in zip(batches, found, strict=True) if at is not None]
    return dataclasses.replace(job, pair=_pair(pair))


def _pair(found: Sequence[tuple[int, Recording]]) -> tuple[tuple[int, Recording], ...]:
    return tuple(found) if len(found) == 2 else ()


def _batch_size(recording: Recording) -> int | None:
    size = recording.header.get("batch_size")
    return size if isinstance(size, int) else None


def _command(recording: Recording) -> str:
    return str(recording.header.get("template") or recording.header.get("script") or "")


def _require_step(recording: Recording, path: Path) -> None:
    if not recording.steps:
        raise ResultFileError(path, "no complete step was recorded", "re-record it, with --steps 3")
