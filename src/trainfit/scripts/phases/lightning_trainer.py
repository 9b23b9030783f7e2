"""Lightning's trainer in a run whose epochs are cut short: what it limits by itself.

It takes parts of a loader's length (``limit_val_batches=0.1``), which a short epoch does not have,
and counts epochs until it validates. Callbacks that unfreeze layers or average weights wait for an
epoch by its number, which is taken to come next.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterator
from typing import Any, Final

from trainfit.simgpu.device.user_location import user_frame
from trainfit.simgpu.patching import PatchSet

#: Batches of the validation before the first step: the one after the epoch tells what it needs.
_SANITY: Final = 2
_TRAINER: Final = ("lightning.pytorch.trainer.trainer", "pytorch_lightning.trainer.trainer")
_STAGES: Final = ("train", "val", "test", "predict")
#: Words in the name of an attribute that holds the number of an epoch at which something begins
#: (BackboneFinetuning's unfreeze_backbone_at_epoch, and those of callbacks of its kind).
_BEGINS: Final = frozenset(("at", "from", "start", "unfreeze"))
#: Of the trainer's progress.
_COUNTS: Final = ("ready", "started", "processed", "completed")
_ENTRIES: Final = ("fit", "validate", "test", "predict")


class LightningTrainer:
    """Has Lightning's trainer validate at the end of each epoch where ``is_cut`` says that epochs
    are cut short, and take all of the batches that are left; remembers how many it would take."""

    def __init__(self, is_cut: Callable[[], bool]) -> None:
        self._is_cut = is_cut
        self._limits: dict[str, float] = {}
        self._trainer: Any = None
        self._place: str | None = None
        self.later: str | None = None
        """The line that began the training, once it was taken to a later epoch."""

    def install(self, patches: PatchSet) -> None:
        """Patch Lightning's trainer, until ``patches`` is restored."""

        def hook(module: Any) -> None:
            for name in _ENTRIES:
                patches.hook(module.Trainer, name, self._entered)

        for name in _TRAINER:
            patches.when_imported(name, hook)

    def combined(self) -> Any:
        """The loaders of its training, as one."""
        return getattr(getattr(self._trainer, "fit_loop", None), "_combined_loader", None)

    @property
    def epochs(self) -> int | None:
        """Epochs of its training, where it goes by them."""
        epochs = getattr(self._trainer, "max_epochs", None)
        is_limit = getattr(self._trainer, "max_steps", -1) == -1
        return epochs if isinstance(epochs, int) and epochs > 0 and is_limit else None

    @property
    def by_number(self) -> str | None:
        """The line that began the training, where a callback waits for a later epoch."""
        return self._place if any(True for _ in self._awaited()) else None

    def goes_on(self) -> bool:
        """Make the next epoch the first that a callback waits for, within a step; is there one?
        What goes wrong in it does not reach the script."""
        try:
            epoch = min(self._awaited(), default=None)
            if epoch is None:
                return False
            counts = self._trainer.fit_loop.epoch_progress.current
            ahead = epoch - 1 - self._trainer.current_epoch
            for name in _COUNTS:
                setattr(counts, name, getattr(counts, name) + ahead)
        except Exception:  # of another version
            return False
        self.later = self._place
        return True

    def _awaited(self) -> Iterator[int]:
        """Epochs to come at which a callback, or the module, begins something."""
        now, last = getattr(self._trainer, "current_epoch", 0), self.epochs or 0
        module = getattr(self._trainer, "lightning_module", None)
        for owner in (*getattr(self._trainer, "callbacks", ()), module):
            epochs = [
                value
                for name, value in getattr(owner, "__dict__", {}).items()
                if "epoch" in name and _BEGINS & set(name.split("_"))
            ]
            if hasattr(owner, "_swa_epoch_start"):
                epochs = [owner.swa_start]  # which counts from 0
            yield from (each for each in epochs if type(each) is int and now < each < last)

    def trained(self, batches: int) -> int:
        """The number of an epoch's batches, of ``batches`` in all."""
        return self._of("train", batches)

    def evaluated(self, batches: int) -> int:
        """The number of batches, of so many, in an evaluation of the kind that goes on."""
        stage = getattr(getattr(self._trainer, "state", None), "fn", None)
        return self._of({"test": "test", "predict": "predict"}.get(str(stage), "val"), batches)

    def _of(self, stage: str, batches: int) -> int:
        limit = self._limits.get(stage, 1.0)
        if isinstance(limit, int):
            return min(limit, batches)
        return batches if math.isinf(limit) else int(limit * batches)

    def _entered(self, enter: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(enter)
        def wrapper(trainer: Any, *args: Any, **kwargs: Any) -> Any:
            if trainer is not self._trainer:
                self._trainer, self._place = trainer, user_frame()
                self._limits = {each: getattr(trainer, _name(each), 1.0) for each in _STAGES}
            trainer.num_sanity_val_steps = min(trainer.num_sanity_val_steps, _SANITY)
            if self._is_cut():
                trainer.check_val_every_n_epoch, trainer.val_check_interval = 1, 1.0
                for stage, limit in self._limits.items():
                    if isinstance(limit, float) and limit:
                        setattr(trainer, _name(stage), 1.0)
            return enter(trainer, *args, **kwargs)

        return wrapper


def _name(stage: str) -> str:
    return f"limit_{stage}_batches"
