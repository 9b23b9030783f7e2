"""Detects an evaluation or a checkpoint among the simulated steps.

Both can need memory that no training step does. Nothing that goes wrong while watching reaches the
script.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import math
import os
import sys
import weakref
from collections import Counter, defaultdict
from collections.abc import Callable
from types import FrameType, ModuleType
from typing import Any, Final

import torch

from trainfit.hooks.modes import behaves_by_mode
from trainfit.results.runs.steps import Coverage
from trainfit.results.runs.trace import LoaderInfo
from trainfit.scripts.phases.loops import Course, course_of, epochs_of, steps_of_trainer
from trainfit.simgpu.device.user_location import call_of_user, locals_of, user_frame
from trainfit.simgpu.patching import PatchSet
from trainfit.torch_private.modules import Dropout

#: The part of a copy's parameters that are trained: a single number of an optimizer is in many.
_COPIED: Final = 0.5
#: Steps of an epoch, from which on work of each step is none of an epoch's end.
_STEPS_OF_EPOCH: Final = 5
#: Frames of hooks between a layer and what it calls, at most.
_HOOKS: Final = 4
#: What is no checkpoint by itself: pickle writes tensors that go to other processes so, storage by
#: storage (`torch/storage.py`), as do the ranks that are simulated side by side.
_ALONE: Final = (torch.Tensor, torch.UntypedStorage, torch.TypedStorage)
#: What names a file, and how many of them are kept.
_PATHS: Final = (str, bytes, os.PathLike)
_MOST_SAVES: Final = 32


def _numel(shapes: Counter[tuple[int, ...]]) -> int:
    return sum(count * math.prod(shape) for shape, count in shapes.items())


def _layer_of(frame: FrameType | None) -> Any:
    """The layer for dropout that calls its function, through hooks; ``None``: none does."""
    for _ in range(_HOOKS):
        layer = locals_of(frame).get("self") if frame is not None else None
        if frame is None or isinstance(layer, Dropout):
            return layer
        frame = frame.f_back
    return None


class CoverageWatch:
    """Follows models, optimizers and checkpoints of a script.

    Args:
        feeding: tells of the DataLoader that feeds the training, and how far it has come.
        operators: how many ran so far.
    """

    def __init__(
        self, feeding: Callable[[], LoaderInfo | None], operators: Callable[[], int] = lambda: 0
    ) -> None:
        self._feeding, self._operators = feeding, operators
        self._spans: list[list[int]] = []
        self._called_at = 0
        self._trained: set[int] = set()
        #: Shapes of what each optimizer trains.
        self._shapes: dict[int, Counter[tuple[int, ...]]] = defaultdict(Counter)
        self._evaluated = self._saved = False
        self.saves: dict[str, str] = {}
        """Files of checkpoints, each with the user's line that wrote it first."""
        #: Where the model was evaluated in this step, and where a checkpoint was written; likewise
        #: in each before.
        self._done: tuple[str | None, str | None] = (None, None)
        self._done_before: list[tuple[str | None, str | None]] = []
        #: Where an evaluation after the first step began with gradients on.
        self._graph_at: str | None = None
        #: Where one began with the model in training mode, and where one drops values out.
        self._training_at: str | None = None
        self._dropping_at: str | None = None
        #: Is the model trained in evaluation mode?
        self._trains_as_evaluated = False
        #: Does an evaluation go on?
        self._is_within = False
        #: The model that was called in it last.
        self._within: weakref.ref[torch.nn.Module] | None = None
        #: Has it neither eval() nor no_grad()?
        self._is_bare = False
        #: The loader that feeds no step whose batch the model was called with, how many it had
        #: given then, and the operators before; and such loaders that do feed a backward pass.
        self._first_other: tuple[int, int, int] | None = None
        self._fed: set[int] = set()
        #: Was the model called in this step as an evaluation does, and in each before?
        self._has_inferred = False
        #: Was a copy of it, in the first step?
        self._has_taught = False
        self._inferring: list[bool] = []
        #: Epochs of the script's loop.
        self._epochs: int | None = None
        #: Steps of the training, where a trainer knows them.
        self._most_steps: int | None = None
        #: What its source says of what is to come.
        self._course = Course()
        self.of_trainer: Callable[[], tuple[int | None, str | None]] = lambda: (None, None)
        """Gives what a trainer of a library knows: its epochs, and the line that began a training
        in which something waits for a later one."""
        #: Steps made and batches given, at the first step and at the last.
        self._progress: list[tuple[int, int]] = []
        #: Backward passes up to the first step's end.
        self._passes = 0
        #: … and at the last one with which no epoch ended.
        self._within_epoch: tuple[int, int] | None = None
        self.other_batch: Callable[[], tuple[int, int] | None] = lambda: None
        """Tells, where the latest batch is of a loader that gave the first step none, which loader
        that is, and how many it has given."""
        self.before_evaluation: Callable[[], None] = lambda: None
        """Called before an evaluation of the model begins."""
        self.trains_again: Callable[[], None] = lambda: None
        """Called before the model is called for training after an evaluation."""
        self.of_epoch: Callable[[int], int] = lambda batches: batches
        """Of so many batches of the training's loader, those of an epoch."""

    def install(self, patches: PatchSet) -> None:
        """Watch from now on, until ``patches`` is restored."""
        self._watch_parameters(patches)
        patches.hook(torch, "save", self._noting)
        for name in ("dropout", "dropout1d", "dropout2d", "dropout3d", "alpha_dropout"):
            patches.hook(torch.nn.functional, name, self._dropping)

        def safetensors(module: ModuleType) -> None:
            # What its save_file and save_model call, whoever has imported them by name.
            if hasattr(module, "serialize_file"):
                patches.hook(module, "serialize_file", self._noting)

        patches.when_imported("safetensors.torch", safetensors)

    def called(self, module: torch.nn.Module) -> None:
        """An outermost module with parameters is about to be called."""
        trains = module.training or self._trains_as_evaluated
        trains = trains and torch.is_grad_enabled()
        self._called_at = self._operators()
        if trains and self._inferring and self._is_bare_evaluation(module):
            return
        if not self._trained or (self._is_within if not trains else not self._is_within):
            return
        try:
            is_own = any(id(parameter) in self._trained for parameter in module.parameters())
            if not is_own and (trains or not self._is_copy(module)):
                return
        except Exception:  # a module of the user's, whatever it raises
            return
        if not is_own and not self._inferring:
            self._has_taught = True
        elif trains:
            self._over()
            self.trains_again()
        elif self._is_evaluation(module):
            self._within = weakref.ref(module)
            self.before_evaluation()
            self._evaluated = self._is_within = True
            self._spans.append([self._called_at, self._called_at])
            self._done = user_frame(), self._done[1]
            if self._inferring and torch.is_grad_enabled():
                self._graph_at = user_frame()
            if module.training and is_own and behaves_by_mode(module):
                self._training_at = user_frame()
        else:
            self._has_inferred = True

    def _is_bare_evaluation(self, module: torch.nn.Module) -> bool:
        """Is a call with gradients, in training mode, one of an evaluation, which has neither
        ``no_grad()`` nor ``eval()``? It is given a batch of a loader that feeds no training step.
        The second such batch without a backward pass in between tells."""
        other = self.other_batch()
        if other is None or other[0] in self._fed or (self._is_within and not self._is_bare):
            self._first_other = None
            return False
        if self._is_within:
            return True
        first = self._first_other
        if first is None or first[0] != other[0]:
            self._first_other = *other, self._called_at
            return False
        try:
            is_own = any(id(parameter) in self._trained for parameter in module.parameters())
        except Exception:  # a module of the user's, whatever it raises
            return False
        if first[1] == other[1] or not is_own:
            return False
        self.before_evaluation()
        self._within = weakref.ref(module)
        self._evaluated = self._is_within = self._is_bare = True
        self._spans.append([first[2], self._called_at])
        self._graph_at = user_frame()
        self._done = self._graph_at, self._done[1]
        if behaves_by_mode(module):
            self._training_at = user_frame()
        return True

    def _is_copy(self, module: torch.nn.Module) -> bool:
        """Has it the parameters of what is trained, as averaged weights have (EMA)?"""
        own = Counter(tuple(parameter.shape) for parameter in module.parameters())
        least = _COPIED * _numel(own)
        return any(shapes <= own and _numel(shapes) >= least for shapes in self._shapes.values())

    def _is_evaluation(self, module: torch.nn.Module) -> bool:
        """Is a call without gradients, or in evaluation mode, none that every step has?

        A step may have some: a generator's for the critic, labels that the model makes itself, a
        model that is trained in evaluation mode. Before the first step only the mode tells.
        """
        if not self._inferring:
            return not module.training and not self._has_inferred
        return not any(self._inferring[1:] or self._inferring)

    def differentiated(self) -> None:
        """A backward pass is over: an evaluation that has one needs gradients.

        Before the first step it is none, but a model that is trained in evaluation mode.
        """
        if not self._inferring:
            self._passes += 1
        if self._first_other is not None:
            self._fed.add(self._first_other[0])
            self._first_other = None
        if not self._is_within:
            return
        self._graph_at = None
        if self._is_bare:  # a training of several loaders
            self._spans.pop()
            self._evaluated, self._training_at = bool(self._spans), None
            self._is_within = self._is_bare = False
            return
        if not self._inferring:
            self._is_within, self._trains_as_evaluated = False, True
            self._spans[-1][1] = self._called_at
            if self._spans[-1][0] == self._called_at:
                self._spans.pop()
                self._evaluated = bool(self._spans)

    def epoch_ended(self) -> None:
        """What was evaluated before does not count: it was none of an epoch's end."""
        self._over()
        self._evaluated = False

    def evaluations(self) -> list[list[int]]:
        """Operators of each evaluation so far, the first and the one after the last."""
        found = [list(span) for span in self._spans]
        if self._is_within:
            found[-1][1] = self._operators()
        return found

    def _over(self) -> None:
        """An evaluation is over, if one goes on: what is called now is the training's."""
        if self._is_within:
            self._spans[-1][1] = self._called_at
        self._is_within = self._is_bare = False

    def stepped(self, steps: int) -> None:
        """An optimizer step is over, the ``steps``-th."""
        self._inferring.append(self._has_inferred or self._has_taught)
        self._has_inferred = self._has_taught = False
        self._done_before.append(self._done)
        self._done = None, None
        self._over()
        if steps == 1:
            self._epochs = epochs_of(sys._getframe(1))
            self._course = course_of(sys._getframe(1))
            with contextlib.suppress(Exception):  # a trainer of another version
                self._most_steps = steps_of_trainer(sys._getframe(1))
            epochs, by_number = self.of_trainer()
            self._epochs = self._epochs or epochs
            if by_number is not None and self._course.by_number is None:
                self._course = dataclasses.replace(self._course, by_number=by_number)
        loader = self._feeding()
        if loader is not None:
            self._progress = [*self._progress[:1], (steps, loader.batches)]
            batches = self._batches_of_epoch(loader)
            if batches and loader.batches % batches:
                self._within_epoch = steps, loader.batches

    def result(self) -> Coverage:
        """What was seen so far."""
        epochs, steps = self._epoch()
        # The first step has what comes before it; what a whole epoch is may come after each.
        later = self._done_before[1:] if (steps or 0) >= _STEPS_OF_EPOCH else []
        in_each = [set(lines) for lines in zip(*later, strict=True)] if len(later) > 1 else []
        each = [lines.pop() if len(lines) == 1 else None for lines in in_each] or [None, None]
        return Coverage(
            self._evaluated,
            self._saved,
            epochs,
            steps,
            self._epochs,
            graph_at=self._graph_at,
            training_at=self._training_at,
            dropping_at=self._dropping_at,
            after=self._course.after,
            by_number=self._course.by_number,
            most_steps=self._most_steps,
            evaluated_each=each[0],
            saved_each=each[1],
        )

    def _epoch(self) -> tuple[float | None, int | None]:
        """Epochs that were done, and optimizer steps in one, where the data set's size is known.

        Batches are counted between the first step and the last: some loaders read ahead. At an
        epoch's end there is nothing ahead, so it counts only if no step is within an epoch. One
        step alone tells by its backward passes; a second batch without one may be ahead.
        """
        loader = self._feeding()
        batches = self._batches_of_epoch(loader)
        if batches is None or not self._progress:
            return None, None
        (first, before), (last, after) = self._progress[0], self._progress[-1]
        done = last
        if self._within_epoch is not None and self._within_epoch[0] > first:
            last, after = self._within_epoch
        if first == last == 1 and after not in (1, self._passes):
            return None, None
        for_each = after / last if first == last else (after - before) / (last - first)
        if for_each <= 0:
            return None, None
        steps = max(1, math.ceil(batches / for_each))
        return done / steps, steps

    def _batches_of_epoch(self, loader: LoaderInfo | None) -> int | None:
        """The batches of an epoch of the training's loader; ``None``: not known."""
        if loader is None or not loader.epoch_samples or not loader.batch_size:
            return None
        return self.of_epoch(math.ceil(loader.epoch_samples / loader.batch_size))

    def _watch_parameters(self, patches: PatchSet) -> None:
        add = torch.optim.Optimizer.add_param_group
        trained, shapes = self._trained, self._shapes

        @functools.wraps(add)
        def add_param_group(optimizer: Any, param_group: dict[str, Any]) -> None:
            add(optimizer, param_group)
            with contextlib.suppress(Exception):
                params = optimizer.param_groups[-1]["params"]
                trained.update(map(id, params))
                shapes[id(optimizer)].update(tuple(parameter.shape) for parameter in params)

        patches.set(torch.optim.Optimizer, "add_param_group", add_param_group)

    def _dropping(self, drop: Callable[..., Any]) -> Callable[..., Any]:
        """A wrapper of a function that drops values out unless it is told not to. Layers of the
        model do by their mode, which the script has set: some sample by dropout. One that is none
        of its parts (made in forward, kept in a list) was told nothing."""

        @functools.wraps(drop)
        def wrapper(x: Any, p: float = 0.5, training: bool = True, *more: Any, **kw: Any) -> Any:
            if self._is_within and training and p and self._dropping_at is None:
                is_apart = self._is_apart(_layer_of(sys._getframe(1)))
                self._dropping_at = user_frame() if is_apart else call_of_user()
            return drop(x, p, training, *more, **kw)

        return wrapper

    def _is_apart(self, layer: Any) -> bool:
        """Is it a layer, and no part of the model that is evaluated?"""
        model = self._within() if self._within is not None else None
        return (
            layer is not None
            and model is not None
            and all(part is not layer for part in model.modules())
        )

    def _noting(self, write: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(write)
        def wrapper(*args: Any, **kwargs: Any) -> Any:
            what = args[0] if args else kwargs.get("obj")
            if isinstance(what, _ALONE):
                return write(*args, **kwargs)
            # Before there is an optimizer it is data: PyG's data sets write what they read once.
            self._saved = self._saved or bool(self._trained)
            self._done = self._done[0], user_frame()
            with contextlib.suppress(Exception):  # a path of the user's kind
                to: Any = args[1] if len(args) > 1 else kwargs.get("f", kwargs.get("filename"))
                path = os.path.abspath(os.fsdecode(to if isinstance(to, _PATHS) else to.name))
                if len(self.saves) < _MOST_SAVES:
                    self.saves.setdefault(path, user_frame() or "")
            return write(*args, **kwargs)

        return wrapper
