"""Callbacks of Lightning that wait for an epoch by its number get it within a few steps."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, TensorDataset

import trainfit
from trainfit.scripts.phases.last_epoch import LightningTrainer
from trainfit.simgpu.patching import PatchSet


@pytest.fixture(scope="module")
def lightning() -> Iterator[Any]:
    """Also where torchvision's operators do not load: simulated runs have them."""
    with trainfit.simulate("T4"):
        yield pytest.importorskip("lightning.pytorch")


def ran(lightning: Any, *callbacks: Any) -> tuple[list[tuple[int, int]], LightningTrainer]:
    """The epochs of a training, with the number of its trained tensors in each; it is taken on
    after each of their single steps, until nothing waits."""
    patches, seen, noted = PatchSet(), LightningTrainer(lambda: True), list[tuple[int, int]]()

    class Module(lightning.LightningModule):  # type: ignore[misc, name-defined]
        def __init__(self) -> None:
            super().__init__()
            self.backbone = torch.nn.Linear(4, 4)
            self.head = torch.nn.Linear(4, 1)

        def training_step(self, batch: Any, _: int) -> Any:
            trained = sum(each.requires_grad for each in self.parameters())
            noted.append((self.trainer.current_epoch, trained))
            return self.head(self.backbone(batch[0])).mean()

        def configure_optimizers(self) -> Any:
            trained = [each for each in self.parameters() if each.requires_grad]
            return torch.optim.SGD(trained, 0.1)

    class TakesOn(lightning.Callback):  # type: ignore[misc, name-defined]
        def on_train_batch_end(self, trainer: Any, *_: Any) -> None:
            trainer.should_stop = not seen.goes_on()

    trainer = lightning.Trainer(
        max_epochs=20,
        accelerator="gpu",
        devices=1,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        callbacks=[*callbacks, TakesOn()],
    )
    seen.install(patches)
    try:
        trainer.fit(Module(), DataLoader(TensorDataset(torch.zeros(2, 4)), 2))
    finally:
        patches.restore()
    return noted, seen


def test_a_backbone_is_unfrozen_within_two_steps(lightning: Any) -> None:
    unfreezes = lightning.callbacks.BackboneFinetuning(unfreeze_backbone_at_epoch=10)
    noted, seen = ran(lightning, unfreezes)
    assert noted == [(0, 2), (10, 4)]
    assert seen.later is not None and seen.later.startswith(__file__)
    assert seen.epochs == 20


def test_weights_are_averaged_after_the_unfreezing(lightning: Any) -> None:
    unfreezes = lightning.callbacks.BackboneFinetuning(unfreeze_backbone_at_epoch=10)
    averages = lightning.callbacks.StochasticWeightAveraging(0.01, swa_epoch_start=16, device=None)
    noted, _ = ran(lightning, unfreezes, averages)
    assert [epoch for epoch, _ in noted] == [0, 10, 15]
    assert averages._initialized
    assert all(each.is_cuda for each in averages._average_model.parameters())


def test_without_such_a_callback_nothing_is_taken_on(lightning: Any) -> None:
    noted, seen = ran(lightning)
    assert noted == [(0, 4)]
    assert seen.later is None and seen.by_number is None
