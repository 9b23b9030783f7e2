"""Were an evaluation and a checkpoint among the simulated steps?"""

from __future__ import annotations

import copy
import io
import pickle
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from helpers_cli import json_of, trainfit
from trainfit.results.dataloader import LoaderSettings
from trainfit.results.runs.steps import Coverage
from trainfit.results.runs.trace import LoaderInfo
from trainfit.scripts.phases.coverage import CoverageWatch
from trainfit.simgpu.patching import ImportHook, PatchSet


def loader(batches: int, samples: int | None = 96, batch_size: int | None = 8) -> LoaderInfo:
    return LoaderInfo(0, batch_size, samples, batches, LoaderSettings(0), "Data", "train.py:3")


class Watched:
    """A watch that is installed, with a DataLoader that the test moves on."""

    def __init__(self) -> None:
        self.info: LoaderInfo | None = None
        self.watch = CoverageWatch(lambda: self.info)
        self.patches = PatchSet()

    def __enter__(self) -> Watched:
        self.watch.install(self.patches)
        return self

    def __exit__(self, *_: object) -> None:
        self.patches.restore()

    def step(self, number: int, batches: int) -> None:
        self.info = loader(batches)
        self.watch.stepped(number)


def test_a_model_that_is_trained_and_called_in_evaluation_mode() -> None:
    with Watched() as watched:
        model, teacher = nn.Linear(2, 2), nn.Linear(2, 2).eval()
        torch.optim.SGD(model.parameters(), lr=0.1)
        for module in (model, teacher):  # a frozen teacher infers in each step: no evaluation
            watched.watch.called(module)
        assert not watched.watch.result().evaluated
        watched.watch.called(nn.Sequential(model).eval())
        assert watched.watch.result().evaluated
        # A backward pass follows: it is trained as it comes from `from_pretrained`.
        for number in (1, 2):
            watched.watch.differentiated()
            watched.step(number, number)
            watched.watch.called(model)
        assert not watched.watch.result().evaluated and not watched.watch.evaluations()
        with torch.no_grad():
            watched.watch.called(model)
        assert watched.watch.result().evaluated


@pytest.mark.parametrize("teaches", [False, True])
def test_averaged_weights_are_evaluated(teaches: bool) -> None:
    """By a copy of the model; one that each step calls is a teacher."""
    with Watched() as watched:
        model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 2))
        average, other = copy.deepcopy(model).eval(), nn.Linear(4, 4).eval()
        torch.optim.SGD(model.parameters(), lr=0.1)
        for number in range(1, 4):
            if teaches:
                watched.watch.called(average)
            watched.watch.called(model)
            watched.step(number, number)
        watched.watch.called(other)
        assert not watched.watch.result().evaluated
        watched.watch.called(average)
        found = watched.watch.result()
        assert found.evaluated is not teaches
        assert (found.graph_at is not None) is not teaches  # with gradients on


def test_calls_that_every_step_has_are_no_evaluation() -> None:
    """A generator's for its critic; the same call is one where no step has it."""
    with Watched() as watched:
        model = nn.Linear(2, 2)
        torch.optim.SGD(model.parameters(), lr=0.1)
        begun: list[bool] = []
        watched.watch.before_evaluation = lambda: begun.append(True)
        for number in range(1, 4):
            with torch.no_grad():
                watched.watch.called(model)
            watched.watch.called(model)
            watched.step(number, number)
        assert not begun and not watched.watch.result().evaluated


@pytest.mark.parametrize("mode", ["train", "eval"])
def test_each_evaluation_begins_once(mode: str) -> None:
    with Watched() as watched:
        model = nn.Linear(2, 2)
        torch.optim.SGD(model.parameters(), lr=0.1)
        told: list[str] = []
        watched.watch.before_evaluation = lambda: told.append("evaluation")
        watched.watch.trains_again = lambda: told.append("training")
        for number in range(1, 5):
            watched.watch.called(model.train())
            watched.step(number, number)
            if number % 2 == 0:
                with torch.no_grad():
                    for _ in range(3):
                        watched.watch.called(getattr(model, mode)())
        assert told == ["evaluation", "training", "evaluation"]


