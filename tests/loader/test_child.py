"""The process that runs a script up to its loader: what a tuner finds there, and failures."""

from __future__ import annotations

import dataclasses
import json
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pytest
import torch
from torch.utils.data import DataLoader, TensorDataset

import trainfit
from helpers_cli import ROOT, SCRIPTS
from helpers_warm import MEASURING, warm_runs
from trainfit.entrypoint import UnknownNameError
from trainfit.hardware import find_gpu
from trainfit.loader.child import LoaderObservation, workload_from, workload_of
from trainfit.loader.measure.workload import LoaderError
from trainfit.plan.command.parsing import parse_command
from trainfit.plan.dataloader.child import step_from
from trainfit.plan.dataloader.measurement import tune_command
from trainfit.plan.dataloader.process import Listener, Stage
from trainfit.plan.runs.failures import ScriptError
from trainfit.results.loader import LoaderResult
from trainfit.results.runs.measurement import Consumer
from trainfit.results.runs.spec import LoaderSpec, RunSpec, TuningSpec
from trainfit.results.runs.trace import Compute, TraceOutcome
from trainfit.scripts.dataloader import LoaderTracker, is_simulated
from trainfit.simgpu.patching import PatchSet

STUB = f"{ROOT / 'tests' / 'tuning_stub'}{os.pathsep}{ROOT / 'tests'}{os.pathsep}{ROOT / 'src'}"


#: With nothing known of a step.
MEASURED = RunSpec(loading=LoaderSpec())


