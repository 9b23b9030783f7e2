"""Takes a script past its last epoch, within the few steps that are simulated.

A final test, an export, a schedule that goes by the number of the epoch come late in a run, and may
need memory that no epoch before does. Once some steps were made, the loops around them go on with
their last round, with the last value of what they go over, and are left after that: where their
line is reached again, the script goes on behind them. No file is changed.

Lightning's trainer in a run whose epochs are cut short: what it limits by itself.

It takes parts of a loader's length (``limit_val_batches=0.1``), which a short epoch does not have,
and counts epochs until it validates. Callbacks that unfreeze layers or average weights wait for an
epoch by its number, which is taken to come next.
"""

from __future__ import annotations

import functools
import math
import sys
from collections.abc import Callable, Iterator
from types import FrameType
from typing import Any, Final

from trainfit.scripts.phases.leaving import gives_nothing, set_variables
from trainfit.scripts.phases.loops import Loop, frames_of_user, loops_around, values_of
from trainfit.simgpu.device.user_location import locals_of, untrace, user_frame
from trainfit.simgpu.patching import PatchSet

_Trace = Callable[[FrameType, str, Any], Any]


class LastEpoch:
    """A watch that ends the loops around the training's steps, from :meth:`begin` on.

    Nothing that goes wrong in it reaches the script.
    """

    def __init__(self) -> None:
        self.place: str | None = None
        """Where a loop was first taken to its last round ("file:line")."""
        self._by_number = False
        #: Of each frame, the loops that are to end, those that had their last round, and the
        #: values that their variables are yet to get.
        self._loops: dict[FrameType, list[tuple[Loop, bool]]] = {}
        self._last: set[tuple[str, int]] = set()
        self._taken: dict[FrameType, tuple[Loop, Any]] = {}
        self._is_on = False

    def begin(self, *, by_number: bool) -> None:
        """Begin within the script's call that ends a step; nothing where its calls are traced by
        others already. With ``by_number``, the loops around the one over the data have their last
        round before they end."""
        self._by_number = by_number
        if not self._is_on and sys.gettrace() is not None:
            return
        frames = frames_of_user(sys._getframe(1))
        around = [(each, loop) for each in frames for loop in loops_around(each)]
        self._loops = {}
        for place, (frame, loop) in enumerate(around):
            is_of_data = place == len(around) - 1 and place > 0
            self._loops.setdefault(frame, []).append((loop, is_of_data))
            frame.f_trace = self._line
        _tell_trainers(sys._getframe(1))
        if not self._is_on:
            self._is_on = True
            sys.settrace(_no_more)

    def end(self) -> None:
        """The script runs as it is again."""
        if self._is_on:
            self._is_on = False
            self._loops, self._taken = {}, {}
            sys.settrace(None)
            untrace(sys._getframe(1), self._line)

    def _line(self, frame: FrameType, event: str, given: Any) -> _Trace | None:
        if not self._is_on:
            return None
        if event == "return":
            self._loops.pop(frame, None)
        elif event == "line":
            try:
                self._at_line(frame)
            except Exception:  # the user's names, and lines that cannot be gone to
                self._loops.pop(frame, None)
        return self._line

    def _at_line(self, frame: FrameType) -> None:
        line = frame.f_lineno
        taken = self._taken.get(frame)
        if taken is not None and taken[0].first <= line <= taken[0].last:
            set_variables(frame, *self._taken.pop(frame))
            return
        for loop, is_of_data in self._loops.get(frame, ()):
            if loop.head[0] <= line <= loop.head[1]:
                self._at_head(frame, loop, is_of_data)
                return

    def _at_head(self, frame: FrameType, loop: Loop, is_of_data: bool) -> None:
        """A round is over: one more, with the last value, or none."""
        key = frame.f_code.co_filename, loop.head[0]
        values = values_of(loop, frame)
        is_new = self._by_number and not is_of_data and key not in self._last
        if is_new and values and len(values) > 1 and loop.take is not None:
            self._last.add(key)
            self.place = self.place or f"{key[0]}:{key[1]}"
            self._loops[frame] = []
            if loop.iterates is None:
                set_variables(frame, loop, values[-1])
            else:  # its next value comes after this line
                self._taken[frame] = loop, values[-1]
        elif loop.iterates is None and isinstance(values, range) and loop.take is not None:
            set_variables(frame, loop, values.stop)
        elif loop.after:
            for line in loop.after:
                frame.f_lineno = line  # type: ignore[misc]  # of the frame that is traced
        elif loop.calls in frame.f_code.co_names:
            gives_nothing(frame.f_globals, loop.calls)
            frame.f_lineno = loop.head[0]  # type: ignore[misc]  # it is made again, of nothing


def _no_more(frame: FrameType, event: str, given: Any) -> None:
    """No calls are traced but those that were begun before."""


def _tell_trainers(frame: FrameType | None) -> None:
    """Transformers' Trainer and Lightning's around ``frame`` are told to stop, as callbacks do."""
    while frame is not None:
        own = locals_of(frame).get("self") if frame.f_code.co_name in _FITTING else None
        if own is not None:
            control: Any = getattr(own, "control", None)
            if hasattr(control, "should_training_stop"):
                control.should_training_stop = True
            elif hasattr(own, "should_stop") and hasattr(own, "fit_loop"):
                own.fit_loop.min_epochs, own.fit_loop.epoch_loop.min_steps = 0, None
                own.should_stop = True
        frame = frame.f_back


#: Methods of trainers that go over the epochs.
_FITTING = frozenset(("_inner_training_loop", "_fit_impl", "_run_epoch", "_run_stage"))


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
            yield from (epoch for epoch in epochs if type(epoch) is int and now < epoch < last)

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
