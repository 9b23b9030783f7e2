"""The mode that models are in, training or evaluation: one that is trained in the wrong one, one
that is not trained in that of training."""

from __future__ import annotations

import weakref
from collections import Counter
from collections.abc import Callable, Iterable
from typing import Any, Final

import torch

from trainfit.hooks.owners import tensors_of
from trainfit.results.runs.learning import Misuse
from trainfit.torch_private.autograd import graph_task_id
from trainfit.torch_private.modules import BatchNorm, Dropout

#: Calls of a model, in steps, that show it.
_CALLS: Final = 2


class SwitchedModes:
    """What was switched, and where.

    Attributes:
        evaluating: where a model was switched to evaluation that was to be trained, until an
            optimizer's step tells whether it is trained so; ``None``: none was.
        wrong_at: where one was that is trained so.
    """

    def __init__(self) -> None:
        self.evaluating: str | None = None
        self.wrong_at: str | None = None
        self._model: weakref.ref[Any] | None = None
        self._told_to_train: weakref.WeakSet[Any] = weakref.WeakSet()

    def set(
        self, model: Any, training: bool, trained: bool, place: Callable[[], str | None]
    ) -> None:
        """``model.train(training)``, which concerns all its parts; ``trained``: an optimizer has
        made a step with a backward pass.

        A model that comes in evaluation mode (from_pretrained) may be meant to stay in it: what
        counts is one that was trained, or told to train, before it was switched.
        """
        known = self._model() if self._model is not None else None
        if training:
            if known is model:
                self.evaluating = None
            if not trained:
                self._told_to_train.add(model)
        elif (trained or model in self._told_to_train) and behaves_by_mode(model):
            parts = known.modules() if known is not None else ()
            if self.evaluating is not None and any(part is model for part in parts):
                return  # it is told to the parts, too
            self._model, self.evaluating = weakref.ref(model), place() or ""

    def look(self, optimizer: Any) -> None:
        """An optimizer's step begins while a model is in evaluation mode. A part may stay in it
        while the rest is trained: frozen layers."""
        model = self._model() if self._model is not None else None
        if model is not None and not model.training:  # some set the attribute to switch back
            parts = {id(tensor) for tensor in model.parameters()}
            if all(id(tensor) in parts for tensor in tensors_of(optimizer) if tensor.requires_grad):
                self.wrong_at = self.evaluating
        self.evaluating = None


def behaves_by_mode(model: Any) -> bool:
    """Whether it has layers that compute something else in training."""
    return any(isinstance(part, BatchNorm | Dropout) for part in model.modules())


class Bystanders:
    """Follows models that are called in training mode, and that nobody trains: a teacher, features
    of which a loss is computed, a model that only predicts."""

    def __init__(self) -> None:
        self._calls: weakref.WeakKeyDictionary[Any, int] = weakref.WeakKeyDictionary()
        self._found: Misuse | None = None
        #: Of a run without a training.
        self._predicts: Misuse | None = None

    def found(self, *, trains: bool) -> tuple[Misuse, ...]:
        """The model's class and a layer that computes something else in training; of a model that
        predicts, if nothing ``trains``."""
        misuse = self._found if trains else self._predicts
        return () if misuse is None else (misuse,)

    def calling(
        self, module: Any, optimizers: Iterable[Any], place: Callable[[], str | None]
    ) -> None:
        """An outermost module is about to be called, in an early step or before the first; these
        optimizers were made.

        A copy of what is trained, as a target network or an average, is told of in no case: it may
        follow the training in this mode (BYOL), and its weights change.
        """
        if self._found is not None or not module.training or graph_task_id() != -1:
            return  # in a backward pass a checkpoint computes parts of what is trained once more
        calls = self._calls[module] = self._calls.get(module, 0) + 1
        if calls != _CALLS:
            return
        layer = next((type(part).__name__ for part in module.modules() if _drops(part)), None)
        own = list(module.parameters())
        trained = [tensor for one in optimizers for tensor in tensors_of(one)]
        known = {id(tensor) for tensor in trained}
        if layer is None or any(id(parameter) in known for parameter in own):
            return
        told = type(module).__name__, layer
        if not trained:
            if not torch.is_grad_enabled() and self._predicts is None:
                self._predicts = Misuse("predicts_in_training", told, place())
            return
        shapes = Counter(tuple(parameter.shape) for parameter in own)
        if not shapes <= Counter(tuple(tensor.shape) for tensor in trained):
            self._found = Misuse("teacher_in_training", told, place())


def _drops(part: Any) -> bool:
    return isinstance(part, BatchNorm) or (isinstance(part, Dropout) and part.p > 0)