@pytest.fixture
def tuned(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Callable[..., LoaderResult]:
    """Tunes with the stub of ``tests/tuning_stub``, whose result says what it found."""
    monkeypatch.setenv("PYTHONPATH", STUB)
    monkeypatch.chdir(tmp_path)

    def tune(*words: str, options: RunSpec = MEASURED, **more: Any) -> LoaderResult:
        command = parse_command(words) if words else None
        for name in ("STUB_TUNER", "STUB_METHODS"):
            if name in more:
                monkeypatch.setenv(name, more.pop(name))
        with warm_runs(MEASURING):
            return tune_command(command, options, **more).result

    return tune


def facts(result: LoaderResult) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(result.notes[0])
    return found


def write(folder: Path, name: str, text: str) -> str:
    (folder / name).write_text(text)
    return name


@pytest.mark.slow
def test_the_loader_is_measured_as_in_the_scripts_own_process(
    tuned: Callable[..., LoaderResult], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its data set is defined in the script: workers started by spawn must import that again."""
    monkeypatch.chdir(SCRIPTS)
    gpu = find_gpu("RTX 4090")
    tuning = TuningSpec(seconds=3.0, confirm=2, max_workers=5, ranks=2)
    options = RunSpec(gpu=gpu, loading=LoaderSpec(tuning))
    words = ("python", "train.py", "--workers=2", "--samples=500")
    result = tuned(*words, options=options, STUB_METHODS="fork spawn")
    found = facts(result)
    assert found["main"] == str(SCRIPTS / "train.py")
    assert found["argv"] == ["train.py", "--workers=2", "--samples=500"]
    assert found["cwd"] == found["path"] == str(SCRIPTS)
    assert found["workers"] == 0 and found["threads"] == []
    assert not found["simulating"] and not found["cuda"]
    assert found["present"] == 2
    batch = ["Tensor", "cpu", [8, 64, 256]]
    assert found["batches"] == {"fork": batch, "spawn": batch}
    assert found["options"] == {
        "seconds": 3.0,
        "confirm": 2,
        "thorough": True,
        "max_workers": 5,
        "any_order": False,
        "ranks": 2,
    }
    share, whole = found["cores"]
    assert whole == 2 * share  # the probe has the whole machine
    assert result.command == "python train.py --workers=2 --samples=500"
    assert result.loader.startswith("train.py:") and "Samples, batch size 8" in result.loader
    assert result.step_source
    assert result.notes[1] == "a core is not known"


PERSISTENT = """
import torch
from torch.utils.data import DataLoader, TensorDataset
def rebuilt(loader):
    return DataLoader(loader.dataset, batch_sampler=loader.batch_sampler, num_workers=1,
                      persistent_workers=True, pin_memory=True)
class Own(DataLoader):
    pass
first = Own(TensorDataset(torch.ones(64, 4)), batch_size=4, num_workers=3)
loader = rebuilt(first)
model = torch.nn.Linear(4, 4).cuda()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
batches = iter(loader)
while True:
    try:
        (batch,) = next(batches)
        model(batch.cuda()).sum().backward()
        optimizer.step()
    except:
        print("nothing stops me")
"""


@pytest.mark.slow
def test_a_script_that_cannot_be_stopped_and_a_rebuilt_loader_with_persistent_workers(
    tuned: Callable[..., LoaderResult], tmp_path: Path
) -> None:
    """The original one is measured, as the user wrote it, and no worker is left."""
    options = RunSpec(loading=LoaderSpec(TuningSpec(Consumer(0.25, source="given"))))
    result = tuned("python", write(tmp_path, "stubborn.py", PERSISTENT), options=options)
    found = facts(result)
    assert found["loader"] == "Own" and found["present"] == 3
    assert found["workers"] == 0 and not found["iterator"] and found["threads"] == []
    assert not found["simulating"]
    assert found["batches"] == {"fork": ["Tensor", "cpu", [4, 4]]}
    assert result.step_s == found["consumer"] == 0.25


STARTED = """
import os, subprocess, sys
import torch

if "RANK" in os.environ:
    data = torch.utils.data.TensorDataset(torch.zeros(64, 4))
    model = torch.nn.Linear(4, 1).cuda()
    optimizer = torch.optim.SGD(model.parameters())
    for (batch,) in torch.utils.data.DataLoader(data, batch_size=8):
        model(batch.cuda()).sum().backward()
        optimizer.step()
else:
    job = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1"}
    subprocess.run([sys.executable, __file__], env={**os.environ, **job}, check=True)
"""


def test_what_starts_the_script_as_a_process_runs_it_here(
    tuned: Callable[..., LoaderResult], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As trl does, by accelerate launch."""
    for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    result = tuned("python", write(tmp_path, "started.py", STARTED))
    assert result.loader.startswith("started.py:9") and "batch size 8" in result.loader


def test_a_script_that_fails_before_its_first_step(
    tuned: Callable[..., LoaderResult], tmp_path: Path
) -> None:
    words = ("python", write(tmp_path, "bad.py", "import torch\n1 / 0"))
    with pytest.raises(
        ScriptError, match=r"bad.py: the script failed at .*bad.py:2 \(Zero"
    ) as told:
        tuned(*words)
    assert "ZeroDivisionError" in told.value.script_output
    assert "\n" not in str(told.value)


def test_a_data_set_with_less_than_a_batch(
    tuned: Callable[..., LoaderResult], tmp_path: Path
) -> None:
    script = """
import torch
from torch.utils.data import DataLoader, TensorDataset
optimizer = torch.optim.SGD([torch.ones(4, requires_grad=True, device="cuda")], lr=0.1)
for batch in DataLoader(TensorDataset(torch.ones(12, 4)), batch_size=16, drop_last=True):
    pass
"""
    with pytest.raises(ScriptError) as told:
        tuned("python", write(tmp_path, "few.py", script))
    assert "the data set has 12 samples, fewer than one batch of 16 with drop_last" in str(
        told.value
    )


@pytest.mark.slow
def test_workers_that_never_give_a_batch_are_explained(
    tuned: Callable[..., LoaderResult], tmp_path: Path
) -> None:
    script = """
from torch.utils.data import DataLoader
for batch in DataLoader(range(8), 4, num_workers=1, collate_fn=lambda rows: (x for x in rows)):
    pass
"""
    options = RunSpec(loading=LoaderSpec(script_limit_s=5.0))
    with pytest.raises(ScriptError) as told:
        tuned("python", write(tmp_path, "stuck.py", script), options=options)
    cause = told.value.cause
    assert cause is not None and cause.kind == "batch_not_picklable" and "generator" in cause.title


@pytest.mark.slow
def test_a_step_that_cannot_be_simulated_does_not_hinder_its_loader(
    tuned: Callable[..., LoaderResult], tmp_path: Path
) -> None:
    script = """
import torch
from torch.utils.data import DataLoader, TensorDataset
library = torch.library.Library("mine", "DEF")
library.define("op(Tensor x) -> Tensor")
library.impl("op", lambda x: x * 2, "CUDA")
for (batch,) in DataLoader(TensorDataset(torch.ones(64, 4)), batch_size=4):
    torch.ops.mine.op(batch.cuda())
"""
    options = dataclasses.replace(MEASURED, gpu=find_gpu("RTX 4090"))
    result = tuned("python", write(tmp_path, "odd.py", script), options=options)
    assert result.loader == "odd.py:7: TensorDataset, batch size 4"
    assert "could not be simulated (cannot simulate mine.op" in result.notes[-1]
    assert result.step_s == 0 and "no simulated step bounds it" in result.step_source


@pytest.mark.slow
def test_a_script_that_trains_without_an_optimizer(
    tuned: Callable[..., LoaderResult], tmp_path: Path
) -> None:
    script = """
import torch
from torch.utils.data import DataLoader, TensorDataset
weight = torch.ones(4, requires_grad=True, device="cuda")
while True:
    for (batch,) in DataLoader(TensorDataset(torch.ones(64, 4)), batch_size=4):
        (weight * batch.cuda()).sum().backward()
        weight.data -= weight.grad
"""
    loading = LoaderSpec(TuningSpec(Consumer(0.1, source="given")))
    options = RunSpec(time_limit_s=20.0, loading=loading)
    result = tuned("python", write(tmp_path, "own.py", script), options=options)
    assert "the DataLoader that gave the last" in result.notes[-2]
    assert "made no optimizer step in " in result.notes[-2]


DATA = """
import torch
from torch.utils.data import DataLoader, TensorDataset
def make():
    return DataLoader(TensorDataset(torch.ones(64, 4)), batch_size=16)
def samples():
    return TensorDataset(torch.ones(64, 4))
def nothing():
    return {}
def fails():
    raise KeyError("no\\nsuch path")
ready = make()
"""


@pytest.fixture
def data(tmp_path: Path) -> RunSpec:
    place = f"{tmp_path / write(tmp_path, 'mydata.py', DATA)}:make"
    return RunSpec(loading=LoaderSpec(place=place))


@pytest.mark.slow
def test_a_callable_in_a_commands_place(tuned: Callable[..., LoaderResult], data: RunSpec) -> None:
    result = tuned(options=data, STUB_METHODS="spawn")
    assert facts(result)["batches"] == {"spawn": ["Tensor", "cpu", [16, 4]]}
    assert result.loader.endswith("mydata.py:make: TensorDataset, batch size 16")
    assert result.step_s == 0 and "a step time of 0" in result.step_source


def test_what_was_kept_survives_the_end_of_the_process(
    tuned: Callable[..., LoaderResult], data: RunSpec
) -> None:
    result = tuned(options=data, STUB_TUNER="keep-die")
    assert result.recommended.num_workers == 4
    assert "killed by SIGKILL while one worker; results so far" in result.notes[-1]


def test_a_hang_ends_at_the_time_limit_with_all_processes(
    tuned: Callable[..., LoaderResult], data: RunSpec
) -> None:
    """The clock jumps past the limit once the stub hangs, with a process group of its own."""
    late = SimpleNamespace(by=0.0, pid=0)

    class Watch(Listener):
        def stage(self, stage: Stage) -> None:
            if stage.text.startswith("process "):
                late.pid, late.by = int(stage.text.split()[1]), 1e6

    result = tuned(
        options=data,
        STUB_TUNER="keep-hang",
        progress=Watch(),
        clock=lambda: time.monotonic() + late.by,
    )
    assert "the time limit of 10 min was reached while process" in result.notes[-1]
    assert late.pid
    assert ends(late.pid)


def ends(pid: int) -> bool:
    """Is the process gone, or a zombie that nobody waits for? It was killed a moment ago."""
    for _ in range(500):
        try:
            if psutil.Process(pid).status() == psutil.STATUS_ZOMBIE:
                return True
        except psutil.NoSuchProcess:
            return True
        time.sleep(0.01)
    return False


def test_a_measurement_that_fails_is_told_in_one_line(
    tuned: Callable[..., LoaderResult], data: RunSpec
) -> None:
    with pytest.raises(ScriptError, match="could not be measured: RuntimeError: the stub fails"):
        tuned(options=data, STUB_TUNER="fail")


# -- in this process ---------------------------------------------------------------------------


@pytest.fixture
def imports(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """Imports of this test leave nothing behind."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.setattr(sys, "modules", dict(sys.modules))
    write(tmp_path, "mydata.py", DATA)
    return tmp_path


@pytest.mark.parametrize(
    ("place", "batch", "words"),
    [
        ("mydata", None, "write MODULE:CALLABLE"),
        ("absent.py:make", None, "no file 'absent.py'; check the path"),
        ("absent.part:make", None, "no module 'absent'; check the name"),
        ("mydata:absent", None, "mydata has no 'absent'; it has "),
        ("mydata:nothing", None, "returns an object of type dict; expected a DataLoader"),
        ("mydata.py:samples", None, "returns a data set (TensorDataset); add --batch-size N"),
        ("mydata.py:make", 4, "which has a batch size; remove --batch-size"),
        ("json.py:make", None, "Python has another module 'json'; rename the file"),
    ],
)
def test_what_is_no_loader(imports: Path, place: str, batch: int | None, words: str) -> None:
    write(imports, "json.py", "")
    with pytest.raises((LoaderError, UnknownNameError)) as told:
        workload_from(place, batch)
    assert words in str(told.value) and place in str(told.value)


def test_loaders_and_data_sets_by_name(imports: Path) -> None:
    assert workload_from("mydata:make", None).batch_size == 16
    assert workload_from("mydata.py:ready", None).batch_size == 16
    assert workload_from("mydata:samples", 5).batch_size == 5


def found(loader: Any, *, loaders: int = 1, on_gpu: bool = False) -> LoaderObservation:
    return LoaderObservation(TraceOutcome("finished", 1, 1.0, loaders=loaders), loader, on_gpu)


def test_loaders_that_no_worker_can_help() -> None:
    with trainfit.simulate("RTX 4090"):
        held = {"deep": [{"inner": torch.ones(2, 2, device="cuda")}]}
    assert is_simulated(held) and not is_simulated({"deep": [torch.ones(2)]})
    held_set = TensorDataset(torch.ones(2, 2))
    held_set.cache = held  # type: ignore[attr-defined]
    with pytest.raises(LoaderError, match=r"\(TensorDataset\) holds tensors on the GPU: .* keep"):
        workload_of(found(DataLoader(held_set)))
    plain = DataLoader(TensorDataset(torch.ones(2, 2)))
    with pytest.raises(LoaderError, match=r"already on the GPU, .*; move them in the loop"):
        workload_of(found(plain, on_gpu=True))
    with pytest.raises(LoaderError, match="creates 2 DataLoaders, but none returned a batch"):
        workload_of(found(None, loaders=2))
    assert workload_of(found(plain)).name == "TensorDataset"


def test_which_loader_fed_the_step_is_kept_although_the_script_drops_it() -> None:
    patches = PatchSet()
    for keep in (True, False):
        tracker = LoaderTracker(keep=keep)
        tracker.install(patches)
        for size in (2, 3):
            next(iter(DataLoader(TensorDataset(torch.ones(6, 1)), size)))
            tracker.note_step()
        patches.restore()
        loader = tracker.loader()
        assert (loader.batch_size if loader is not None else None) == (2 if keep else None)
        # What it was is known all the same: scripts often keep nothing but the iterator.
        fed = tracker.feeding()
        assert fed is not None
        assert (fed.index, fed.batch_size, fed.samples, fed.batches) == (0, 2, 6, 1)
        assert fed.dataset == "TensorDataset"


def test_the_step_is_predicted_else_bounded_by_its_work_else_takes_no_time() -> None:
    gpu = find_gpu("RTX 4090")
    with trainfit.simulate("RTX 4090", limited=False) as simulation:
        model = torch.nn.Linear(2048, 2048).cuda()
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        model(torch.ones(64, 2048, device="cuda")).sum().backward()
        optimizer.step()
    recording = simulation.recording
    compute = Compute(10**12, 20, 3, {"matmul/bfloat16": 10**12}, kernels=3)
    trace = TraceOutcome("finished", 1, 1.0, compute=compute, autocast="bfloat16")
    predicted = step_from(trace, gpu, recording)
    assert 0 < predicted.step_s < 0.01
    assert predicted.source.startswith("lower bound for RTX 4090 (90% interval: ")
    least = step_from(trace, gpu)
    assert "no RTX 4090 runs the step in less than" in least.source and least.step_s > 0.001
    # What torch.compile fuses was not seen; a device made to measure has no rates.
    compiled = dataclasses.replace(trace, compute=dataclasses.replace(compute, compiled=True))
    assert "no RTX 4090" in step_from(compiled, gpu, recording).source
    custom = find_gpu("custom:24GiB")
    assert "no rates: give --step-time" in step_from(trace, custom, recording).source
    assert step_from(TraceOutcome("unsupported", 0, 1.0), gpu).step_s == 0
