"""Short steps: recorded lightly within a budget, and completed by those in detail."""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
import time
from pathlib import Path
from types import FrameType, SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from helpers_recorder import recorded
from trainfit.results.runs import tables
from trainfit.watch.recorder import current_step, rank_files
from trainfit.watch.recorder import current_step as budget_module
from trainfit.watch.recorder.current_step import FIRST, SHARE, Budget, CurrentStep
from trainfit.watch.recorder.gpu_step import GpuStep
from trainfit.watch.recorder.phases import UsedBatches
from trainfit.watch.recorder.rank_files import whole_row
from trainfit.watch.recorder.rows import StepRows
from trainfit.watch.view import completed, is_light

_PACKAGE = str(Path(current_step.__file__).parents[2])

DATA = TensorDataset(torch.randn(64, 4), torch.randint(0, 2, (64,)))


@pytest.mark.parametrize(
    ("step_s", "all_in_detail"), [(0.001, False), (0.005, False), (0.5, True), (2.0, True)]
)
def test_details_stay_within_the_budget(step_s: float, all_in_detail: bool) -> None:
    budget, now, details, cost_s = Budget(), 0.0, 0, 150e-6
    for step in range(5000):
        light, began = budget.is_light(now), now
        now += step_s
        if light:
            budget.looked_lightly(0.0)
        else:
            budget.looked(began, cost_s)
            details += step >= FIRST
    assert (details == 5000 - FIRST) is all_in_detail
    assert details >= 10
    assert details * cost_s <= 1.1 * SHARE * now


def test_what_happens_every_tenth_step_is_neither_always_nor_never_seen() -> None:
    budget, now, seen = Budget(), 0.0, set()
    for step in range(3000):
        light, began = budget.is_light(now), now
        now += 0.005
        if not light:
            budget.looked(began, 150e-6)
            seen.add(step % 10)
    assert len(seen) == 10


@pytest.mark.parametrize(
    ("fetched", "used"),
    [
        ([2, 1, 1, 0], [1, 1, 1, 1]),  # one ahead: Accelerate
        ([1, 1, 1], [1, 1, 1]),
        ([2, 2, 2, 2], [1, 3, 2, 2]),  # two batches make one loss
    ],
)
def test_batches_belong_to_the_step_that_uses_them(fetched: list[int], used: list[int]) -> None:
    batches, ahead, found = UsedBatches(), [], []
    for count in fetched:
        now, ahead = batches.split([*ahead, *[8] * count], 1)
        found.append(len(now))
    assert found == used


def _train(epochs: int, evaluates: bool = False) -> list[float]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2))
    optimizer, losses = torch.optim.SGD(model.parameters(), 0.1), []
    for _ in range(epochs):
        for samples, labels in DataLoader(DATA, batch_size=8):
            loss = nn.functional.cross_entropy(model(samples), labels)
            optimizer.zero_grad()
            loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            losses.append(float(loss.detach()))
            if evaluates and len(losses) % 5 == 0:
                model.eval()
                with torch.no_grad():
                    model(samples)
                model.train()
    return losses


@pytest.fixture
def always_light(monkeypatch: pytest.MonkeyPatch) -> None:
    """After two steps every step is light that can be."""
    monkeypatch.setattr(budget_module, "FIRST", 2)
    monkeypatch.setattr(budget_module, "SHARE", 1e-9)


@pytest.mark.usefixtures("always_light")
def test_light_steps_have_all_but_their_phases(tmp_path: Path) -> None:
    with recorded(tmp_path) as run:
        losses = _train(4)
    steps, header = run.record.steps, run.record.header
    light, epoch = is_light(steps), (steps["flags"] & tables.EPOCH_START) != 0
    assert len(steps) == 32
    assert not light[epoch].any() and light[~epoch][2:].all()
    assert set(steps["samples"]) == {8} and set(steps["batches"]) == {1}
    seen = np.isfinite(steps["loss"])  # in light steps now and then
    assert seen[~light].all() and ((steps["flags"] & tables.LOSS_FINITE) != 0)[seen].all()
    np.testing.assert_allclose(steps["loss"][seen], np.array(losses)[seen], rtol=1e-6)
    assert (steps["input_s"] > 0).all() and (steps["input_s"] < steps["step_s"]).all()
    assert np.isnan(steps["forward_s"][light]).all()
    assert (steps["forward_s"][~light] > 0).all()
    assert header.light_steps == light.sum()
    assert header.recording_share is not None and header.recording_share > 0


