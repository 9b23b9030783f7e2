"""Intervention: PyTorch's fused attention instead of written-out attention."""

from __future__ import annotations

import functools
from typing import Any

import torch

from trainfit.results.runs.trace import Applicability
from trainfit.simgpu.device.user_location import user_frame
from trainfit.simgpu.device.values import tensors_in
from trainfit.simgpu.interventions.script_state import Intervention, Scene
from trainfit.torch_private import operators as private
from trainfit.torch_private.autograd import graph_task_id

aten = torch.ops.aten


class WeightsUsedError(RuntimeError):
    """The script uses the attention weights that a trial left out."""


class _UnusedWeights:
    """Stands for attention weights that nobody is expected to look at."""

    def __init__(self, place: str | None) -> None:
        self.__dict__["_place"] = place

    def _used(self, *_: Any, **__: Any) -> Any:
        place = self.__dict__["_place"]
        raise WeightsUsedError(f"the attention weights of {place} are used at {user_frame()}")

    __getattr__ = __getitem__ = __iter__ = __len__ = __add__ = __mul__ = __bool__ = _used
    __radd__ = __rmul__ = __sub__ = __truediv__ = __float__ = __gt__ = __lt__ = _used

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        raise WeightsUsedError(f"the attention weights are used at {user_frame()}")


class AttentionWithoutWeights(Intervention):
    """``need_weights=False`` for ``nn.MultiheadAttention`` whose weights nobody uses.

    Asking for the weights, which is the default, keeps PyTorch off its fused attention. A
    trial that sees the weights used fails and says where.
    """

    name = "attention-weights"

    def __init__(self, targets: tuple[str, ...] = ()) -> None:
        super().__init__(targets)
        self._places: dict[str, None] = {}
        self._seen = False

    def watch(self, scene: Scene) -> None:
        super().watch(scene)
        self._patch(scene, keep=True)

    def finding(self) -> Applicability:
        if self._places:
            return Applicability(self.name, True, places=tuple(filter(None, self._places)))
        if self._seen:
            return self.no("nn.MultiheadAttention is not asked for its weights")
        return self.no("the script calls no nn.MultiheadAttention")

    def apply(self, scene: Scene) -> None:
        self._patch(scene, keep=False)

    def _patch(self, scene: Scene, *, keep: bool) -> None:
        forward = torch.nn.MultiheadAttention.forward

        @functools.wraps(forward)
        def patched(
            module: Any,
            query: Any,
            key: Any,
            value: Any,
            key_padding_mask: Any = None,
            need_weights: bool = True,
            *args: Any,
            **kwargs: Any,
        ) -> Any:
            self._seen = True
            wanted = need_weights
            if need_weights:
                place = user_frame()
                self._places.setdefault(place or "")
                self.changed += 1
                wanted = keep
            result = forward(module, query, key, value, key_padding_mask, wanted, *args, **kwargs)
            if need_weights and not wanted:
                return result[0], _UnusedWeights(place)
            return result

        scene.patches.set(torch.nn.MultiheadAttention, "forward", patched)


class WrittenAttention(Intervention):
    """softmax(QKᵀ)V written out in the script: found among the operators, not replaced.

    Scores are the result of a batched matmul; what is made of them on the way to a
    second matmul, through one softmax, would not be kept by the fused kernels.
    """

    name = "fused-attention"

    _PRODUCTS = (aten.bmm.default, aten.baddbmm.default)
    _SOFTMAX = (private.softmax.default, private.safe_softmax.default)
    #: What happens to scores and probabilities on the way.
    _BETWEEN = frozenset(
        {
            *(aten.mul.Tensor, aten.mul.Scalar, aten.div.Tensor, aten.div.Scalar),
            *(aten.add.Tensor, aten.sub.Tensor, aten.where.self, aten.masked_fill.Scalar),
            *(aten.masked_fill.Tensor, aten.native_dropout.default, private.to_copy.default),
            *(aten.clone.default, private.fused_dropout.default, private.unsafe_view.default),
        }
    )

    def __init__(self, targets: tuple[str, ...] = ()) -> None:
        super().__init__(targets)
        #: Chains by the allocation that is their latest link: all links so far, and whether
        #: the softmax has been passed.
        self._chains: dict[int, tuple[frozenset[int], bool]] = {}
        self._places: dict[str, None] = {}
        self._allocations: set[int] = set()

    def watch(self, scene: Scene) -> None:
        super().watch(scene)
        scene.operators.listen(self._look)

    def finding(self) -> Applicability:
        if not self._places:
            return self.no("no softmax(QKᵀ)V was seen among the operators")
        return Applicability(
            self.name,
            True,
            places=tuple(filter(None, self._places)),
            allocations=tuple(sorted(self._allocations)),
        )

    def apply(self, scene: Scene) -> None:
        """It cannot be tried from outside."""

    def _look(self, func: Any, args: tuple[Any, ...], result: Any) -> None:
        if graph_task_id() != -1:  # a backward pass
            return
        if func in self._PRODUCTS:
            self._product(args, result)
        elif func in self._SOFTMAX or func in self._BETWEEN:
            self._extend(args, result, passed=func in self._SOFTMAX)

    def _product(self, args: tuple[Any, ...], result: Any) -> None:
        links, passed = self._chains.get(tensors_in(args)[-2]._life.number, (frozenset(), False))
        if passed:
            self._places.setdefault(user_frame() or "")
            self._allocations |= links
        elif not self.scene.is_inside(torch.nn.MultiheadAttention):  # that is another remedy
            self._chains[result._life.number] = (frozenset({result._life.number}), False)

    def _extend(self, args: tuple[Any, ...], result: Any, *, passed: bool) -> None:
        numbers = [tensor._life.number for tensor in tensors_in(args)]
        chain = next((self._chains[each] for each in numbers if each in self._chains), None)
        if chain is None:
            return
        made = [tensor._life.number for tensor in tensors_in(result)]
        links = chain[0].union(made)
        for number in made:
            self._chains[number] = (links, chain[1] or passed)
