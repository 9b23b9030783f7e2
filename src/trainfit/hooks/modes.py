"""The mode that models are in, training or evaluation, and one that is trained in the wrong one."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

from trainfit.hooks.owners import tensors_of
from trainfit.torch_private.modules import BatchNorm, Dropout


class Modes:
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
