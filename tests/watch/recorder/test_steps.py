"""What the recorder makes of trainings in this process: steps, phases, evaluations, events."""

from __future__ import annotations

import collections
import gc
import inspect
import math
import os
import subprocess
import threading
import time
import traceback
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torch.utils.data import DataLoader, IterableDataset, TensorDataset

from helpers_recorder import recorded
from trainfit.hooks.learning import LearningObserver
from trainfit.results.runs import tables
from trainfit.results.runs.watched import load_run
from trainfit.simgpu.patching import PatchSet
from trainfit.torch_private.data_loading import MapFetcher, WorkerError
from trainfit.watch.judge import judge
from trainfit.watch.recorder import phases as ph
from trainfit.watch.recorder import recorder as recorder_module
from trainfit.watch.recorder.job import CalledModels, InputSizes, ReadyBatches
from trainfit.watch.recorder.looks import stacks
from trainfit.watch.recorder.looks.stacks import (
    StackCounts,
    in_sampler,
    is_busy_elsewhere,
    users_stack,
)
from trainfit.watch.recorder.phases import PhaseClock
from trainfit.watch.recorder.step_recorder import StepRecorder
from trainfit.watch.recorder.worker_hooks import FetchHooks

DATA = TensorDataset(torch.randn(32, 4), torch.randint(0, 2, (32,)))


