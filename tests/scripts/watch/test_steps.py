"""What optimizer steps of running loops are given, and which step stands for all others."""

from __future__ import annotations

import argparse
import importlib.util
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torch.utils.data import DataLoader, IterableDataset

import trainfit as package
from helpers_cli import SCRIPTS, json_of, trainfit
from trainfit.hardware import find_gpu
from trainfit.plan.command.parsing import parse_command
from trainfit.plan.runs.tracing import Tracer
from trainfit.plan.sizing.costing import machine_of
from trainfit.plan.sizing.speed import speed
from trainfit.results.runs.recording import PHASES, Recording
from trainfit.results.runs.steps import StepMakeup
from trainfit.scripts.dataloader import LoaderTracker
from trainfit.scripts.step_makeup import with_makeup
from trainfit.scripts.steps import StepWatch
from trainfit.simgpu.device.settling import steady_step
from trainfit.simgpu.interventions import Interventions
from trainfit.simgpu.patching import PatchSet
from trainfit.speed.work import Work, one_off, steady
from trainfit.torch_private.distributed import PIPELINE_STAGES

pytestmark = pytest.mark.usefixtures("warm")

SCRIPT = SCRIPTS / "accumulating.py"
_spec = importlib.util.spec_from_file_location("accumulating", SCRIPT)
assert _spec is not None and _spec.loader is not None
accumulating = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(accumulating)


class Enough(Exception):
    """As many steps as were wanted."""


def watched(loop: Callable[[], Any], steps: int = 3) -> tuple[StepMakeup, Recording]:
    """A loop on the simulated GPU, for so many optimizer steps."""
    patches = PatchSet()
    with package.simulate("T4", limited=False) as simulation:
        loaders = LoaderTracker()
        watch = StepWatch(simulation, loaders)

        def note(done: int) -> None:
            loaders.note_step()
            watch.note_step()
            if done == steps:
                raise Enough

        loaders.install(patches)
        watch.install(patches)
        simulation.on_step(note)
        try:
            loop()
        except Enough:
            pass
        finally:
            patches.restore()
        makeup = watch.makeup()
    assert makeup is not None
    return makeup, with_makeup(simulation.recording, makeup)


def run(name: str, steps: int = 3, **options: Any) -> tuple[StepMakeup, Recording]:
    given = {"batch_size": 8, "accumulate": 4, "samples": 4096, "workers": 0, **options}
    return watched(lambda: accumulating.LOOPS[name](argparse.Namespace(**given)), steps)


def figures(makeup: StepMakeup) -> tuple[int | None, ...]:
    return makeup.micro_batch, makeup.accumulation, makeup.effective_batch


def test_a_pass_for_the_shapes_of_a_pipeline_is_no_micro_batch(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """PyTorch's schedules call a stage's module before its first micro-batch, and backwards."""
    stages = ModuleType(PIPELINE_STAGES)

    class Stage:
        def __init__(self, model: nn.Module) -> None:
            self.model = model

        def _forward_metadata_inference(self, x: torch.Tensor) -> torch.Tensor:
            return self.model(x)  # type: ignore[no-any-return]

        def _backward_metadata_inference(self, y: torch.Tensor) -> None:
            torch.autograd.grad(y, [*self.model.parameters()], torch.ones_like(y))

    Stage.__module__, stages.Stage = PIPELINE_STAGES, Stage  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, PIPELINE_STAGES, stages)

    def loop() -> None:
        model = nn.Linear(16, 4).cuda()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        stage = Stage(model)
        for step in range(3):
            x = torch.ones(8, 16, device="cuda")
            if not step:
                stage._backward_metadata_inference(stage._forward_metadata_inference(x))
            for part in x.split(2):
                model(part).sum().backward()
            optimizer.step()
            optimizer.zero_grad()

    assert watched(loop)[0].per_step == (4, 4, 4)


