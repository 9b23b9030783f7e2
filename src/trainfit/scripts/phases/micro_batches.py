"""Micro-batches of a step that are alike: of many only some are simulated.

Transformers' ``Trainer`` and Lightning's accumulate gradients over micro-batches. Those after the
first two that have their shapes, but for the last, do what the second did: they are fetched and
counted, and not made. Memory is that of the others, and the second one's kernels stand for theirs.
Those of any other loop are :mod:`trainfit.scripts.phases.own_micro_batches`'.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from types import ModuleType
from typing import Any, Final

import torch

from trainfit.scripts.phases.closures import RepeatedClosures
from trainfit.scripts.phases.own_micro_batches import ALIKE_BYTES, OwnMicroBatches
from trainfit.simgpu.patching import PatchSet
from trainfit.simgpu.session import Simulation

#: Micro-batches that are made before others follow from them: the first makes the gradients.
_MADE: Final = 2
#: Where Lightning's loop makes a micro-batch and steps where it was the last.
_LIGHTNING: Final = (
    "lightning.pytorch.loops.optimization.automatic",
    "pytorch_lightning.loops.optimization.automatic",
)
#: A name and a form for each tensor of a micro-batch.
_Form = tuple[tuple[str, tuple[int, ...], torch.dtype], ...]


class MicroBatches:
    """Leaves out the micro-batches of a ``Trainer``'s step that follow from those before.

    Args:
        simulation: where they are made.
        count: counts one that is left out.
        repeated: gets the calls that stand for others, as
            :class:`~trainfit.results.runs.recording.RepeatedCall` has them.
    """

    def __init__(
        self, simulation: Simulation, count: Callable[[], None], repeated: list[list[int]]
    ) -> None:
        self._simulation, self._count, self._repeated = simulation, count, repeated
        self._own = OwnMicroBatches(simulation, repeated)
        self._closures = RepeatedClosures(simulation, repeated)
        self._of_step, self._made = -1, 0
        self._form: _Form | None = None
        self._in_use: list[int] = []
        self._loss: Any = None
        self._entry: list[int] = []

    def install(self, patches: PatchSet) -> None:
        """Watch from now on, until ``patches`` is restored."""

        def training(module: ModuleType) -> None:
            prepare = getattr(module.Trainer, "_prepare_inputs", None)
            if prepare is not None and hasattr(module.Trainer, "training_step"):
                make = functools.partial(self._of_trainer, prepare)
                patches.hook(module.Trainer, "training_step", make)

        def optimizing(module: ModuleType) -> None:
            loop = getattr(module, "_AutomaticOptimization", None)
            if loop is not None and hasattr(loop, "run"):
                patches.hook(loop, "run", self._of_lightning)

        self._closures.install(patches)
        patches.when_imported("transformers.trainer", training)
        for name in _LIGHTNING:
            patches.when_imported(name, optimizing)
        self._own.install(patches)

    def _of_trainer(self, prepare: Any, train: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(train)
        def training_step(trainer: Any, model: Any, inputs: Any, *args: Any, **kwargs: Any) -> Any:
            form = _form(inputs) if type(trainer)._prepare_inputs is prepare else None
            is_last = getattr(trainer.accelerator, "sync_gradients", True)
            if not is_last and form is not None and self._follows(form):
                return self._left_out()
            self._loss = None
            began = self._simulation.operators
            loss = train(trainer, model, inputs, *args, **kwargs)
            if not is_last:
                self._note(form, loss, [began, began, self._simulation.operators, 0])
            return loss

        return training_step

    def _of_lightning(self, make: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(make)
        def run(loop: Any, optimizer: Any, batch_idx: int, kwargs: Any) -> Any:
            trainer = loop.trainer
            steps_itself = getattr(trainer.strategy, "handles_gradient_accumulation", False)
            is_last = steps_itself or not trainer.fit_loop._should_accumulate()
            form = _form_of_batch(kwargs)
            if not is_last and form is not None and self._follows(form):
                return self._left_out()
            self._loss = None
            began = self._simulation.operators
            outputs = make(loop, optimizer, batch_idx, kwargs)
            if not is_last:
                self._note(form, outputs, [began, began, self._simulation.operators, 0])
            return outputs

        return run

    def _follows(self, form: _Form) -> bool:
        """Do the last two of this step tell what one of this form does?"""
        return (
            self._of_step == self._simulation.steps
            and self._made >= _MADE
            and form == self._form
            and self._loss is not None
            and abs(self._in_use[-1] - self._in_use[-2]) <= ALIKE_BYTES
        )

    def _note(self, form: _Form | None, loss: Any, entry: list[int]) -> None:
        if self._of_step != self._simulation.steps or form != self._form:
            self._of_step, self._made, self._form = self._simulation.steps, 0, form
            self._in_use = []
        self._made += 1
        self._in_use.append(self._simulation.allocator.requested_bytes)
        self._loss, self._entry = loss, entry

    def _left_out(self) -> Any:
        if not self._entry[-1]:
            self._repeated.append(self._entry)
            self._simulation.engine.assume(
                "of a step's micro-batches of the same shapes the first two and the last were "
                "simulated: the others need the second's memory and time"
            )
        self._entry[-1] += 1
        self._count()
        return self._loss


def _form(inputs: Any) -> _Form | None:
    """The form of tensors by name; ``None`` where there is more in a micro-batch."""
    if not isinstance(inputs, Mapping) or not all(
        isinstance(each, torch.Tensor) for each in inputs.values()
    ):
        return None
    return tuple((name, tuple(each.shape), each.dtype) for name, each in inputs.items())


def _form_of_batch(given: Any) -> _Form | None:
    """The form of the tensors in what a ``training_step`` gets, by their places; ``None`` where
    there is more than those in a batch."""
    found: dict[str, Any] = {}
    left = [("", given.get("batch"))] if isinstance(given, Mapping) else []
    while left:
        name, each = left.pop()
        if isinstance(each, Mapping):
            left += [(f"{name}.{key}", value) for key, value in each.items()]
        elif isinstance(each, tuple | list):
            left += [(f"{name}.{index}", value) for index, value in enumerate(each)]
        else:
            found[name] = each
    return _form(found) if found else None