class Net(nn.Module):
    def __init__(self, width: int = 8) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(4, width), nn.ReLU(), nn.Linear(width, 2))

    def forward(self, samples: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.layers(samples)
        return out


def loss_of(model: nn.Module, batch: Any) -> torch.Tensor:
    return nn.functional.cross_entropy(model(batch[0]), batch[1])


@pytest.mark.parametrize("steps", [0, 8])
def test_averaged_weights_that_come_after_steps_count_as_trained(steps: int) -> None:
    models, model = CalledModels(), Net()
    trained = models.elements(model)
    for _ in range(steps):
        models.begin()
        models.extra(1)
    averaged, other = Net().eval().requires_grad_(False), Net(9).eval().requires_grad_(False)
    # In the first steps it is a teacher, which each step calls.
    assert (models.elements(averaged), models.elements(other)) == (trained * (steps > 0), 0)


# -- phases ---------------------------------------------------------------------------------------


@given(st.lists(st.tuples(st.integers(0, 8), st.integers(1, 5), st.booleans()), max_size=40))
def test_phases_exclude_each_other_and_miss_nothing(moves: list[tuple[int, int, bool]]) -> None:
    now = [0.0]
    clock = PhaseClock(lambda: now[0])
    tokens: list[int] = []
    for phase, seconds, leaves in moves:
        if leaves and tokens:
            clock.leave(tokens.pop())
        else:
            tokens.append(clock.enter(phase))
        now[0] += seconds
    clock.update()
    assert math.isclose(sum(clock.seconds), now[0])
    assert min(clock.seconds) >= 0


def test_the_inner_phase_counts_but_a_checkpoint_takes_all_within() -> None:
    now = [0.0]
    clock = PhaseClock(lambda: now[0])
    outer = clock.enter(ph.FORWARD)
    now[0] += 1
    inner = clock.enter(ph.SYNC)
    now[0] += 2
    clock.leave(inner)
    saving = clock.enter(ph.CHECKPOINT)
    assert clock.enter(ph.SYNC) == ph.NOT_ENTERED
    now[0] += 4
    clock.leave(saving)
    clock.leave(outer)
    assert clock.seconds[ph.FORWARD] == 1
    assert clock.seconds[ph.SYNC] == 2
    assert clock.seconds[ph.CHECKPOINT] == 4


def test_a_phase_that_an_exception_left_open_ends_with_the_one_around_it() -> None:
    clock = PhaseClock(lambda: 0.0)
    outer = clock.enter(ph.BACKWARD)
    clock.enter(ph.SYNC)
    clock.leave(outer)
    assert clock.depth == 0 and clock.current == ph.OTHER


# -- batches that are ready ------------------------------------------------------------------------


class Queue:
    def __init__(self, batches: int) -> None:
        self.batches = batches

    def qsize(self) -> int:
        return self.batches


@pytest.mark.parametrize(
    ("early", "in_queue", "later", "ready", "had_next"),
    [
        ((), 0, (), 0, False),
        ((5,), 0, (6,), 1, True),  # 5 is the next one, and is there
        ((6, 7), 0, (6, 7), 2, False),  # those of others do not help
        ((), 2, (), 2, True),  # the first in the queue was it
        ((), 2, (6,), 2, True),  # … the second
        ((), 2, (6, 7), 2, False),  # both were others'
        ((7,), 1, (6, 7, 8), 2, False),
    ],
)
def test_ready_batches_count_where_the_next_is_among_them(
    early: tuple[int, ...], in_queue: int, later: tuple[int, ...], ready: int, had_next: bool
) -> None:
    def tasks(arrived: tuple[int, ...]) -> dict[int, tuple[Any, ...]]:
        return {index: (0, "data") if index in arrived else (0,) for index in range(5, 10)}

    queue = Queue(in_queue)
    batches = SimpleNamespace(
        _task_info=tasks(early), _rcvd_idx=5, _data_queue=queue, _worker_result_queue=queue
    )
    looked = ReadyBatches(batches)
    assert looked.count() == ready
    batches._task_info, batches._rcvd_idx = tasks(later), 6
    del batches._task_info[5]
    assert looked.had_next() is had_next


# -- trainings ------------------------------------------------------------------------------------


def test_a_plain_loop(tmp_path: Path) -> None:
    model = Net()
    optimizer = torch.optim.AdamW(model.parameters())
    losses = []
    with recorded(tmp_path) as run:
        for _ in range(2):
            for batch in DataLoader(DATA, batch_size=8):
                loss = loss_of(model, batch)
                loss.backward()
                nn.utils.clip_grad_norm_(model.parameters(), 1.0)
                optimizer.step()
                optimizer.zero_grad()
                losses.append(loss.item())
    steps, header = run.record.steps, run.record.header
    assert list(steps["step"]) == list(range(8))
    assert list(steps["samples"]) == [8] * 8 and list(steps["batches"]) == [1] * 8
    np.testing.assert_allclose(steps["loss"], losses, rtol=1e-6)
    assert (steps["gradient_norm"] > 0).all()
    starts = (steps["flags"] & tables.EPOCH_START) != 0
    assert list(np.flatnonzero(starts)) == [0, 4]
    assert ((steps["flags"] & tables.LOSS_FINITE) != 0).all()
    phases = ("input_s", "forward_s", "backward_s", "optimizer_s")
    for name in phases:
        assert (steps[name] > 0).all(), name
    assert (sum(steps[name] for name in phases) <= steps["step_s"] * 1.001).all()
    assert np.isnan(steps["gpu_s"]).all() and (steps["syncs"] == -1).all()
    assert len(run.events("epoch")) == 2 and not run.events("evaluation")
    assert header.ending == "finished" and header.optimizer == "AdamW"
    assert header.parameters == sum(each.numel() for each in model.parameters())
    # A linear layer: 2 operations for each weight; forward, and backward by the weight; the
    # second by its input, too.
    assert header.flops_per_sample == 2 * 4 * 8 * 2 + 2 * 8 * 2 * 3
    (loader,) = header.loaders
    assert loader.role == "training" and loader.batch_size == 8 and loader.batches == 4
    assert "test_steps.py:" in loader.place


def test_accumulation_makes_one_step_of_several_batches(tmp_path: Path) -> None:
    model = Net()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    with recorded(tmp_path) as run:
        for number, batch in enumerate(DataLoader(DATA, batch_size=4)):
            (loss_of(model, batch) / 4).backward()
            if number % 4 == 3:
                optimizer.step()
    steps = run.record.steps
    assert list(steps["batches"]) == [4, 4] and list(steps["samples"]) == [16, 16]


def test_of_several_optimizers_the_last_ends_the_step(tmp_path: Path) -> None:
    small, large = Net(2), Net(32)
    optimizers = [torch.optim.SGD(each.parameters(), 0.1) for each in (small, large)]
    with recorded(tmp_path) as run:
        for batch in DataLoader(DATA, batch_size=8):
            for model, optimizer in zip((small, large), optimizers, strict=True):
                loss_of(model, batch).backward()
                optimizer.step()
    # That there is a second one showed when it stepped.
    assert list(run.record.steps["samples"][1:]) == [-1, 8, 8, 8]


def test_a_step_that_calls_the_step_of_its_base_class_is_one(tmp_path: Path) -> None:
    class Sgd(torch.optim.SGD):
        def step(self, closure: Any = None) -> Any:  # type: ignore[override]
            return super().step(closure)

    model = Net()
    torch.optim.SGD(model.parameters(), 0.1)  # PyTorch hooks the step of a class once one is made
    optimizer = Sgd(model.parameters(), 0.1)
    with recorded(tmp_path) as run:
        for batch in DataLoader(DATA, batch_size=8):
            loss_of(model, batch).backward()
            optimizer.step()
    assert list(run.record.steps["samples"]) == [8] * 4


def test_a_closure_that_is_called_again_and_again(tmp_path: Path) -> None:
    model = Net()
    optimizer = torch.optim.LBFGS(model.parameters(), max_iter=4)
    with recorded(tmp_path) as run:
        for batch in DataLoader(DATA, batch_size=16):

            def closure(batch: Any = batch) -> torch.Tensor:
                optimizer.zero_grad()
                loss = loss_of(model, batch)
                loss.backward()
                return loss

            optimizer.step(closure)
    steps = run.record.steps
    assert len(steps) == 2
    assert (steps["forward_s"] > 0).all() and (steps["backward_s"] > 0).all()


def test_iterations_are_steps_where_no_optimizer_is_known(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(recorder_module, "_made_optimizers", list)  # of other tests
    model = Net()
    with recorded(tmp_path) as run:
        for batch in DataLoader(DATA, batch_size=1):
            loss_of(model, batch).backward()
            with torch.no_grad():
                for each in model.parameters():
                    each -= 0.1 * each.grad
                    each.grad = None
    # Eight iterations tell that no optimizer will come.
    assert list(run.record.steps["batches"]) == [8] + [1] * 24


def test_steps_without_an_optimizer_and_without_a_loader(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """PyTorch's word_language_model: an epoch was one step, of as many samples as time steps."""
    monkeypatch.setattr(recorder_module, "_made_optimizers", list)
    model = nn.LSTM(4, 4)
    with recorded(tmp_path) as run:
        for _ in range(20):
            model.zero_grad()
            model(torch.ones(35, 8, 4))[0].sum().backward()
            with torch.no_grad():
                for each in model.parameters():
                    each -= 0.1 * each.grad
    steps = run.record.steps
    assert list(steps["batches"]) == [8] + [1] * 11  # what no step follows is left out
    assert set(steps["samples"]) == {-1}


def test_batches_that_stream(tmp_path: Path) -> None:
    class Stream(IterableDataset[Any]):
        def __iter__(self) -> Any:
            return iter([DATA[number] for number in range(10)])

    model = Net()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    with recorded(tmp_path) as run:
        for batch in DataLoader(Stream(), batch_size=4):
            loss_of(model, batch).backward()
            optimizer.step()
    assert list(run.record.steps["samples"]) == [4, 4, 2]
    assert run.record.header.loaders[0].batches is None


def test_without_a_loader_the_models_input_tells_the_samples(tmp_path: Path) -> None:
    model = Net()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    with recorded(tmp_path) as run:
        for _ in range(3):
            model(torch.randn(6, 4)).sum().backward()
            optimizer.step()
    assert list(run.record.steps["samples"]) == [6, 6, 6]
    assert not run.record.header.loaders


def test_a_second_training_is_told_and_its_first_step_has_no_length(tmp_path: Path) -> None:
    def train() -> None:
        model = Net()
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        for batch in DataLoader(DATA, batch_size=16):
            loss_of(model, batch).backward()
            optimizer.step()

    with recorded(tmp_path) as run:
        train()
        train()
    assert len(run.events("restart")) == 1
    assert list(np.isnan(run.record.steps["step_s"])) == [False, False, True, False]


# -- evaluation, checkpoints ----------------------------------------------------------------------


def test_an_evaluation_with_gradients_is_told_by_its_calls(tmp_path: Path) -> None:
    """By far more calls of the model than usual, and no backward pass more."""
    model, (samples, _) = Net(), DATA[:]
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    with recorded(tmp_path) as run:
        for step in range(30):
            if step in (15, 25):
                for _ in range(20):
                    model(samples)
            loss_of(model, DATA[:]).backward()
            optimizer.step()
            optimizer.zero_grad()
    steps = run.record.steps
    told = steps[(steps["flags"] & tables.EVALUATION) != 0]
    assert list(told["step"]) == [15, 25]
    # One of 21 calls is the training's own.
    assert told["evaluation_s"] == pytest.approx(20 * told["forward_s"], rel=1e-4)
    path, _, line = run.events("evaluation")[0].text.rpartition(":")
    assert path.endswith("test_steps.py")
    assert "model(samples)" in Path(__file__).read_text().splitlines()[int(line) - 1]


def test_choosing_samples_is_neither_a_batch_nor_pytorch_s() -> None:
    seen = []

    class Sampler:
        def __iter__(self) -> Iterator[list[int]]:
            thread = threading.get_ident()
            seen.append((in_sampler(users_stack(thread)), is_busy_elsewhere(thread)))
            yield [0, 1]

    next(iter(DataLoader(DATA, batch_sampler=Sampler())))
    ((stack, busy),) = seen
    assert stack is not None and not busy
    assert stack[-1][0].co_filename == __file__ and stack[-1][0].co_name == "__iter__"


def test_an_evaluation_takes_its_batches_with_it(tmp_path: Path) -> None:
    model = Net()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    with recorded(tmp_path) as run:
        for _ in range(2):
            model.train()
            for batch in DataLoader(DATA, batch_size=16):
                loss_of(model, batch).backward()
                optimizer.step()
            model.eval()
            with torch.no_grad():
                for batch in DataLoader(DATA, batch_size=4):
                    model(batch[0])
                    time.sleep(0.002)
    steps = run.record.steps
    assert list(steps["samples"]) == [16] * 4
    evaluated = (steps["flags"] & tables.EVALUATION) != 0
    assert list(evaluated) == [False, False, True, False]
    assert steps["evaluation_s"][2] > (len(DATA) // 4 - 1) * 0.002
    assert [each.step for each in run.events("evaluation")] == [2, 4]  # the last after all steps
    roles = {each.batch_size: each.role for each in run.record.header.loaders}
    assert roles == {16: "training", 4: "evaluation"}
    assert next(e.made for e in run.record.header.loaders if e.batch_size == 4) == 2


def test_an_evaluation_in_training_mode_is_told_by_its_batches(tmp_path: Path) -> None:
    model = Net()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    with recorded(tmp_path) as run:
        for _ in range(2):
            for batch in DataLoader(DATA, batch_size=16):
                loss_of(model, batch).backward()
                optimizer.step()
            with torch.no_grad():
                for batch in DataLoader(DATA, batch_size=4):
                    model(batch[0])
    assert list(run.record.steps["samples"]) == [16] * 4
    assert run.record.steps["flags"][2] & tables.EVALUATION


def test_a_teacher_without_gradients_is_part_of_the_step(tmp_path: Path) -> None:
    model, teacher = Net(), Net().eval().requires_grad_(False)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    with recorded(tmp_path) as run:
        for batch in DataLoader(DATA, batch_size=16):
            with torch.no_grad():
                wanted = teacher(batch[0])
            (model(batch[0]) - wanted).square().mean().backward()
            optimizer.step()
    assert not (run.record.steps["flags"] & tables.EVALUATION).any()
    assert list(run.record.steps["samples"]) == [16, 16]


def test_checkpoints_are_events_and_a_phase(tmp_path: Path) -> None:
    from safetensors.torch import save_file

    model = Net()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    with recorded(tmp_path / "run") as run:
        for number, batch in enumerate(DataLoader(DATA, batch_size=8)):
            loss_of(model, batch).backward()
            if number == 1:
                torch.save(model.state_dict(), tmp_path / "model.pt")
            if number == 2:
                save_file(model.state_dict(), tmp_path / "model.safetensors")
            optimizer.step()
    flagged = (run.record.steps["flags"] & tables.CHECKPOINT) != 0
    # ``save_file`` was imported by name before the recorder hooked it.
    assert list(flagged)[:2] == [False, True]
    assert run.events("checkpoint")[0].seconds > 0


# -- loss scaling, losses -------------------------------------------------------------------------


def test_a_step_that_the_scaler_skips(tmp_path: Path) -> None:
    model = Net()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    scaler = torch.amp.GradScaler("cpu", init_scale=64.0, growth_interval=100)
    with recorded(tmp_path) as run:
        for number, batch in enumerate(DataLoader(DATA, batch_size=8)):
            loss = loss_of(model, batch) * (math.inf if number == 2 else 1.0)
            scaler.scale(loss).backward()
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
    steps = run.record.steps
    skipped = (steps["flags"] & tables.STEP_SKIPPED) != 0
    assert list(skipped) == [False, False, True, False]
    assert list(steps["loss_scale"]) == [64.0, 64.0, 64.0, 32.0]
    assert steps["loss"][0] < 5  # without the scale
    assert steps["flags"][2] & tables.LOSS_NOT_FINITE
    assert [each.step for each in run.events("skipped_step")] == [2]


def test_a_loss_that_no_float_holds_is_infinite(tmp_path: Path) -> None:
    weight = torch.ones(1, dtype=torch.float64, requires_grad=True)
    optimizer = torch.optim.SGD([weight], 0.1)
    with recorded(tmp_path) as run:
        (weight * 1e300).sum().backward()
        optimizer.step()
        (weight * math.nan).sum().backward()
        optimizer.step()
    assert math.isinf(run.record.steps["loss"][0])
    assert run.record.steps["flags"][1] & tables.LOSS_NOT_FINITE


# -- faults ---------------------------------------------------------------------------------------


def test_the_recorders_own_errors_never_reach_the_training(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(*_: Any) -> None:
        raise RuntimeError("ours")

    model = Net()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    call = nn.Module.__call__
    with recorded(tmp_path) as run:
        loss_of(model, DATA[:4]).backward()
        optimizer.step()
        monkeypatch.setattr(StepRecorder, "enter_root", broken)
        for _ in range(4):
            loss_of(model, DATA[:4]).backward()
            optimizer.step()
        assert not run.recorder.live
        assert nn.Module.__call__ is call
    notes = run.record.header.notes
    assert any("RuntimeError: ours" in each for each in notes)
    assert any("switched itself off" in each for each in notes)


def test_an_exception_passes_and_memory_that_runs_out_is_told(tmp_path: Path) -> None:
    class Greedy(Net):
        def forward(self, samples: torch.Tensor) -> torch.Tensor:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB")

    model = Net()
    with recorded(tmp_path) as run:
        loss_of(model, DATA[:4]).backward()
        for _ in range(2):
            with pytest.raises(torch.OutOfMemoryError):
                Greedy()(DATA[:4][0])
    assert len(run.events("out_of_memory")) == 2
    assert ["test_steps.py:" in each.text for each in run.events("out_of_memory_at")] == [True] * 2


@pytest.mark.parametrize("error", ["RuntimeError", "MemoryError"])
def test_memory_of_the_host_that_runs_out_is_told(tmp_path: Path, error: str) -> None:
    class Greedy(Net):
        def forward(self, samples: torch.Tensor) -> torch.Tensor:
            if error == "MemoryError":
                raise MemoryError
            return torch.empty(1 << 50)  # PyTorch's own message

    model = Net()
    with recorded(tmp_path) as run:
        loss_of(model, DATA[:4]).backward()
        with pytest.raises((RuntimeError, MemoryError)):
            Greedy()(DATA[:4][0])
    (event,) = run.events("out_of_memory")
    assert event.step == 0
    (note,) = [each for each in judge(load_run(tmp_path)).notes if "memory" in each]
    assert note.startswith("memory ran out in step 0:")


def test_a_second_training_begins_though_the_first_is_still_there(tmp_path: Path) -> None:
    models = [nn.Linear(4, 4), nn.Linear(4, 8)]
    optimizers = [torch.optim.SGD(each.parameters(), 0.1) for each in models]
    with recorded(tmp_path) as run:
        for model, optimizer in zip(models, optimizers, strict=True):
            for _ in range(30):
                model(torch.ones(2, 4)).sum().backward()
                optimizer.step()
    assert [each.step for each in run.events("restart")] == [30]
    assert len(run.record.steps) == 60


def test_a_forked_child_leaves_the_files_alone(tmp_path: Path) -> None:
    model = Net()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    with recorded(tmp_path) as run:
        loss_of(model, DATA[:4]).backward()
        optimizer.step()
        child = os.fork()
        if not child:
            model(DATA[:4][0])
            os._exit(0)
        os.waitpid(child, 0)
        optimizer.step()
    assert len(run.record.steps) == 2
    assert not list(tmp_path.glob("also-*"))


def test_everything_is_as_before_after_the_end(tmp_path: Path) -> None:
    owners = (nn.Module, torch.Tensor, torch.autograd, torch.optim.Optimizer, DataLoader, torch)
    before = [dict(vars(each)) for each in owners]
    with recorded(tmp_path):
        loss_of(Net(), DATA[:4]).backward()
    for owner, names in zip(owners, before, strict=True):
        changed = {name for name, value in vars(owner).items() if names.get(name) is not value}
        assert not changed, owner


def test_parameters_without_gradients_have_their_names(tmp_path: Path) -> None:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.used, self.left = nn.Linear(4, 2), nn.Linear(4, 2)

        def forward(self, samples: torch.Tensor) -> torch.Tensor:
            return self.used(samples)

    model = Net()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    with recorded(tmp_path) as run:
        for _ in range(6):
            model(torch.ones(3, 4)).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
    assert run.record.header.learning.without_names == ("left.weight", "left.bias")


def test_steps_that_compile_are_told_once_each_with_their_line(tmp_path: Path) -> None:
    """As PyTorch calls it when a compilation begins: several times where a graph breaks."""
    model = torch.nn.Linear(4, 1)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    with recorded(tmp_path / "run") as found:
        for step in range(4):
            if step in (1, 3):
                found.recorder._note_compilation("graph 0")
                found.recorder._note_compilation("graph 1")
            model(torch.ones(2, 4)).sum().backward()
            optimizer.step()
    told = found.events("compiled")
    assert [each.step for each in told] == [1, 3]
    assert all("test_steps.py:" in each.text for each in told)
    assert [bool(flags & tables.COMPILED) for flags in found.record.steps["flags"]] == [
        *(False, True, False, True)
    ]


@pytest.mark.parametrize(
    ("file", "is_ours"), [("/x/trainfit/hooks/a.py", True), ("/x/t.py", False)]
)
def test_what_a_hook_of_ours_costs_is_no_line_of_the_script(file: str, is_ours: bool) -> None:
    names: dict[str, Any] = {}
    exec(compile("def hook(lock):\n    lock.acquire()", file, "exec"), names)
    lock = threading.Lock()
    lock.acquire()
    thread = threading.Thread(target=names["hook"], args=(lock,))
    thread.start()
    try:
        assert thread.ident is not None
        until = time.monotonic() + 10
        while not users_stack(thread.ident) and not is_ours and time.monotonic() < until:
            time.sleep(0.01)
        assert (users_stack(thread.ident) == []) == is_ours
    finally:
        lock.release()
        thread.join()


def test_a_loop_is_told_by_what_it_goes_over(tmp_path: Path) -> None:
    path = tmp_path / "ema.py"
    path.write_text(
        "def update(model, shadow):\n"
        "    for name, p in model.named_parameters():\n"
        "        if p.requires_grad:\n"
        "            shadow[name] = 0.9 * shadow[name]\n"
        "    norms = [p.norm() for p in model.parameters()]\n"
        "    return len(norms)\n"
    )
    names: dict[str, Any] = {}
    exec(compile(path.read_text(), str(path), "exec"), names)
    code = names["update"].__code__
    over = [stacks._over(code, number) for number in range(2, 7)]
    whole = "model.named_parameters()"
    assert over == [whole, whole, whole, "model.parameters()", ""]


def test_a_loop_goes_over_what_enumerate_is_given(tmp_path: Path) -> None:
    path = tmp_path / "rows.py"
    path.write_text(
        "def read(file, items, i):\n"
        "    for k, row in enumerate(csv.reader(file)):\n"
        "        if k == i: break\n"
        "    for a, b in zip(items, row):\n"
        "        pass\n"
        "    for each in tqdm(list(items), desc='rows'):\n"
        "        pass\n"
        "    return [float(v) for k, v in enumerate(items)]\n"
    )
    names: dict[str, Any] = {}
    exec(compile(path.read_text(), str(path), "exec"), names)
    over = [stacks._over(names["read"].__code__, number) for number in (3, 5, 7, 8)]
    assert over == ["csv.reader(file)", "zip(items, row)", "list(items)", "items"]


def test_of_a_deep_stack_the_calls_next_to_the_loop_are_kept() -> None:
    def deep(left: int) -> None:
        if left:
            deep(left - 1)
        else:
            counts.count(users_stack(threading.get_ident()), frozenset((loop.__code__,)))

    def loop() -> None:
        deep(20)

    counts = StackCounts()
    loop()
    counts.settle(1)
    (line,) = counts.summary().lines
    first = loop.__code__.co_firstlineno
    assert line.callers[-1].endswith(f":{first + 1}") and len(line.callers) == 6


def test_looks_count_when_their_step_is_over() -> None:
    """Neither a pause that does not end nor what comes after the last step is any step's."""
    counts = StackCounts()
    for step in (1, 1, 2, 2, 2):
        counts.look(step)
        counts.count(users_stack(threading.get_ident())[:1])
    assert (counts.looks, sum(each.count for each in counts.summary().lines)) == (2, 2)
    counts.settle(3)
    assert (counts.looks, sum(each.count for each in counts.summary().lines)) == (5, 5)


def test_a_line_keeps_its_looks_whatever_it_calls() -> None:
    """A library's functions, another one at each look: the line has all of them."""
    counts = StackCounts()
    line: Any = {}
    for number in range(100):
        name = f"part_{number}"
        exec(f"def {name}(look): look()", line)
        run = eval(f"lambda look: {name}(look)", line)
        run(lambda: counts.count(users_stack(threading.get_ident())[1:3]))
    counts.settle(1)
    told = counts.summary()
    assert sum(each.count for each in told.lines) == 100 and len(told.lines) <= 48
    # Of a library it stays known that it is that one.
    keys = [("a.py:3", (), f"numpy.part_{n}", "arr.astype", "", "", "f") for n in range(100)]
    *_, last = stacks.most_frequent(collections.Counter(keys))
    assert (last.calls, last.inner, last.count) == ("", "numpy.…", 76)


@pytest.mark.parametrize("on_again", [False, True])
def test_a_garbage_collector_that_is_switched_off_is_known(tmp_path: Path, on_again: bool) -> None:
    model = nn.Linear(3, 1)
    try:
        with recorded(tmp_path) as run:
            gc.disable()
            assert not gc.isenabled()
            if on_again:
                gc.enable()
            optimizer = torch.optim.SGD(model.parameters(), 0.1)
            for _ in range(3):
                model(torch.ones(2, 3)).sum().backward()
                optimizer.step()
    finally:
        gc.enable()
    assert ("test_steps.py:" in run.rank.header.collector_off) != on_again


@pytest.mark.parametrize("by_hand", [False, True])
def test_an_optimizer_that_never_steps_is_told(tmp_path: Path, by_hand: bool) -> None:
    """And not one that the script takes the place of."""
    model = nn.Linear(3, 1)
    with recorded(tmp_path) as run:
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        for _ in range(100):
            optimizer.zero_grad()
            model(torch.ones(2, 3)).sum().backward()
            if by_hand:
                for each in model.parameters():
                    each.data.sub_(0.1 * each.grad)
    told = [each for each in run.rank.events if each.kind == "never_steps"]
    assert len(told) == (not by_hand) and len(run.rank.steps) > 20
    found = [each for each in judge(load_run(tmp_path)).findings if each.kind == "never_steps"]
    assert len(found) == (not by_hand)
    for each in found:
        assert each.is_critical and each.at.file.endswith("test_steps.py")


def test_zero_grad_is_seen_after_a_step_and_is_as_before_at_the_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The recorder's own look at it ends with the first step, others go on."""
    owners, seen = (torch.optim.Optimizer, nn.Module), list[Any]()
    before = [each.zero_grad.__code__ for each in owners]
    monkeypatch.setattr(LearningObserver, "zeroed", lambda _, owner: seen.append(owner))
    model = nn.Linear(3, 1)
    with recorded(tmp_path):
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        for _ in range(4):
            model(torch.ones(2, 3)).mean().backward()
            optimizer.step()
            optimizer.zero_grad()
    assert seen[:2] == [optimizer] * 2  # of the steps that are looked at
    assert [each.zero_grad.__code__ for each in owners] == before


def test_a_model_whose_parameters_come_with_the_first_call(tmp_path: Path) -> None:
    model = nn.Sequential(nn.LazyLinear(4), nn.Linear(4, 1))
    with recorded(tmp_path) as run:
        model(torch.ones(2, 3))
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        for _ in range(3):
            model(torch.ones(2, 3)).mean().backward()
            optimizer.step()
    assert len(run.record.steps) == 3 and run.record.header.parameters == 21
    assert not run.record.header.notes


def test_the_line_of_a_loss_that_is_not_finite(tmp_path: Path) -> None:
    model = nn.Linear(3, 1)
    optimizer = torch.optim.SGD(model.parameters(), 0.0)
    with recorded(tmp_path) as run:
        for number in range(6):
            loss = model(torch.ones(2, 3)).mean()
            if number < 4:
                loss.backward()
            else:
                (loss * math.nan).backward()
                line = inspect.currentframe().f_lineno - 1  # type: ignore[union-attr]
            optimizer.step()
    place = f"test_steps.py:{line}"
    assert run.record.header.loss_at.endswith(place)
    result = judge(load_run(tmp_path))
    found = next(each for each in result.findings if each.kind == "loss_not_finite")
    assert str(found.place).endswith(place)


@pytest.mark.parametrize("double", [False, True])
def test_the_type_that_a_model_computes_in(double: bool, tmp_path: Path) -> None:
    model = nn.Linear(3, 1).double() if double else nn.Linear(3, 1)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    with recorded(tmp_path) as run:
        for _ in range(3):
            model(torch.ones(2, 3, dtype=model.weight.dtype)).mean().backward()
            optimizer.step()
    header = run.record.header
    assert header.precision == ("float64" if double else "float32")
    assert header.default_dtype == "float32"


def test_a_loader_without_a_batch_is_recorded(tmp_path: Path) -> None:
    with recorded(tmp_path):
        for _ in DataLoader(TensorDataset(torch.ones(3)), batch_size=4, drop_last=True):
            raise AssertionError
    (found,) = judge(load_run(tmp_path)).findings
    assert found.kind == "no_batch" and "test_steps.py" in str(found.place)


def test_a_model_is_traced_as_it_is_without_a_recorder(tmp_path: Path) -> None:
    """torch.jit.trace fails where its two passes do not run the same."""
    model = Net()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    with recorded(tmp_path):
        for _ in range(3):
            traced = torch.jit.trace(model, DATA.tensors[0])
            optimizer.zero_grad()
            loss_of(traced, DATA.tensors).backward()
            optimizer.step()
    assert torch.equal(traced(DATA.tensors[0]), model(DATA.tensors[0]))


def test_sizes_of_inputs_are_thinned_out() -> None:
    sizes = InputSizes()
    for step in range(1000):
        if not step & sizes.passed_over:
            sizes.note(({"x": torch.zeros(2, step + 1), "n": 3},))
            sizes.note(([torch.zeros(4)], None))
            sizes.end(step)
    sizes.end(1000)  # no model was called in it
    found = sizes.found()
    assert 90 < len(found) <= 200 and found[0] == (0, 4) and found[-1][0] > 980
    assert all(size == max(4, 2 * step + 2) for step, size in found)


def test_programs_that_are_started_are_told_with_their_line(tmp_path: Path) -> None:
    model = nn.Linear(3, 1)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    with recorded(tmp_path) as run:
        subprocess.run(["true"], check=True)  # before the training
        for command, shell in ((["/bin/true", "-x"], False), ("true -x", True)):
            model(torch.ones(2, 3)).mean().backward()
            optimizer.step()
            subprocess.run(command, shell=shell, check=True)
        with pytest.raises(FileNotFoundError):
            subprocess.Popen(["a-program-that-is-not-there"])
    told = [each for each in run.record.events if each.kind == "program"]
    assert len(told) == 2
    assert all(each.values["pid"] > 0 and "test_steps.py:" in each.text for each in told)


def test_the_line_that_sets_the_number_of_threads(tmp_path: Path) -> None:
    model, number = nn.Linear(3, 1), torch.get_num_threads()
    with recorded(tmp_path) as run:
        for _ in range(3):
            torch.set_num_threads(number)
        model(torch.ones(2, 3)).mean().backward()
    (told,) = (each for each in run.record.events if each.kind == "threads")
    assert "test_steps.py:" in told.text and torch.get_num_threads() == number


class Lacks(torch.utils.data.Dataset[Any]):
    def __getitem__(self, index: int) -> Any:
        return {"text": index}["labels"]


def test_an_error_of_a_worker_is_told_without_our_frames() -> None:
    hooks, patches = FetchHooks(SimpleNamespace(main_fetches=lambda: None)), PatchSet()  # type: ignore[arg-type]
    hooks.install(patches)
    try:
        MapFetcher(Lacks(), True, list, False).fetch([0])
    except KeyError:
        whole = traceback.format_exc()
        text = WorkerError(where="in DataLoader worker process 0").exc_msg
    finally:
        patches.restore()
    assert "worker_hooks" in whole and "worker_hooks" not in text
    assert "in __getitem__" in text and text.endswith("KeyError: 'labels'\n")