@pytest.mark.parametrize(
    ("given", "is_evaluation"),
    [
        ([(1, 1), (1, 2), (1, 3)], True),
        ([(1, 1), (1, 1)], False),  # called twice with a batch
        ([(1, 1), (2, 1)], False),  # one batch of each of two loaders
        ([(1, 1), None, (1, 2)], False),  # in turns with the training's own
        ([(1, 1), "pass", (1, 2), (1, 3)], False),  # of which gradients are made
        ([(1, 1), (1, 2), "pass", (1, 3), (1, 4)], False),
    ],
)
def test_an_evaluation_with_neither_no_grad_nor_eval(given: list[Any], is_evaluation: bool) -> None:
    """Its batches are of a loader that feeds no step, and no backward pass follows."""
    with Watched() as watched:
        model, other = nn.Sequential(nn.Linear(2, 2), nn.Dropout()), nn.Linear(2, 2)
        torch.optim.SGD(model.parameters(), lr=0.1)
        told: list[str] = []
        watched.watch.before_evaluation = lambda: told.append("evaluation")
        watched.watch.trains_again = lambda: told.append("training")
        latest: list[tuple[int, int] | None] = [None]
        watched.watch.other_batch = lambda: latest[0]
        watched.watch.called(model)
        watched.watch.differentiated()
        watched.step(1, 1)
        for each in given:
            if each == "pass":
                watched.watch.differentiated()
                continue
            latest[0] = each
            watched.watch.called(model)
            watched.watch.called(other)  # of which nothing is trained
        found = watched.watch.result()
        assert found.evaluated is bool(watched.watch.evaluations()) is is_evaluation
        assert (found.graph_at is not None) is (found.training_at is not None) is is_evaluation
        latest[0] = None
        watched.watch.called(model)
        assert told[-1:] == (["training"] if is_evaluation else told[-1:])
        watched.watch.differentiated()
        watched.step(2, 2)
        assert watched.watch.result().evaluated is is_evaluation


class Drops(nn.Module):
    """Drops values out by a layer of its own, one in a list, and one that it makes each time."""

    def __init__(self, which: str) -> None:
        super().__init__()
        self.which = which
        self.layer, self.drop, self.others = nn.Linear(2, 2), nn.Dropout(), [nn.Dropout()]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        drop = {"own": self.drop, "list": self.others[0], "made": nn.Dropout()}[self.which]
        return torch.as_tensor(drop(self.layer(x)))


@pytest.mark.parametrize(("which", "is_told"), [("own", False), ("list", True), ("made", True)])
def test_dropout_that_an_evaluation_does_not_switch_off(which: str, is_told: bool) -> None:
    with Watched() as watched:
        model = Drops(which)
        torch.optim.SGD(model.parameters(), lr=0.1)
        watched.watch.called(model)
        model(torch.ones(1, 2))
        assert watched.watch.result().dropping_at is None
        watched.step(1, 1)
        model.eval()
        model.drop.train()  # to sample by it
        with torch.no_grad():
            watched.watch.called(model)
            model(torch.ones(1, 2))
        place = watched.watch.result().dropping_at
        assert (place is not None) is is_told
        assert place is None or "test_coverage.py" in place


def test_odd_modules_do_no_harm() -> None:
    class Odd(nn.Module):
        def parameters(self, recurse: bool = True):  # type: ignore[no-untyped-def]
            raise RuntimeError("no")

    with Watched() as watched:
        watched.watch.called(Odd().eval())
        assert not watched.watch.result().evaluated


def test_checkpoints_of_torch_and_safetensors(tmp_path: Path) -> None:
    with Watched() as watched:
        torch.save({"a": torch.ones(2)}, io.BytesIO())  # a data set that is kept as it was read
        assert not watched.watch.result().saved
        torch.optim.SGD(nn.Linear(2, 2).parameters(), lr=0.1)
        pickle.dumps(torch.ones(2))  # what goes to another process
        with (tmp_path / "sent.pt").open("wb") as file:
            torch.save(torch.ones(2), file)
        assert not watched.watch.result().saved and not watched.watch.saves
        torch.save({"a": torch.ones(2)}, io.BytesIO())
        assert watched.watch.result().saved and not watched.watch.saves
        with (tmp_path / "open.pt").open("wb") as file:
            torch.save({}, file)
        torch.save({}, f=tmp_path / "named.pt")
        assert list(watched.watch.saves) == [
            str(tmp_path / name) for name in ("open.pt", "named.pt")
        ]
    with Watched() as watched:
        safetensors = pytest.importorskip("safetensors.torch")
        assert not watched.watch.result().saved
        torch.optim.SGD(nn.Linear(2, 2).parameters(), lr=0.1)
        safetensors.save_file({"a": torch.ones(2)}, tmp_path / "model.safetensors")
        assert watched.watch.result().saved
        assert (tmp_path / "model.safetensors").stat().st_size > 0
    assert not hasattr(torch.save, "__wrapped__")
    assert not hasattr(safetensors.serialize_file, "__wrapped__")


@pytest.mark.parametrize(
    ("batches", "epochs", "steps"),
    [
        ([1, 2, 3], 0.25, 12),
        ([2, 3, 4], 0.25, 12),  # one batch is read ahead
        ([4, 8, 12], 1.0, 3),  # four micro-batches a step
        ([*range(2, 13), 12], 1.0, 12),  # … but none at an epoch's end
        ([*range(2, 13), 12, *range(14, 18)], 16 / 12, 12),
        ([5, 10, 12], 1.0, 3),  # the last step has what is left
        ([1], 1 / 12, 12),
        ([2], None, None),  # a second one that is the step's, or is read ahead
        ([12, 12, 12], None, None),
    ],
)
def test_steps_of_an_epoch(batches: list[int], epochs: float | None, steps: int | None) -> None:
    with Watched() as watched:
        for number, given in enumerate(batches, start=1):
            watched.step(number, given)
        found = watched.watch.result()
    assert (found.epochs, found.steps_per_epoch) == (pytest.approx(epochs), steps)