@pytest.mark.parametrize(
    ("kind", "told"),
    [
        ("joined", (16, 1, 16, 1)),  # so many of one data set, as many of another
        ("accumulated", (16, 2, 32, 2)),
        ("in turn", (8, 1, 8, 1)),  # a call for each, of a domain of its own
        ("apart", (8, 1, 8, 1)),  # one trains, the other's is a target
    ],
)
def test_a_step_of_two_loaders(kind: str, told: tuple[int, ...]) -> None:
    """deep-text-recognition-benchmark's --batch_size 192 was told as one of 96."""
    numbers = torch.arange(512.0).reshape(64, 8)

    def loop() -> None:
        model = nn.Linear(8, 1).cuda()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        feeds = iter(DataLoader(numbers, 8)), iter(DataLoader(numbers + 1, 8))
        for number in range(8):
            one, other = (next(each).cuda() for each in feeds)
            if kind == "in turn":
                (model(one).sum() + model(other).sum()).backward()
            elif kind == "apart":
                (model(one) - other[:, :1]).square().sum().backward()
            else:
                model(torch.cat((one, other))).sum().backward()
            if kind != "accumulated" or number % 2:
                optimizer.step()
                optimizer.zero_grad()

    makeup, _ = watched(loop)
    assert (*figures(makeup), makeup.loader_batches) == told


# --- Loops of a script's own ----------------------------------------------------------------------


@pytest.mark.parametrize("loop", ["plain", "evaluating", "generated", "ahead", "summed"])
def test_samples_between_two_optimizer_steps(loop: str) -> None:
    makeup, _ = run(loop)
    assert figures(makeup) == (8, 4, 32)
    assert makeup.source == ("model calls" if loop == "generated" else "DataLoader")
    assert makeup.loader_batches == (None if loop == "generated" else 4)
    assert makeup.where is not None


@pytest.mark.parametrize(
    ("kind", "is_whole"),
    [("whole", True), ("by keyword", True), ("batches", False), ("refilled", False),
     ("learned", False), ("accumulated", False), ("loaded", False)],
)  # fmt: skip
def test_steps_of_the_same_tensors_are_of_all_samples(kind: str, is_whole: bool) -> None:
    """As of a graph; not a buffer that each batch is copied to, or an input that is learned."""

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = nn.Linear(16, 4)

        def forward(self, rows: torch.Tensor) -> torch.Tensor:
            return self.inner(rows).sum()

    def loop() -> None:
        model = Model().cuda()
        rows = torch.ones(64, 16, device="cuda", requires_grad=kind == "learned")
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        loader = iter(DataLoader(torch.ones(640, 16), 8))  # type: ignore[arg-type]
        while True:
            optimizer.zero_grad()
            if kind == "loaded":
                next(loader)
            if kind == "refilled":
                rows.copy_(torch.ones(64, 16))
            if kind == "accumulated":
                model(rows).backward()
            if kind == "by keyword":
                model(rows=rows).backward()
            else:
                model(rows[torch.arange(8)] if kind == "batches" else rows).backward()
            optimizer.step()

    assert watched(loop)[0].is_whole is is_whole


class _Timed(nn.Module):
    """Its layers are given time, batch and features; the model itself too, or ``turned``."""

    def __init__(self, kind: str, turned: bool) -> None:
        super().__init__()
        self.inner: nn.Module = nn.LSTM(16, 16)
        if kind == "attention":
            self.inner = nn.TransformerEncoder(
                nn.TransformerEncoderLayer(16, 2, 32), 1, enable_nested_tensor=False
            )
        self.turned = turned

    def forward(self, given: Any) -> Any:
        found = self.inner(given.transpose(0, 1) if self.turned else given)
        return (found[0] if isinstance(found, tuple) else found).sum()


@pytest.mark.parametrize("kind", ["recurrent", "attention"])
@pytest.mark.parametrize("turned", [False, True])
def test_samples_of_a_model_whose_first_dimension_is_the_time(kind: str, turned: bool) -> None:
    def loop() -> None:
        model = _Timed(kind, turned).cuda()
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        while True:
            optimizer.zero_grad()
            model(torch.ones((8, 35, 16) if turned else (35, 8, 16), device="cuda")).backward()
            optimizer.step()

    makeup, _ = watched(loop)
    assert figures(makeup) == (8, 1, 8) and makeup.source == "model calls"


def test_pieces_of_a_batch_stay_such_where_batch_first_was_forgotten() -> None:
    def loop() -> None:
        model = _Timed("attention", turned=False).cuda()
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        for batch in DataLoader(torch.ones(64, 35, 16), 8):  # type: ignore[arg-type]
            optimizer.zero_grad()
            for piece in batch.cuda().chunk(4):
                model(piece).backward()
            optimizer.step()

    assert figures(watched(loop)[0]) == (2, 4, 8)


def test_a_batch_in_pieces_and_a_batch_in_two_views() -> None:
    assert figures(run("pieces")[0]) == (2, 4, 8)
    assert figures(run("views")[0]) == (8, 1, 8)