@pytest.mark.usefixtures("always_light")
def test_what_is_rare_is_looked_at_in_a_light_step_too(tmp_path: Path) -> None:
    with recorded(tmp_path) as run:
        _train(5, evaluates=True)
    steps = run.record.steps
    assert len(run.events("evaluation")) == 8
    told = steps[(steps["flags"] & tables.EVALUATION) != 0]
    assert len(told) == 7  # the last one has no step after it
    assert not is_light(told).any() and (told["evaluation_s"] > 0).all()
    phases = sum(np.nan_to_num(told[name]) for name in ("input_s", "evaluation_s", "forward_s"))
    assert (phases <= told["step_s"] * 1.001).all()


def test_light_steps_are_completed_by_the_nearest_in_detail() -> None:
    steps = tables.empty_rows(tables.STEPS, 5)
    steps["flags"] = (0, tables.LIGHT, tables.EPOCH_START, tables.LIGHT, 0)
    steps["step_s"] = (0.010, 0.020, 0.500, 0.012, 0.010)
    steps["input_s"] = (0.000, 0.010, 0.490, 0.002, 0.000)
    steps["forward_s"] = (0.004, np.nan, 0.004, np.nan, 0.006)
    steps["syncs"] = (3, -1, 3, -1, 3)
    found = completed(steps)
    np.testing.assert_allclose(found["forward_s"], (0.004, 0.004, 0.004, 0.006, 0.006), rtol=1e-5)
    assert list(found["syncs"]) == [3, 3, 3, 3, 3]
    assert np.isnan(steps["forward_s"][1])  # a copy


def test_more_micro_batches_than_eight_are_one_step(tmp_path: Path) -> None:
    model = nn.Linear(4, 2)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    with recorded(tmp_path) as run:
        for number, (samples, _) in enumerate(DataLoader(DATA, batch_size=2)):
            model(samples).sum().backward()
            if number % 16 == 15:
                optimizer.step()
                optimizer.zero_grad()
    assert list(run.record.steps["batches"]) == [16, 16]
    assert list(run.record.steps["samples"]) == [32, 32]


