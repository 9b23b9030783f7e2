"""Micro-batches of a script's own loop: only those are made that the others do not follow from."""

from __future__ import annotations

import copy
import gc
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from trainfit.hardware import find_gpu
from trainfit.memory.replay import Stream, replay
from trainfit.plan.sizing.costing import machine_of
from trainfit.results.runs.recording import KINDS, Recording
from trainfit.scripts.phases.own_micro_batches import MADE, OwnMicroBatches
from trainfit.simgpu.patching import PatchSet
from trainfit.simgpu.session import Simulation
from trainfit.speed.step import step_time
from trainfit.speed.work import Work
from trainfit.torch_private.operators import version

STEPS, PARTS = 3, 8


class Model(nn.Module):
    """Counts its calls; keeps a loss of its own, as a mixture of experts may."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(1000, 256)
        self.layers = nn.Sequential(*(nn.Linear(256, 256) for _ in range(4)))
        self.head = nn.Linear(256, 1000)
        self.calls = 0
        self.own: Any = None

    def forward(self, x: torch.Tensor) -> dict[str, Any]:
        self.calls += 1
        hidden = self.layers(self.embed(x)).relu()
        self.own = hidden.mean()
        return {"logits": self.head(hidden), "states": [hidden], "name": "it"}


class Encoder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(256, 256).requires_grad_(False)
        self.calls = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        y: torch.Tensor = self.layer(x)
        return y


class Loop:
    """A loop of one's own; subclasses change a part of it."""

    amp = True

    def __init__(self) -> None:
        self.model, self.encoder = Model().cuda(), Encoder().cuda()
        self.optimizer = torch.optim.AdamW(self.model.parameters())
        self.criterion = nn.CrossEntropyLoss()
        self.kept: list[torch.Tensor] = []
        #: Of a gradient after each pass: an observer of the training tells by it that it changed.
        self.versions: list[int] = []

    def rows(self, part: int) -> int:
        return 16

    def loss(self, x: torch.Tensor) -> torch.Tensor:
        logits = self.model(x)["logits"]
        self.accuracy = (logits.argmax(-1) == x).float().mean()
        loss: torch.Tensor = self.criterion(logits.flatten(0, 1), x.flatten()) / PARTS
        return loss

    def backward(self, loss: torch.Tensor) -> None:
        loss.backward()

    def train(self, simulation: Simulation) -> None:
        for _ in range(STEPS):
            for part in range(PARTS):
                x = torch.randint(0, 1000, (self.rows(part), 128)).cuda()
                with torch.autocast("cuda", torch.bfloat16, enabled=self.amp):
                    loss = self.loss(x)
                self.backward(loss)
                gradient = self.model.head.weight.grad
                self.versions.append(0 if gradient is None else version(gradient))
            nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
            self.optimizer.step()
            self.optimizer.zero_grad()
        assert simulation.steps == STEPS


class InFloat32(Loop):
    amp = False


