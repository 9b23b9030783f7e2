"""``trainfit gpus`` and ``sweep``: GPUs by name, which serves a job best, many plans at once.

``gpus`` says what figures of the GPUs that are known mean for a job; ``sweep`` plans many plans at
once, and which of them is cheapest and fastest.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import zipfile
from collections.abc import Sequence
from pathlib import Path
from typing import NoReturn

from trainfit.cli.common import UsageError
from trainfit.cli.config import defaults_text
from trainfit.cli.output import give, given_output
from trainfit.cli.parser import VERBS, OptionParser
from trainfit.cli.progress_bar import shown_progress
from trainfit.hardware import GpuNameError, GpuSpec, catalogue, find_gpu, local_gpu
from trainfit.hardware.gpu_figures import figures
from trainfit.hardware.gpu_topology import named_count
from trainfit.plan.gpu_job import Job, job_of_plan, job_of_recordings
from trainfit.plan.gpus import compare_gpus
from trainfit.plan.prices import Prices, given_prices
from trainfit.plan.sweep.cell_run import cells_at_once, run_here, run_on_ray
from trainfit.plan.sweep.grid import read_sweep
from trainfit.plan.sweep.sweeping import sweep
from trainfit.report.gpu_meaning import explained
from trainfit.report.sections.gpus import catalogue_subject, comparison_subject
from trainfit.report.sections.sweep import sweep_subject
from trainfit.results.gpus import GpusResult
from trainfit.results.plan import PlanResult
from trainfit.results.runs.continuation import whole
from trainfit.results.runs.recording import Recording


def run(options: argparse.Namespace, command: Sequence[str]) -> int:
    """Look up and print; returns the exit code."""
    output = given_output(options.output, options.job or ())
    if options.list and (options.job or options.explain):
        raise UsageError("--list shows figures; leave out --for and --explain")
    if options.job:
        return _compare(options, output)
    for name in ("count", "samples", "price", "budget", "measured"):
        if getattr(options, name) is not None:
            raise UsageError(
                f"--{name} is for comparing GPUs for a job: add --for FILE, as of `trainfit plan "
                "--output FILE`"
            )
    found = tuple(figures(spec) for spec in _chosen(options.names, explain=options.explain))
    if options.explain:
        found = tuple(dataclasses.replace(gpu, meaning=explained(gpu)) for gpu in found)
    result = GpusResult(found)
    explain = options.explain or options.list
    give(result, options, catalogue_subject, output, explain=explain)
    return 0


def _compare(options: argparse.Namespace, output: Path | None) -> int:
    """A job on GPUs; exit code 1 where it fits none of them."""
    prices = given_prices(options.price)
    if options.budget is not None and prices is None:
        raise UsageError("--budget needs the prices: add --price FILE")
    counts = options.count or ()
    gpus = _named(options.names) if options.names else _compared(prices, counts)
    job = _job(options.job, on_several=bool(counts))
    if options.samples is not None:
        job = dataclasses.replace(job, samples=options.samples, is_one_epoch=False)
    if options.budget is not None and job.samples is None:
        raise UsageError(
            "--budget needs the run's length: the size of the data set is not known; add "
            "--samples N, the samples in the whole run"
        )
    measured = options.measured
    if measured is not None:
        measured = find_gpu(measured[0]), measured[1]
    distinct = list({gpu.key: gpu for gpu in gpus}.values())
    result = compare_gpus(
        job,
        distinct,
        prices,
        options.budget,
        measured,
        exact=bool(options.names),
        explain=options.explain and bool(options.names),
        counts=counts,
    )
    give(result, options, comparison_subject, output, page=True)
    return 0 if result.fits else 1


def _compared(prices: Prices | None, counts: Sequence[int]) -> Sequence[GpuSpec]:
    """The GPUs to compare where none was named: all; for several in a machine those that are sold
    so, and have a price where there are prices."""
    if not counts:
        return catalogue()
    return [
        gpu
        for gpu in catalogue()
        if not gpu.is_laptop
        and not gpu.shared_memory_device
        and (prices is None or gpu.key in prices.per_hour)
    ]


def _job(files: Sequence[Path], *, on_several: bool) -> Job:
    """The job of a plan's file, or of recordings."""
    if len(files) == 1 and not (files[0].is_file() and zipfile.is_zipfile(files[0])):
        return job_of_plan(PlanResult.load(files[0]), files[0], on_several=on_several)
    for file in files:
        if file.is_file() and not zipfile.is_zipfile(file):
            raise UsageError(
                f"--for {str(file)!r} is no recording, and only recordings are given together: "
                "give the file of one plan alone, or recordings of `trainfit simulate`"
            )
    found = [(file, whole(Recording.load(file))) for file in files]
    return job_of_recordings(found, on_several=on_several)


