"""Runs a family bare on the CPU and planned, and gathers what each said."""

from __future__ import annotations

import contextlib
import functools
import json
import os
import shutil
import sys
import sysconfig
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from corpus.family import Family
from corpus.files import changed, state_of
from corpus.processes import Done, run
from trainfit.memory.replay import Stream, live_at
from trainfit.report.sections.plan_facts import answer
from trainfit.results.plan import PlanResult
from trainfit.results.runs.continuation import whole
from trainfit.results.runs.recording import FREE, KINDS, MALLOC, STEP_END, Recording

ROOT = Path(__file__).resolve().parents[3]
INSTRUMENT = ROOT / "tests" / "real" / "instrument"
WORKPLACE = ROOT / "data" / "real"


@dataclass(frozen=True)
class Bare:
    """The script itself on the CPU, until its second optimizer step; ``found`` is what the
    instrument counted (empty: ``failure`` says why)."""

    wall_s: float
    cpu_s: float
    found: dict[str, Any]
    failure: str = ""


@dataclass(frozen=True)
class Planned:
    """One call of ``trainfit plan``: what was read from its file and its screen."""

    start: int
    returncode: int | None
    error: str
    wall_s: float
    cpu_s: float
    first_wall_s: float | None
    first_cpu_s: float | None
    files_changed: tuple[str, ...]
    figures: dict[str, Any] = field(default_factory=dict)
    notes: tuple[str, ...] = ()
    runs: int = 0


def places(family: Family) -> tuple[Path, Path, Path]:
    """Working folder, data and home of a family, made anew."""
    base = WORKPLACE / family.name
    shutil.rmtree(base, ignore_errors=True)
    folders = base / "work", base / "data", base / "home"
    for folder in folders:
        folder.mkdir(parents=True)
    return folders


def environment(home: Path, **more: str) -> dict[str, str]:
    """A user's, with a home of its own and no way to a network's waiting times."""
    kept = {k: v for k, v in os.environ.items() if not k.startswith(("PYTORCH_", "CUDA_", "HF_"))}
    path = f"{Path(sys.executable).parent}{os.pathsep}{kept.get('PATH', '')}"
    own = {"HOME": str(home), "PATH": path, "HF_HUB_OFFLINE": "1", "PYTHONPATH": str(ROOT / "src")}
    return {**kept, **own, **more}


@functools.cache
def read_packages() -> None:
    """Bring this environment's packages into the system's cache of files.

    Else the bare script, which comes first, pays for reading them, and not the plan.
    """
    for path in Path(sysconfig.get_path("purelib")).rglob("*"):
        if path.is_file():
            with contextlib.suppress(OSError), path.open("rb") as file:
                while file.read(1 << 20):
                    pass


def prepare(family: Family, work: Path, data: Path, home: Path) -> None:
    """Make the data; raises ``RuntimeError`` where the driver for it fails."""
    words = family.preparation(data)
    if words:
        env = environment(home, PYTHONPATH=str(INSTRUMENT), BARE_RUN=os.devnull)
        done = run(words, work, env, family.time_limit_s)
        if done.returncode != 0:
            raise RuntimeError(f"{family.name}: its data were not made: {done.stderr[-2000:]}")


def bare(family: Family, work: Path, data: Path, home: Path) -> Bare:
    """Run the script itself, in a copy of its folder."""
    copy, report = work.parent / "bare", work.parent / "bare.json"
    shutil.copytree(work, copy)
    path = f"{INSTRUMENT}{os.pathsep}{ROOT / 'src'}"
    env = environment(home, BARE_RUN=str(report), CUDA_VISIBLE_DEVICES="", PYTHONPATH=path)
    env["TORCHDYNAMO_DISABLE"] = "1"  # torchvision compiles its Python substitute for an operator
    words = family.words(data, family.starts[0], bare=True)
    done = run(words, copy, env, family.time_limit_s)
    if not report.exists():
        return Bare(done.wall_s, done.cpu_s, {}, _last_line(done) or "it took no optimizer step")
    found = json.loads(report.read_text(encoding="utf-8"))
    return Bare(done.wall_s, found["cpu_s"], found)


def planned(family: Family, work: Path, data: Path, home: Path, start: int) -> Planned:
    """Plan it from one starting batch size."""
    before, file = state_of(work, data, home), work.parent / f"plan-{start}.json"
    words = family.words(data, start, bare=False)
    verb = ["simulate"] if family.simulates else ["plan", "--no-loader"]
    call = [sys.executable, "-m", "trainfit", *verb, "--gpu", family.gpu, "--output", file]
    done = run([*call, "--", *words], work, environment(home), family.time_limit_s)
    (work.parent / f"plan-{start}.txt").write_text(
        done.stdout + "\n--- stderr ---\n" + done.stderr, encoding="utf-8"
    )
    times = (done.wall_s, done.cpu_s, done.first_wall_s, done.first_cpu_s)
    files = tuple(
        each.replace(str(work.parent), "") for each in changed(before, state_of(work, data, home))
    )
    if not file.exists():
        return Planned(start, done.returncode, _error(done), *times, files)
    if family.simulates:
        recording = Recording.load(file)
        notes = tuple(recording.header["assumptions"])
        found = figures_of_recording(recording)
        return Planned(start, done.returncode, "", *times, files, found, notes, 1)
    result = PlanResult.load(file)
    runs = len([line for line in done.stderr.splitlines() if "trainfit: simulating" in line])
    figures = figures_of(result, file)
    return Planned(start, done.returncode, "", *times, files, figures, _said(result), runs)