@pytest.mark.parametrize(
    ("passes", "batches", "steps"),
    [(1, 1, 12), (2, 1, 12), (4, 4, 3), (1, 2, None), (4, 5, None)],
)
def test_one_step_tells_of_an_epoch_by_its_backward_passes(
    passes: int, batches: int, steps: int | None
) -> None:
    with Watched() as watched:
        for _ in range(passes):
            watched.watch.differentiated()
        watched.step(1, batches)
        watched.watch.differentiated()  # of the second step, which is not over
        found = watched.watch.result()
    assert found.steps_per_epoch == steps
    assert found.epochs == (pytest.approx(1 / steps) if steps else None)


@pytest.mark.parametrize(
    ("module", "name", "steps", "known"),
    [
        ("transformers.trainer", "state", 10, 10),
        ("lightning.pytorch.loops.fit_loop", "trainer", 10, 10),
        ("lightning.pytorch.loops.fit_loop", "trainer", -1, None),  # it goes by epochs
        ("__main__", "state", 10, None),
    ],
)
def test_how_many_steps_a_trainer_makes(
    module: str, name: str, steps: int, known: int | None
) -> None:
    """`--steps 129` was to end an epoch of a training of 60 steps (`max_steps=60`)."""
    source = "class Trainer:\n    def train(self, step):\n        step(1, 1)\n"
    names: dict[str, Any] = {"__name__": module}
    exec(source, names)
    trainer = names["Trainer"]()
    setattr(trainer, name, SimpleNamespace(max_steps=steps))
    with Watched() as watched:
        trainer.train(watched.step)
        found = watched.watch.result()
    assert (found.most_steps, found.steps_per_epoch) == (known, 12)
    assert found.all_steps == known or (known is None and found.all_steps == 12)


def test_data_of_unknown_size_has_no_epochs() -> None:
    with Watched() as watched:
        assert watched.watch.result() == Coverage(False, False)
        watched.info = loader(3, samples=None)
        watched.watch.stepped(1)
        found = watched.watch.result()
        assert (found.epochs, found.steps_per_epoch) == (None, None)


def test_a_module_is_watched_for_until_it_is_imported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "watched_for.py").write_text("value = 1\n")
    monkeypatch.syspath_prepend(tmp_path)
    seen: list[ModuleType] = []
    watch = ImportHook("watched_for", seen.append)
    watch.install()
    import watched_for  # type: ignore[import-not-found]

    watch.remove()
    assert seen == [watched_for]
    assert watch not in sys.meta_path
    ImportHook("watched_for", seen.append).install()
    assert seen == [watched_for] * 2
    del sys.modules["watched_for"]


SCRIPT = """\
import torch
from torch.utils.data import DataLoader, TensorDataset

data = DataLoader(TensorDataset(torch.randn(64, 16)), batch_size=8)
net = torch.nn.Linear(16, 16).cuda()
optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
for epoch in range(9):
    for (x,) in data:
        optimizer.zero_grad()
        net(x.cuda()).sum().backward()
        optimizer.step()
    net.eval()
    with torch.no_grad():
        net(torch.randn(512, 16, device="cuda"))
    net.train()
    torch.save(net.state_dict(), "last.pt")
"""


@pytest.mark.slow
def test_steps_reach_the_evaluation(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(SCRIPT)
    words = ("simulate", "--gpu", "T4", "--json", "--steps")
    few = json_of(trainfit(*words, "3", "train.py", cwd=tmp_path))["coverage"]
    wanted = {"evaluated": False, "saved": False, "epochs": 3 / 8, "steps_per_epoch": 8}
    assert wanted.items() <= few.items()
    done = trainfit(*words[:-2], "--steps", "9", "train.py", cwd=tmp_path)
    assert "evaluation and checkpoint in 9 steps" in done.stdout


@pytest.mark.parametrize("when", ["each step", "each epoch"])
def test_work_of_each_step_is_told_with_its_line(tmp_path: Path, when: str) -> None:
    with Watched() as watched:
        model = nn.Linear(2, 2)
        torch.optim.SGD(model.parameters(), lr=0.1)
        for number in range(1, 5):
            watched.watch.called(model.train())
            watched.step(number, number)
            if when == "each step" or number == 4:
                with torch.no_grad():
                    watched.watch.called(model.eval())
                torch.save(model.state_dict(), tmp_path / "last.pt")
        watched.watch.called(model.train())
        watched.step(5, 5)
        found = watched.watch.result()
        assert found.evaluated and found.saved
        lines = [found.evaluated_each, found.saved_each]
        if when == "each epoch":
            assert lines == [None, None]
            return
        first, second = (int(str(line).rpartition(":")[2]) for line in lines)
        assert second - first == 1
        # An epoch of a few steps: that is its end.
        watched.info = loader(5, samples=16)
        watched.watch.stepped(6)
        assert watched.watch.result().evaluated_each is None
