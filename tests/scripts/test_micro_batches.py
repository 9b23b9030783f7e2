"""Micro-batches of a step of a Trainer: only those are made that the others do not follow from."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from trainfit.hardware import find_gpu
from trainfit.memory.replay import Stream, replay
from trainfit.plan.sizing.costing import machine_of
from trainfit.results.runs.recording import Recording
from trainfit.scripts.phases.micro_batches import MicroBatches
from trainfit.simgpu.patching import PatchSet
from trainfit.simgpu.session import Simulation
from trainfit.speed.step import step_time
from trainfit.speed.work import Work

STEPS, PARTS = 3, 8


class Trainer:
    """As Transformers' calls its own methods."""

    def __init__(self) -> None:
        self.accelerator = SimpleNamespace(sync_gradients=False)
        self.model = torch.nn.Linear(1024, 1024).cuda()
        self.optimizer = torch.optim.AdamW(self.model.parameters())

    def _prepare_inputs(self, inputs: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        return {name: each.cuda() for name, each in inputs.items()}

    def training_step(self, model: torch.nn.Module, inputs: Any) -> torch.Tensor:
        loss = model(self._prepare_inputs(inputs)["x"]).square().mean()
        loss.backward()
        return loss.detach()

    def train(
        self, simulation: Simulation, step: Callable[..., torch.Tensor], rows: Callable[[int], int]
    ) -> None:
        for _ in range(STEPS):
            total = torch.zeros((), device="cuda")
            for part in range(PARTS):
                self.accelerator.sync_gradients = part == PARTS - 1
                batch = {"x": torch.rand(rows(part), 1024)}
                total = total + step(self, self.model, batch)
            self.optimizer.step()
            self.optimizer.zero_grad()
            simulation.end_step()


class OfBuffers(Trainer):
    """As TRL's trainers that generate: what comes in is used several times."""

    def _prepare_inputs(self, inputs: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        return super()._prepare_inputs(inputs)


class Keeping(Trainer):
    """Leaves the outputs of each micro-batch behind."""

    def __init__(self) -> None:
        super().__init__()
        self.kept: list[torch.Tensor] = []

    def training_step(self, model: torch.nn.Module, inputs: Any) -> torch.Tensor:
        self.kept.append(model(self._prepare_inputs(inputs)["x"]).detach())
        return super().training_step(model, inputs)


def trained(
    kind: type[Trainer] = Trainer,
    rows: Callable[[int], int] = lambda part: 512,
    *,
    leaves_out: bool = True,
) -> tuple[Recording, int]:
    """The recording, and how many micro-batches were left out."""
    left_out: list[int] = []
    repeated: list[list[int]] = []
    with Simulation("RTX 4090") as simulation:
        watch = MicroBatches(simulation, lambda: left_out.append(1), repeated)
        step: Callable[..., Any] = kind.training_step
        if leaves_out:
            step = watch._of_trainer(Trainer._prepare_inputs, step)
        kind().train(simulation, step, rows)
        recording = simulation.recording
    recording.header["repeated"] = repeated
    recording.check()
    return recording, len(left_out)


def test_memory_and_time_are_those_of_all() -> None:
    whole, none = trained(leaves_out=False)
    short, left_out = trained()
    assert (none, left_out) == (0, STEPS * (PARTS - 3))
    assert len(short.op_name) < len(whole.op_name) * 0.6
    peaks = [replay(Stream.of(each)) for each in (whole, short)]
    assert peaks[0].peak_reserved == peaks[1].peak_reserved
    assert peaks[0].peak_allocated == pytest.approx(peaks[1].peak_allocated, abs=1024)
    machine = machine_of(find_gpu("RTX 4090"))
    seconds = [step_time(Work.of_steady_step(each), machine).seconds for each in (whole, short)]
    assert seconds[1] == pytest.approx(seconds[0], rel=0.02)
    assert any("micro-batches of the same shapes" in text for text in short.header["assumptions"])


@pytest.mark.parametrize(
    ("kind", "rows"),
    [
        (OfBuffers, lambda part: 512),
        (Keeping, lambda part: 512),
        (Trainer, lambda part: 512 - part),
    ],
)
def test_what_does_not_follow_is_made(kind: type[Trainer], rows: Callable[[int], int]) -> None:
    """Batches of other shapes, buffers that a trainer fills, and what stays behind."""
    assert trained(kind, rows)[1] == 0


def test_those_of_two_shapes_follow_from_their_own() -> None:
    """Two of 512 rows and two of 256 are made before two more, and the last."""
    assert trained(rows=lambda part: 512 if part < 4 else 256)[1] == STEPS * (2 + 1)


# --- Lightning's loop ----------------------------------------------------------------------------


def fitted(
    rows: Callable[[int], int] = lambda at: 64,
    *,
    leaves_out: bool = True,
    keeps: bool = False,
    labels: bool = True,
) -> tuple[Recording, int, float]:
    """The recording of a Lightning training with accumulation, how many micro-batches were left
    out, and the last loss that it logged."""
    lightning = pytest.importorskip("lightning.pytorch")

    class Module(lightning.LightningModule):  # type: ignore[misc, name-defined]
        def __init__(self) -> None:
            super().__init__()
            self.net = torch.nn.Linear(256, 256)
            self.kept: list[torch.Tensor] = []

        def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
            out = self.net(batch["x"][0])
            if keeps:
                self.kept.append(out.detach())
            self.log("loss", out.square().mean())
            loss: torch.Tensor = out.square().mean()
            return loss

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.AdamW(self.parameters())

        def on_before_optimizer_step(self, optimizer: Any) -> None:
            steps.append(None)

        def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
            assert outputs["loss"].ndim == 0
            if len(steps) > simulation.steps:
                simulation.end_step()

    steps: list[None] = []
    left_out: list[int] = []
    repeated: list[list[int]] = []
    patches = PatchSet()
    extra = {} if labels else {"name": "a text"}
    data = [{"x": [torch.rand(rows(at), 256)], **extra} for at in range(STEPS * PARTS)]
    with Simulation("RTX 4090") as simulation:
        watch = MicroBatches(simulation, lambda: left_out.append(1), repeated)
        if leaves_out:
            watch.install(patches)
        try:
            lightning.Trainer(
                accelerator="gpu", devices=1, max_epochs=1, accumulate_grad_batches=PARTS,
                logger=False, enable_checkpointing=False, enable_progress_bar=False,
                enable_model_summary=False,
            ).fit(Module(), torch.utils.data.DataLoader(data, batch_size=None))  # fmt: skip
        finally:
            patches.restore()
        recording = simulation.recording
    recording.header["repeated"] = repeated
    recording.check()
    return recording, len(left_out), len(steps)


def test_lightnings_micro_batches_have_memory_and_time_of_all() -> None:
    whole, none, steps = fitted(leaves_out=False)
    short, left_out, same = fitted()
    assert (none, left_out) == (0, STEPS * (PARTS - 3)) and steps == same == STEPS
    peaks = [replay(Stream.of(each)) for each in (whole, short)]
    assert peaks[0].peak_reserved == peaks[1].peak_reserved
    assert peaks[0].peak_allocated == pytest.approx(peaks[1].peak_allocated, abs=1024)
    machine = machine_of(find_gpu("RTX 4090"))
    seconds = [step_time(Work.of_steady_step(each), machine).seconds for each in (whole, short)]
    assert seconds[1] == pytest.approx(seconds[0], rel=0.02)


@pytest.mark.parametrize(
    "other", [{"keeps": True}, {"rows": lambda at: 64 - at % PARTS}, {"labels": False}]
)
def test_lightnings_micro_batches_that_do_not_follow_are_made(other: dict[str, Any]) -> None:
    """Those that leave something behind, have other shapes, or come with more than tensors."""
    assert fitted(**other)[1] == 0