class WithEncoder(Loop):
    def loss(self, x: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            seen = self.encoder(torch.rand(*x.shape, 256, device="cuda"))
        return super().loss(x) + seen.mean()


class Keeping(Loop):
    def loss(self, x: torch.Tensor) -> torch.Tensor:
        logits = self.model(x)["logits"]
        self.kept.append(logits.detach())
        return logits.float().square().mean()


class OfOneMore(Loop):
    def rows(self, part: int) -> int:
        return 16 + part


class WithOwnLoss(Loop):
    def loss(self, x: torch.Tensor) -> torch.Tensor:
        return super().loss(x) + self.model.own


class Twice(Loop):
    def loss(self, x: torch.Tensor) -> torch.Tensor:
        return super().loss(x) + super().loss(x)


class TwoPasses(Loop):
    def backward(self, loss: torch.Tensor) -> None:
        loss.backward(retain_graph=True)
        loss.backward()


class Evaluating(Loop):
    """Evaluates amid the micro-batches, and copies its model for an average."""

    def backward(self, loss: torch.Tensor) -> None:
        super().backward(loss)
        self.passes = getattr(self, "passes", 0) + 1
        if self.passes % PARTS != 5:
            return
        with torch.no_grad():
            self.model(torch.zeros(1, 8, dtype=torch.long, device="cuda"))
        self.model.own = None
        average = copy.deepcopy(self.model)
        assert "forward" not in vars(average)


class ByHand(Loop):
    """Updates the parameters itself, after so many passes."""

    passes = 1

    def train(self, simulation: Simulation) -> None:
        for _ in range(STEPS * PARTS // self.passes):
            for _ in range(self.passes):
                self.backward(self.loss(torch.randint(0, 1000, (16, 128)).cuda()))
            with torch.no_grad():
                for parameter in self.model.parameters():
                    parameter -= 0.1 * parameter.grad  # type: ignore[operator]  # there is one
                    parameter.grad = None


class ByHandOfFour(ByHand):
    passes = 4


class LetGo(Loop):
    """Ends amid the micro-batches of a step, and drops its model."""

    def train(self, simulation: Simulation) -> None:
        for _ in range(MADE + 1):
            self.backward(self.loss(torch.randint(0, 1000, (16, 128)).cuda()))
        self.model, self.optimizer = Encoder(), None  # type: ignore[assignment]
        gc.collect()
        self.left = simulation.allocator.requested_bytes


def trained(kind: type[Loop], *, leaves_out: bool = True) -> tuple[Recording, Loop]:
    repeated: list[list[int]] = []
    patches = PatchSet()
    with Simulation("RTX 4090") as simulation:
        if leaves_out:
            OwnMicroBatches(simulation, repeated).install(patches)
        try:
            loop = kind()
            loop.train(simulation)
        finally:
            patches.restore()
        recording = simulation.recording
    assert "forward" not in vars(loop.model)
    recording.header["repeated"] = repeated
    recording.check()
    return recording, loop


def owners(recording: Recording) -> set[tuple[int, str, str]]:
    """Sizes, purposes and modules of what the layers allocate."""
    columns = zip(
        recording.alloc_bytes.tolist(), recording.alloc_kind.tolist(),
        recording.alloc_module.tolist(), strict=True,
    )  # fmt: skip
    named = ((size, KINDS[kind], recording.strings[module]) for size, kind, module in columns)
    return {each for each in named if "layers" in each[2]}


@pytest.mark.parametrize("kind", [Loop, InFloat32, WithEncoder])
def test_memory_and_time_are_those_of_all(kind: type[Loop]) -> None:
    (whole, every), (short, few) = trained(kind, leaves_out=False), trained(kind)
    assert (every.model.calls, few.model.calls) == (STEPS * PARTS, STEPS * MADE)
    assert few.versions == every.versions and every.versions[PARTS - 1] > every.versions[0]
    assert few.encoder.calls == (STEPS * MADE if kind is WithEncoder else 0)
    peaks = [replay(Stream.of(each)) for each in (whole, short)]
    assert peaks[0].peak_reserved == peaks[1].peak_reserved
    assert peaks[1].peak_allocated == pytest.approx(peaks[0].peak_allocated, rel=2e-4)
    machine = machine_of(find_gpu("RTX 4090"))
    seconds = [step_time(Work.of_steady_step(each), machine).seconds for each in (whole, short)]
    assert seconds[1] == pytest.approx(seconds[0], rel=0.02)
    assert owners(short) == owners(whole)
    assert any("micro-batches of the same shapes" in text for text in short.header["assumptions"])


@pytest.mark.parametrize("kind", [Keeping, OfOneMore, WithOwnLoss, Twice, TwoPasses])
def test_what_does_not_follow_is_made(kind: type[Loop]) -> None:
    """Calls that leave something behind, of other shapes, with a loss that the model keeps, two for
    a pass, and two passes for one."""
    recording, loop = trained(kind)
    assert loop.model.calls == STEPS * PARTS * (2 if kind is Twice else 1)
    assert not recording.header["repeated"]
    whole, _ = trained(kind, leaves_out=False)
    assert recording.alloc_bytes.tolist() == whole.alloc_bytes.tolist()
    assert recording.events.tolist() == whole.events.tolist()


@pytest.mark.parametrize(("kind", "made"), [(ByHand, 1), (ByHandOfFour, MADE)])
def test_an_update_by_hand_ends_the_micro_batches(kind: type[ByHand], made: int) -> None:
    _, loop = trained(kind)
    assert loop.model.calls == STEPS * PARTS // kind.passes * made


def test_no_model_is_kept_alive() -> None:
    (_, every), (_, few) = trained(LetGo, leaves_out=False), trained(LetGo)
    assert few.left == every.left < 17 << 20  # 16 MiB are a workspace


def test_calls_without_gradients_of_the_model_that_trains_are_made() -> None:
    _, loop = trained(Evaluating)
    assert loop.model.calls == STEPS * (MADE + 1)


def test_the_loss_and_what_is_computed_of_it_have_gradients(monkeypatch: Any) -> None:
    """The script's own lines see what they always see."""
    seen: list[Callable[..., Any] | None] = []

    class Looking(Loop):
        def backward(self, loss: torch.Tensor) -> None:
            seen.append(loss.grad_fn)
            super().backward(loss)
            assert all(each.grad is not None for each in self.model.parameters())

    trained(Looking)
    assert len(seen) == STEPS * PARTS and None not in seen