def test_the_last_step_of_an_epoch_is_short() -> None:
    makeup, recording = run("plain", 6, samples=72)  # nine batches: 4, 4, 1
    assert makeup.per_step == (4, 4, 1, 4, 4, 1)
    assert figures(makeup) == (8, 4, 32)
    assert makeup.varied
    assert steady(recording) == 4  # not the last, which has one batch
    whole = Work.of_step(recording, 1)
    assert Work.of_steady_step(recording).table.tolist() == whole.table.tolist()


def test_workers_that_load_ahead_do_not_count() -> None:
    assert figures(run("plain", samples=72, workers=2)[0]) == (8, 4, 32)


class Stream(IterableDataset[torch.Tensor]):
    def __iter__(self) -> Any:
        return iter(torch.randn(1000, 16))


def test_batches_of_an_iterable_data_set() -> None:
    def loop() -> None:
        model = nn.Linear(16, 4).cuda()
        optimizer = torch.optim.SGD(model.parameters())
        for number, batch in enumerate(DataLoader(Stream(), 6), 1):
            model(batch.cuda()).sum().backward()
            if number % 2 == 0:
                optimizer.step()

    assert figures(watched(loop)[0]) == (6, 2, 12)


def test_two_networks_with_an_optimizer_each() -> None:
    def loop(loader: Any) -> None:
        networks = [nn.Linear(16, 16).cuda() for _ in range(2)]
        first, second = (torch.optim.Adam(each.parameters()) for each in networks)
        for real in loader:
            (
                networks[0](real.cuda()) - networks[0](networks[1](real.cuda()).detach())
            ).sum().backward()
            first.step()
            networks[0](networks[1](real.cuda())).sum().backward()
            second.step()

    data = torch.randn(200, 16)
    assert figures(watched(lambda: loop(DataLoader(data, 5)))[0]) == (5, 1, 5)
    without = watched(lambda: loop(torch.randn(5, 16) for _ in range(20)))[0]
    assert without.effective_batch is None and "several optimizers" in without.why


def test_two_optimizers_of_one_model_take_one_step() -> None:
    def loop() -> None:
        model = nn.Sequential(nn.Linear(16, 16), nn.Linear(16, 4)).cuda()
        both = [torch.optim.SGD(part.parameters()) for part in model]
        for _ in range(10):
            for _ in range(3):
                model(torch.randn(5, 16).cuda()).sum().backward()
            for each in both:
                each.step()

    assert figures(watched(loop)[0]) == (5, 3, 15)


def test_an_optimizer_that_evaluates_its_closure_again_and_again() -> None:
    def loop() -> None:
        model = nn.Linear(16, 4).cuda()
        optimizer = torch.optim.SGD(model.parameters())
        x = torch.randn(5, 16).cuda()

        def closure() -> torch.Tensor:
            loss = model(x).sum()
            loss.backward()
            return loss

        def several() -> torch.Tensor:
            return [closure() for _ in range(7)][-1]

        for _ in range(10):
            optimizer.step(several)  # type: ignore[arg-type]

    assert figures(watched(loop)[0]) == (5, 1, 5)


def test_checkpointing_calls_modules_again_in_the_backward_pass() -> None:
    def loop() -> None:
        model = nn.Sequential(*(nn.Linear(16, 16) for _ in range(4))).cuda()
        optimizer = torch.optim.SGD(model.parameters())
        for _ in range(10):
            for _ in range(2):
                x = torch.randn(5, 16).cuda()
                found = torch.utils.checkpoint.checkpoint_sequential(
                    model, 2, x, use_reentrant=False
                )
                found.sum().backward()
            optimizer.step()

    found = watched(loop)[0]
    assert found.per_step == (2, 2, 2) or found.effective_batch is None


def test_a_model_that_is_called_by_keywords() -> None:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.words, self.head = nn.Embedding(100, 8), nn.Linear(8, 1)

        def forward(self, *, ids: torch.Tensor) -> torch.Tensor:
            return self.head(self.words(ids))  # type: ignore[no-any-return]

    def loop() -> None:
        model = Model().cuda()
        optimizer = torch.optim.SGD(model.parameters())
        for _ in range(10):
            model(ids=torch.zeros(6, 20, dtype=torch.long).cuda()).sum().backward()
            optimizer.step()

    assert figures(watched(loop)[0]) == (6, 1, 6)


# --- The step that stands for all others ----------------------------------------------------------


