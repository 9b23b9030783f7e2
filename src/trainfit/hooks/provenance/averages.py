"""Copies of a model whose weights a script averages as it trains, and what is left out of that."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Collection, Iterable, Sequence
from typing import Any, Final

import torch

from trainfit.hooks.owners import own_name
from trainfit.hooks.provenance.cuts import FirstOfKind, Marks
from trainfit.torch_private.modules import BatchNorm
from trainfit.torch_private.operators import version

#: Operators that change a tensor in place.
_IN_PLACE: Final = ("__imul__", "__iadd__", "__isub__", "__itruediv__")


class Averages(FirstOfKind):
    """Follows copies of a model whose weights a script averages: does it keep the statistics of
    BatchNorm up to date, too? Told of the first steps alone, in which all is seen."""

    def __init__(self, place: Callable[[], str | None]) -> None:
        super().__init__(place)
        #: Tensors that were changed in place since the first step, or whose data were asked for,
        #: which may be changed without a new version.
        self._changed: Marks[bool] = Marks()
        #: What detach() gave since then, of which tensor: it has the numbers of that one.
        self._same: Marks[weakref.ref[torch.Tensor]] = Marks()
        #: Averages of torch.optim.swa_utils, and whether BatchNorm's statistics were computed with
        #: the weights that they have now.
        self._equal: weakref.WeakKeyDictionary[Any, bool] = weakref.WeakKeyDictionary()

    def gave(self, name: str, args: Sequence[Any], result: Any) -> None:
        """A function of PyTorch, by its name, gave something, after the first step began."""
        first = args[0] if args else None
        if name == "detach" and isinstance(first, torch.Tensor):
            self._same.put(result, weakref.ref(first))
            return
        is_in_place = name == "data" or (name.endswith("_") and not name.startswith("__"))
        if not (is_in_place or name in _IN_PLACE):
            return
        for tensor in (first or ()) if name.startswith("_foreach_") else (first,):
            if isinstance(tensor, torch.Tensor):
                self._changed.put(tensor, True)
                same = self._same.of(tensor)
                if same is not None and (own := same()) is not None:
                    self._changed.put(own, True)

    def changed(self, tensor: torch.Tensor) -> bool:
        """Was it changed in place since the first step, or were its data asked for?"""
        return bool(self._changed.of(tensor))

    def averaged(self, model: Any) -> None:
        """An average of torch.optim.swa_utils gets other weights. Those of an own function (an EMA)
        are near the model's, whose statistics they are given."""
        is_equal = model.avg_fn is None and getattr(model, "multi_avg_fn", None) is None
        if is_equal and not model.use_buffers:
            self._equal[model] = False

    def renewed(self, model: Any) -> None:
        """BatchNorm's statistics of such an average are computed."""
        if model in self._equal:
            self._equal[model] = True

    def evaluates(self, model: Any) -> None:
        """An average is about to be called: with statistics that are the model's?"""
        if model.training:
            self.renewed(model)
        elif "norm_of_average" not in self._found and self._equal.get(model, True) is False:
            norms = [
                own_name(name)
                for name, part in model.named_modules()
                if isinstance(part, BatchNorm) and part.running_mean is not None
            ]
            if norms:
                self._note("norm_of_average", len(norms), norms[0])

    def calling(self, model: Any, trained: Collection[int], others: Iterable[Any]) -> None:
        """An outermost module is about to be called; the optimizers have the tensors ``trained``,
        by identity, of ``others``."""
        if torch.is_grad_enabled() or model.training or "norm_left_behind" in self._found:
            return
        parameters = list(model.parameters())
        if not any(map(self._changed.of, parameters)):
            return
        if any(id(parameter) in trained for parameter in parameters):
            return
        norms = {
            name: part
            for name, part in model.named_modules()
            if isinstance(part, BatchNorm) and part.running_mean is not None
        }
        statistics: list[Any] = [part.running_mean for part in norms.values()]
        if not norms or any(
            version(statistic) > 0 or self._changed.of(statistic) for statistic in statistics
        ):
            return
        number = len(parameters)
        for other in others:
            own = list(other.parameters())
            if other is not model and len(own) == number and any(id(it) in trained for it in own):
                # Statistics of such a copy are those of the day it was made.
                self._note("norm_left_behind", len(norms), next(iter(norms)), place="")
                return