def _said(result: PlanResult) -> tuple[str, ...]:
    """Every remark and reason of a result."""
    limits, step = result.chosen.limits, result.step
    reasons = (
        result.basis_detail,
        limits.reason if limits is not None else "",
        step.why if step is not None else "",
        result.shapes.reason if result.shapes is not None else "",
        *(result.speed.notes if result.speed is not None else ()),
    )
    return (*result.notes, *(each for each in reasons if each))


def figures_of(result: PlanResult, file: Path) -> dict[str, Any]:
    """What the judge compares, as plain numbers."""
    first = result.recordings[0].recording(file) if result.recordings else None
    speed, chosen = result.speed, result.chosen
    limits, one = chosen.limits, speed.now if speed is not None else None
    return {
        "batch_size": result.now.batch_size,
        "effective_batch": result.step.effective_batch if result.step is not None else None,
        "samples_of_a_step_s": one.samples_per_s * one.seconds
        if one is not None and one.samples_per_s
        else None,
        "samples": result.samples or (limits.data_set if limits is not None else None),
        "fits": result.now.fits,
        "gpu_memory_bytes": result.gpu_memory_bytes,
        "device_bytes": result.now.memory.device_bytes,
        "allocated_bytes": result.now.memory.allocated_bytes,
        "recommended_batch": chosen.recommended_batch,
        "recommended_bytes": result.recommended.device_bytes if result.recommended else None,
        "largest_batch": chosen.largest_batch,
        "limits": asdict(limits) if limits is not None else None,
        "basis": result.basis,
        "basis_detail": result.basis_detail,
        "launch": result.launch,
        "step_s": result.now.step_s,
        "inference": result.inference is not None,
        "cache_bytes": result.generation.cache_bytes if result.generation else None,
        "evaluation": evaluation_of(result),
        **(persistent(first) if first is not None else {}),
    }


def figures_of_recording(recording: Recording) -> dict[str, Any]:
    """What the judge compares of one simulated run."""
    makeup, stream = recording.makeup, Stream.of(whole(recording))
    live = live_at(stream, len(stream.events) - 1)
    of_cache = live[whole(recording).alloc_kind[live] == KINDS.index("kv_cache")]
    return {
        "effective_batch": makeup.effective_batch if makeup is not None else None,
        "cache_bytes": int(stream.alloc_bytes[of_cache].sum()),
        "kinds": sorted({KINDS[kind] for kind in recording.alloc_kind.tolist()}),
        **persistent(recording),
    }


def evaluation_of(result: PlanResult) -> str:
    """What the plan says of the evaluation and the epoch's end: "simulated", "named" in the first
    line with the reason, "none" of a script without one, or "silent"."""
    end = result.epoch_end
    if end is None:
        return "none" if result.inference is not None else "silent"
    if end.evaluation == "simulated":
        return "simulated"
    if not end.reason:
        return "none"
    return "named" if end.reason in answer(result) or end.fits is False else "silent"


def persistent(recording: Recording) -> dict[str, int | None]:
    """Elements and bytes of what stays from step to step, as it was recorded."""
    events, kinds = recording.events, recording.alloc_kind
    codes, values = events % 4, events // 4
    known = (codes == MALLOC) | (codes == FREE)
    alloc = np.where(known, values, 0)
    change = np.where(codes == MALLOC, 1, -1) * recording.alloc_bytes[alloc]
    ends = np.flatnonzero(codes == STEP_END)
    last = ends[min(1, len(ends) - 1)] if len(ends) else len(events) - 1

    def alive(name: str) -> Any:
        mine = known & (kinds[alloc] == KINDS.index(name))
        return np.cumsum(np.where(mine, change, 0))

    parameters = recording.parameters() or ()
    return {
        "parameters": sum(int(np.prod(each.shape)) for each in parameters),
        "trained": sum(int(np.prod(each.shape)) for each in parameters if each.trained),
        "weight_bytes": int(alive("parameter")[last]),
        "gradient_bytes": int(alive("gradient")[: last + 1].max(initial=0)),
        "state_bytes": int(alive("optimizer_state")[last]),
        "recorded_steps": recording.steps,
    }


def _error(done: Done) -> str:
    if done.returncode is None:
        return f"the time limit ended it after {done.wall_s:.0f} s"
    lines = [line for line in done.stderr.splitlines() if line.startswith("trainfit: error: ")]
    return lines[0].removeprefix("trainfit: error: ") if lines else _last_line(done)


def _last_line(done: Done) -> str:
    lines = [line.strip() for line in done.stderr.splitlines() if line.strip()]
    return lines[-1] if lines else ""