def test_a_layer_that_is_made_by_its_first_call() -> None:
    def loop() -> None:
        model = nn.Sequential(nn.LazyLinear(4), nn.LazyLinear(1)).cuda()
        optimizer = None
        while True:
            loss = model(torch.randn(8, 2, device="cuda")).sum()
            optimizer = optimizer or torch.optim.SGD(model.parameters(), lr=0.1)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()

    assert figures(watched(loop)[0]) == (8, 1, 8)


def test_what_is_done_once_is_no_part_of_a_step() -> None:
    """One step alone is costed like the steps after it: without uploads and the state's making."""

    def loop() -> None:
        model = nn.Sequential(nn.Linear(256, 256), nn.ReLU(), nn.Linear(256, 8))
        optimizer = None
        for _ in range(5):
            model.cuda()  # moves something the first time only
            optimizer = optimizer or torch.optim.AdamW(model.parameters())
            optimizer.zero_grad()
            model(torch.randn(32, 256).cuda()).sum().backward()
            optimizer.step()

    alone, several = (watched(loop, steps)[1] for steps in (1, 4))
    ones, later = Work.of_steady_step(alone), Work.of_steady_step(several)
    kinds = sorted(ones.column("kind").tolist())
    assert kinds == sorted(later.column("kind").tolist())
    machine = machine_of(package.simulate("T4").gpu)
    one, other = speed(alone, 32, machine), speed(several, 32, machine)
    assert one is not None and other is not None
    assert one.now.seconds == pytest.approx(other.now.seconds, rel=0.02)
    assert "only one step was simulated" in one.notes[0] and not other.notes
    assert len(Work.of_step(alone, 0).table) > len(ones.table)


def test_a_script_that_calls_no_module_keeps_its_forward_pass() -> None:
    def loop() -> None:
        weight = torch.randn(8, 8, device="cuda", requires_grad=True)
        optimizer = torch.optim.SGD([weight])
        (torch.randn(4, 8, device="cuda") @ weight).sum().backward()
        optimizer.step()

    recording = watched(loop, 1)[1]
    assert not (recording.op_phase == PHASES.index("forward")).any()
    names = [recording.strings[op] for op in recording.op_name[~one_off(recording)]]
    assert "aten.mm.default" in names


def test_weights_that_are_quantized_while_they_are_loaded_are_no_input() -> None:
    """Their copies on the GPU are gone when the model is called; a batch is not."""

    def loop() -> None:
        model = torch.nn.Linear(64, 64).cuda()
        for _ in range(3):
            whole = torch.randn(1 << 16).cuda()
            model.register_buffer("rounded", whole.to(torch.int8))
            del whole
        batch = torch.randn(4, 64).cuda()
        optimizer = torch.optim.SGD(model.parameters())
        model(batch).sum().backward()
        optimizer.step()

    recording = watched(loop, 1)[1]
    left = recording.op_phase[~one_off(recording)]
    assert list(left).count(PHASES.index("input")) == 1


def test_the_least_time_of_a_step_is_without_moving_the_model() -> None:
    def compute(steps: int) -> Any:
        patches = PatchSet()
        with package.simulate("T4", limited=False) as simulation:
            watch = Interventions(simulation, (), survey=False)
            watch.install(patches)
            try:
                model = nn.Linear(2048, 2048).cuda()
                optimizer = torch.optim.SGD(model.parameters())
                for _ in range(steps):
                    model(torch.randn(4, 2048).cuda()).sum().backward()
                    optimizer.step()
                    optimizer.zero_grad()
            finally:
                patches.restore()
            return watch.compute()

    assert compute(1).moved_bytes == compute(4).moved_bytes
    assert compute(1).flops == compute(4).flops > 0


@given(st.lists(st.tuples(st.integers(1, 4), st.integers(1, 4)), min_size=1, max_size=12))
def test_the_steady_step_is_never_the_first_of_several(steps: list[tuple[int, int]]) -> None:
    operators, work = [o for o, _ in steps], [w for _, w in steps]
    found = steady_step(operators, work)
    assert (found == 0) == (len(steps) == 1)
    later = operators[1:] or operators
    assert later.count(operators[found]) == max(map(later.count, later))


@given(st.integers(2, 10), st.integers(1, 9))
def test_equal_steps_are_told_by_the_last(steps: int, operators: int) -> None:
    assert steady_step([operators] * steps, [1] * steps) == steps - 1


# --- End to end -----------------------------------------------------------------------------------


def planned(cwd: Path, *words: str) -> dict[str, Any]:
    done = trainfit("plan", "--gpu", "T4", "--json", "--", "python", SCRIPT, *words, cwd=cwd)
    assert done.returncode == 0, done.stderr
    return json_of(done)


