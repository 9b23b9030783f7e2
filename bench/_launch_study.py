"""One script's study: planned as a user would, its launch line measured, and planned again."""

from __future__ import annotations

import dataclasses
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import _launch_lines as lines
from _launch_cases import Case
from _launch_figures import Key, Study
from _launch_rig import Effort, PlaceError, Places, contest, keys_of, with_pages
from _loader_sweep import to_stderr
from loader_workloads import ROOT

from trainfit.loader.measure.running import PAGEABLE_BYTES_PER_S
from trainfit.plan.command.parsing import parse_command
from trainfit.plan.command.tunables import CommandError
from trainfit.plan.sizing.speed import fast_end
from trainfit.results.files.errors import TrainfitError
from trainfit.results.loader import LoaderResult
from trainfit.results.plan import PlanResult
from trainfit.results.runs.measurement import Consumer

GPU = "RTX 4090"
#: Seconds that a plan may take, whatever happens.
PLAN_S = 900.0


class BenchError(Exception):
    """A script that comes to no figure; the message says why."""


@dataclass(frozen=True)
class Grid:
    """What is swept: threads in addition to those that the user has, workers, batches fetched
    ahead."""

    threads: Sequence[int]
    workers: Sequence[int]
    prefetch: Sequence[int]


def studied(
    case: Case, command: list[str], grid: Grid, effort: Effort, probe_s: float | None
) -> Study:
    """Plan, sweep, finals, and plan again; a study that says why where one of them fails."""
    study = Study(case.name, parse_command(command).line())
    began = time.monotonic()
    try:
        first, study = planned(study, command, probe_s)
        study = measured(study, case, command, first, grid, effort)
        _, study = planned(study, command, probe_s)
    except (BenchError, PlaceError, TrainfitError, CommandError, ValueError) as error:
        to_stderr(f"{case.name}: {error}")
        study = dataclasses.replace(study, failure=str(error))
    return dataclasses.replace(study, seconds=time.monotonic() - began)


def planned(study: Study, command: list[str], probe_s: float | None) -> tuple[PlanResult, Study]:
    """What the CLI plans for a user's line (with its own time of probing, or this one); raises
    :class:`BenchError`."""
    with tempfile.TemporaryDirectory(prefix="launch-bench-") as folder:
        output = Path(folder) / "plan.json"
        words = [sys.executable, "-m", "trainfit", "plan", "--loader", "--gpu", GPU]
        if probe_s is not None:
            words += ["--probe-time", str(probe_s)]
        words += ["--output", str(output), "--", *command]
        source = os.pathsep.join(filter(None, [str(ROOT / "src"), os.environ.get("PYTHONPATH")]))
        began = time.monotonic()
        try:
            done = subprocess.run(
                words,
                env={**os.environ, "PYTHONPATH": source},
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
                timeout=PLAN_S,
            )
        except subprocess.TimeoutExpired:
            raise BenchError(f"trainfit plan took more than {PLAN_S:.0f} s") from None
        seconds = time.monotonic() - began
        if not output.is_file():
            last = "\n".join(done.stdout.strip().splitlines()[-12:])
            raise BenchError(f"trainfit plan ended with status {done.returncode}:\n{last}")
        plan = PlanResult.load(output)
    to_stderr(f"{study.script}: planned in {seconds:.0f} s: {plan.launch}")
    return plan, dataclasses.replace(
        study,
        lines=(*study.lines, plan.launch),
        said=(*study.said, recommendation(plan)),
        plan_seconds=(*study.plan_seconds, seconds),
    )


def recommendation(plan: PlanResult) -> str:
    """The settings, variables and calls that a plan recommends, in words; empty: there are none."""
    tuned = plan.loading.result if plan.loading is not None else None
    if tuned is None:
        return ""
    settings = dataclasses.asdict(tuned.recommended)
    words = [f"{name}={value}" for name, value in settings.items()]
    return " ".join([*words, *sorted(each.line for each in tuned.variables)])


def measured(
    study: Study,
    case: Case,
    command: list[str],
    plan: PlanResult,
    grid: Grid,
    effort: Effort,
) -> Study:
    """The launch line, the user's own, and the grid; raises BenchError, PlaceError."""
    tuned = plan.loading.result if plan.loading is not None else None
    if tuned is None:
        why = plan.loading.failure if plan.loading is not None else "it was not asked for"
        raise BenchError(f"the plan did not tune the DataLoader: {why}")
    launch = lines.read_line(plan.launch)
    own = lines.in_place_of(lines.line_of(parse_command(command)), launch)
    by_hand = [each.line for each in tuned.variables if each.where != "environment"]
    if case.decoder_threads and (threads := lines.decoder_threads(tuned.variables)):
        launch = launch.with_option(case.decoder_threads, threads)
    wanted = lines.recommended(tuned)
    with Places(GPU) as places:
        mine = places.name(own, "as the user has it")
        keys = keys_of(
            {
                place: lines.grid(grid.workers, grid.prefetch, wanted)
                for place in thread_places(places, mine, own, case, grid.threads)
            }
        )
        line = Key(places.name(launch, "launch"), wanted)
        user = Key(mine, lines.plain(tuned.present))
        there = places[line.place].ready
        consumer = consumer_of(plan, tuned, there.batch_size)
        study = dataclasses.replace(
            study,
            step_s=consumer.step_s,
            tuned_step_s=tuned.step_s,
            batch_size=there.batch_size,
            launch=line,
            own=user,
            by_hand=(*by_hand, *lines.not_said(there.present, wanted)),
            places=places.in_words,
        )
        to_stderr(f"{study.script}: {len(keys)} settings, step {1e3 * consumer.step_s:.2f} ms")
        taken = contest(
            places,
            keys,
            (line, user),
            consumer,
            effort,
            lambda text: to_stderr(f"{study.script}: {text}"),
        )
    return dataclasses.replace(study, taken=taken)


def thread_places(
    places: Places, mine: str, own: lines.Line, case: Case, threads: Sequence[int]
) -> list[str]:
    """The user's own place, and one for each number of threads that it does not have anyway."""
    names = [mine]
    pools = places[mine].ready.pools
    for number in threads:
        if case.decoder_threads or not lines.same_threads(pools, number):
            line = own.with_threads(number, case.decoder_threads)
            names.append(places.name(line, f"{number} thread{'s' if number > 1 else ''}"))
    return names


def consumer_of(plan: PlanResult, tuned: LoaderResult, batch_size: int | None) -> Consumer:
    """A step of the batch size that the line has, at the fast end of what the plan predicts; the
    one that the loader was tuned for where it predicts none."""
    step = plan.speed.at(batch_size) if plan.speed is not None else None
    consumer = Consumer(tuned.step_s)
    if step is not None:
        given = fast_end(step, plan.gpu, plan.step)
        consumer = Consumer(given.step_s, given.work_s)
    return with_pages(consumer, tuned.probe.batch_bytes / PAGEABLE_BYTES_PER_S)