def _chosen(names: Sequence[str], *, explain: bool) -> list[GpuSpec]:
    if not names and not explain:
        return sorted(catalogue(), key=_newest_and_largest_first)
    if not names:
        here = local_gpu()
        if here is None:
            raise UsageError(
                "no GPU in this machine (or no NVML to see it) to explain: name one, as in "
                'trainfit gpus "RTX 4090" --explain'
            )
        return [here]
    found = {spec.key: spec for spec in _named(names)}
    return list(found.values())


def _newest_and_largest_first(spec: GpuSpec) -> tuple[object, ...]:
    major, minor = spec.capability
    return (-major, -minor, -spec.memory_bytes, spec.key)


def _named(names: Sequence[str]) -> list[GpuSpec]:
    try:
        return [find_gpu(name) for name in names]
    except GpuNameError as error:
        together = " ".join(names)
        if len(names) > 1 and _is_known(together):
            raise UsageError(
                f"{error.reason}: {error.name!r}; if all words are one name, quote it: "
                f'trainfit gpus "{together}"'
            ) from error
        if (number := named_count(str(error.name))) is not None:
            raise UsageError(
                f"{error.name!r} is {number} GPUs, and names are of one: leave the number out, and "
                f"write --for FILE --count {number}"
            ) from error
        raise


def _is_known(name: str) -> bool:
    try:
        find_gpu(name)
    except GpuNameError:
        return False
    return True


def run_sweep(options: argparse.Namespace, command: Sequence[str]) -> int:
    """Run the cells and print; returns the exit code."""
    if options.ray is not None and options.jobs is not None:
        raise UsageError("--jobs is for cells on this machine: leave it out with --ray")
    output = given_output(options.output, [options.file])
    prices = given_prices(options.price)
    given = read_sweep(options.file)
    _OptionsParser(VERBS[given.verb]).parse_known_args(list(given.options))
    folder = options.folder or _folder_of(options.file)
    if folder.exists() and not folder.is_dir():
        raise UsageError(f"--folder {str(folder)!r} is a file; name another")
    with shown_progress() as progress:
        if options.ray is not None:
            cells = functools.partial(run_on_ray, address=options.ray)
        else:
            at_once = options.jobs or cells_at_once()
            cells = functools.partial(run_here, at_once=at_once, warn=progress.warn)
        swept = sweep(
            given,
            folder,
            cells,
            prices=prices,
            samples=options.samples,
            defaults=defaults_text(),
            fresh=options.fresh,
            progress=progress.warn,
        )
    result = swept.result
    give(result, options, sweep_subject, output, page=True)
    if swept.interrupt is not None:
        raise swept.interrupt
    if all(cell.failure for cell in result.cells):
        return 2
    return 0 if result.fits else 1


class _OptionsParser(OptionParser):
    """Checks a sweep's options before its first cell is run with them."""

    def error(self, message: str) -> NoReturn:
        raise UsageError(f"[options] of the sweep's file: {message}")


def _folder_of(file: Path) -> Path:
    return file.with_name(f"{file.stem}-cells")