def test_of_two_steps_the_one_with_a_checkpoint_does_not_stand_for_all() -> None:
    """Its copies of the weights to the host made a step of 6 ms one of 18."""
    assert steady_step([1086, 645, 937], [9, 5, 5]) == 1
    assert steady_step([1086, 937, 645], [9, 5, 5]) == 2
    # Where most evaluate, that is what a step is.
    assert steady_step([1086, 937, 645, 937], [9, 5, 5, 5]) == 3


@pytest.mark.slow
def test_accumulated_and_whole_batches_are_as_fast_as_their_work(tmp_path: Path) -> None:
    words = ["--loop=plain", "--batch_size={batch_size:8}", "--accumulate={grad_accum:4}"]
    found = planned(tmp_path, *words)
    now = found["speed"]["now"]
    assert found["step"]["effective_batch"] == 32
    assert now["samples_per_s"] == pytest.approx(32 / now["seconds"])
    assert found["speed"]["epoch_s"] == pytest.approx(4096 / now["samples_per_s"])
    at_32 = next(each for each in found["speed"]["curve"] if each["batch_size"] == 32)
    assert at_32["samples_per_s"] == pytest.approx(32 / at_32["seconds"])  # one batch
    best = found["now"]["recommended_batch"]
    assert f"--batch_size={best} " in found["launch"] + " "
    assert f"--accumulate={max(1, round(32 / best))}" in found["launch"]


@pytest.mark.slow
def test_the_same_work_in_one_batch_or_in_four(tmp_path: Path) -> None:
    """Wide enough that the GPU's work, not its launches, is what takes time."""
    script = tmp_path / "wide.py"
    script.write_text(
        SCRIPT.read_text().replace("WIDTH = 64", "WIDTH = 8192").replace("256", "8192")
    )
    rates = []
    for batch, accumulate in ((1024, 4), (4096, 1)):
        options = [f"--batch_size={batch}", f"--accumulate={accumulate}"]
        command = parse_command(["python", str(script), "--loop=generated", *options])
        with Tracer(command, find_gpu("T4"), steps=3) as tracer:
            recording = tracer.trace().recording
        assert recording is not None
        found = speed(recording, batch, machine_of(package.simulate("T4").gpu))
        assert found is not None
        rates.append(found.now.samples_per_s)
    assert rates[0] == pytest.approx(rates[1], rel=0.1)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("loop", "library"),
    [("accelerated", "Accelerate"), ("lightning", "Lightning"), ("trainer", "Transformers")],
)
def test_loops_of_libraries(loop: str, library: str) -> None:
    command = parse_command([sys.executable, str(SCRIPT), f"--loop={loop}", "--accumulate=2"])
    with Tracer(command, find_gpu("T4")) as tracer:
        trace = tracer.trace()
    assert trace.recording is not None, trace.output
    makeup = trace.recording.makeup
    assert makeup is not None
    assert figures(makeup) == (8, 2, 16)
    assert makeup.loop == library
    assert makeup.loader_batches == 2


def test_the_samples_of_a_step_are_those_of_the_loader_with_the_least_share() -> None:
    """FixMatch: labelled images, and seven times as many others with each of their batches."""

    def loop() -> None:
        model = nn.Linear(4, 1).cuda()
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        labelled = iter(DataLoader(torch.zeros(64, 4), 2))  # type: ignore[arg-type]
        others = iter(DataLoader(torch.zeros(512, 4), 14))  # type: ignore[arg-type]
        for _ in range(8):
            batch = torch.cat((next(labelled), next(others))).cuda()
            optimizer.zero_grad()
            model(batch).mean().backward()
            optimizer.step()

    found, _ = watched(loop, 4)
    assert (found.micro_batch, found.effective_batch) == (2, 2)


def test_steps_of_an_optimizer_that_never_has_gradients() -> None:
    """It was made of another model's parameters, as before FSDP shards them: its steps are steps,
    though they change nothing. Before any pass they are those of a script that resumes."""

    def loop() -> None:
        model, other = nn.Linear(64, 64).cuda(), nn.Linear(64, 64).cuda()
        optimizer = torch.optim.SGD(other.parameters(), lr=0.1)
        for _ in range(3):
            optimizer.step()
        for batch in DataLoader(torch.ones(64, 64), batch_size=8):
            model(batch.cuda()).sum().backward()
            optimizer.step()

    _, recording = watched(loop)
    assert recording.steps == 3