def test_a_gpu_has_events_in_steps_in_detail_only(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(budget_module, "FIRST", 1)
    now, marks, rows = [0.0], [], []

    def mark() -> Any:
        marks.append(now[0])
        return SimpleNamespace(at=now[0])

    device: Any = SimpleNamespace(
        mark=mark, reached=lambda mark: True, release=lambda mark: None,
        seconds=lambda first, last: last.at - first.at, memory=lambda: (1, 1, 1, 0),
    )  # fmt: skip
    sink: Any = SimpleNamespace(append=rows.append, event=lambda *_, **__: None)
    step = CurrentStep(sink, lambda: now[0], 0.0, lambda: 0.0)
    step.use(device)
    for _ in range(3):
        step.leave(step.enter(2))
        now[0] += 0.001
        if step.light:
            step._commit_lightly()
        else:
            step.cost_s = 1.0
            step.commit(may_be_light=True)
    # The copy of the first step, and its end; nothing in the light ones.
    assert len(marks) == 3
    assert [row[-1] & tables.LIGHT for row in rows] == [0, tables.LIGHT, tables.LIGHT]


@pytest.mark.usefixtures("always_light")
def test_a_loss_that_is_not_finite_is_seen_in_light_steps(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(current_step, "_LOSS_S", 0.01)
    model = nn.Linear(4, 1)
    optimizer = torch.optim.SGD(model.parameters(), 0.0)
    with recorded(tmp_path) as run:
        for number in range(40):
            loss = model(torch.ones(2, 4)).mean() * (math.nan if number >= 20 else 1.0)
            loss.backward()
            optimizer.step()
            time.sleep(0.002)
    steps = run.record.steps
    assert is_light(steps)[-20:].all()
    bad = steps["step"][(steps["flags"] & tables.LOSS_NOT_FINITE) != 0]
    # Looked at after 10 ms, and from then on in each step.
    assert 20 <= bad[0] <= 30 and list(bad) == list(range(bad[0], 40))


@pytest.mark.parametrize(("scaled", "value"), [(False, 3.0), (True, 3.0), (False, math.inf)])
def test_the_loss_of_a_light_step_on_a_gpu_comes_when_the_gpu_is_there(
    scaled: bool, value: float
) -> None:
    reached, rows, values = [False], [], []
    device: Any = SimpleNamespace(
        mark=lambda: 1, reached=lambda _: reached[0], release=lambda _: None,
        keep=lambda tensor: value, value=lambda kept: values.append(kept) or kept,
    )  # fmt: skip
    gpu = GpuStep(device, None)
    gpu.numbers["loss"] = device.keep(None)
    gpu.close_alone()
    table = StepRows(rows.append, lambda row: None)
    short = (0, 1.0, 0.1, 0.0, 8, 1, -1, -1, -1, -1, None, tables.LIGHT)
    table.add_light(short, gpu, scaled)
    table.add_light((1, *short[1:]))
    table.poll(1.1)
    assert not rows and not values
    reached[0] = True
    table.poll(1.2)
    assert [row[0] for row in rows] == [0, 1]
    whole = dict(zip(tables.STEPS.names or (), whole_row(rows[0]), strict=True))
    flag = tables.LOSS_FINITE if math.isfinite(value) else tables.LOSS_NOT_FINITE
    assert whole["flags"] == tables.LIGHT | flag
    assert whole["loss"] == value or (scaled and math.isnan(whole["loss"]))
    assert whole["samples"] == 8 and math.isnan(whole["forward_s"])
    assert rank_files.packer(tables.STEPS).pack(*whole_row(rows[1]))


#: Calls that a step of one batch costs at most, of our functions and by them. A call takes 0.05 to
#: 0.5 µs: whatever the machine is at, these are below 0.1 ms. (PyTorch 2.14 with CUDA has 136, 9 of
#: them for the loss, which is looked at each 2 ms, and 326.)
MOST_CALLS = {"light": 145, "detail": 335}


def _calls(kind: str, folder: Path) -> list[int]:
    """Of twenty steps."""
    budget_module.FIRST = 20 if kind == "light" else 10_000
    budget_module.SHARE = 1e-9
    model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2))
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    calls = [0]

    def count(frame: FrameType, event: str, _: object) -> None:
        # A module's call is counted by the modules, not by the steps.
        name = frame.f_code.co_filename
        ours = name.startswith(_PACKAGE) and "modules.py" not in name
        calls[0] += ours and event in ("call", "c_call")

    found = []
    with recorded(folder) as run:
        batches = iter(DataLoader(TensorDataset(torch.randn(512, 4)), batch_size=4))
        for number in range(60):
            assert number < 40 or run.recorder.steps.light is (kind == "light")
            calls[0] = 0
            sys.setprofile(count)
            (samples,) = next(batches)
            model(samples).sum().backward()
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
            sys.setprofile(None)
            found.append(calls[0])
    return found[40:]


def test_what_a_step_costs_in_calls(tmp_path: Path) -> None:
    """In processes of their own: other tests leave things that are looked at, too."""
    code = (
        f"import os, sys; from pathlib import Path; sys.path[:0] = {sys.path!r}\n"
        f"from {__name__} import MOST_CALLS, _calls\n"
        "for kind in MOST_CALLS:\n"
        "    if not (pid := os.fork()):\n"
        f"        print(_calls(kind, Path({str(tmp_path)!r}, kind)), flush=True)\n"
        "        os._exit(0)\n"
        "    assert os.waitpid(pid, 0)[1] == 0\n"
    )
    env = {name: value for name, value in os.environ.items() if not name.startswith("COV_")}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=env)
    assert not done.returncode, done.stderr
    counts = dict(zip(MOST_CALLS, map(json.loads, done.stdout.splitlines()), strict=True))
    # Now and then there is more to do: a loss that is looked at, a 64th step.
    for kind, found in counts.items():
        assert np.median(found) <= MOST_CALLS[kind], (kind, found)
