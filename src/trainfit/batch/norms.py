"""Squared norms of gradients: by module, and of single samples; kept on the device.

Nothing here waits for a device: values stay there until :meth:`Records.read`.
"""

from __future__ import annotations

import contextlib
import math
import statistics
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Final

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from trainfit.batch.estimate import Loss, Weights
from trainfit.simgpu.patching import LocalHook
from trainfit.torch_private.modules import BatchNorm
from trainfit.torch_private.operators import foreach_norms

#: Groups of parameters that are reported apart, at most.
_MOST_GROUPS: Final = 24
#: Of these the squares of half-precision gradients would overflow or lose digits.
_HALF: Final = (torch.float16, torch.bfloat16)


def grouped(names: Sequence[str]) -> tuple[tuple[str, ...], list[int]]:
    """Parameters by module, as deep as few groups allow: the names, and each parameter's group."""
    modules = [name.split(".")[:-1] for name in names]
    deepest = max((len(path) for path in modules), default=0)
    found = [""] * len(modules)
    for depth in range(1, deepest + 1):
        deeper = [".".join(path[:depth]) for path in modules]
        if len(set(deeper)) > _MOST_GROUPS:
            break
        found = deeper
    order = list(dict.fromkeys(found))
    return tuple(order), [order.index(name) for name in found]


class Records:
    """A ring of ``length`` records on one device, each two squared norms of every group.

    The first is that of the small batch, the second that of the big one.
    """

    def __init__(self, groups: int, length: int, device: torch.device) -> None:
        # MPS has no float64; float32 holds the squares of scaled gradients, too.
        self._dtype = torch.float32 if device.type == "mps" else torch.float64
        self._device = device
        self._groups = groups
        with torch.no_grad():
            self._ring = torch.zeros((length, 2, groups), dtype=self._dtype, device=device)
        self._indices: dict[tuple[int, ...], Tensor] = {}

    @property
    def length(self) -> int:
        """How many records it holds."""
        return int(self._ring.shape[0])

    def add(self, slot: int, which: int, grads: Sequence[Tensor], groups: Sequence[int]) -> None:
        """Put the squared norms of ``grads``, each of the group at its place, into a record."""
        self._ring[slot, which].copy_(self.squares(grads, groups))

    def put(self, slot: int, which: int, squares: Tensor) -> None:
        """Put squared norms by group, of :meth:`squares`, into a record."""
        self._ring[slot, which].copy_(squares)

    def divide(self, slot: int, scale: Tensor) -> None:
        """Divide a record by the square of a loss scale that lies on a device."""
        scale = scale.to(self._device, self._dtype, non_blocking=True)
        self._ring[slot].div_(scale * scale)

    def squares(self, grads: Sequence[Tensor], groups: Sequence[int]) -> Tensor:
        """Squared norms by group, shape (groups,): a few kernels for all parameters."""
        total = torch.zeros(self._groups, dtype=self._dtype, device=self._device)
        kinds: dict[tuple[torch.device, torch.dtype], list[int]] = {}
        for place, grad in enumerate(grads):
            kinds.setdefault((grad.device, grad.dtype), []).append(place)
        for (_, dtype), places in kinds.items():
            wide = torch.float32 if dtype in _HALF else None
            norms = foreach_norms([grads[place] for place in places], 2, dtype=wide)
            norm = torch.stack(norms).to(self._device, self._dtype, non_blocking=True)
            total.index_add_(0, self._index(tuple(groups[place] for place in places)), norm * norm)
        return total

    def _index(self, groups: tuple[int, ...]) -> Tensor:
        """The groups as indices on the device; made once, as a copy from pageable memory waits for
        the device."""
        if groups not in self._indices:
            self._indices[groups] = torch.tensor(groups, device=self._device)
        return self._indices[groups]

    def read(self) -> NDArray[np.float64]:
        """All records, shape (length, 2, groups). Waits for the device."""
        return np.asarray(self._ring.cpu().double().numpy())


# ---
# Squared norms of single samples' gradients, of modules where they are exact and cheap.
#
# A Linear on a matrix: the gradient of a sample is an outer product, whose norm is that of its
# factors (Goodfellow 2015, arXiv:1510.01799). The scale and shift of LayerNorm and GroupNorm: a sum
# over what is not a sample or a channel. The noise scale of normalization layers alone predicts the
# whole model's (Gray et al. 2024, arXiv:2411.00999); it is reported as that of these modules.


_MIXING: Final = (BatchNorm,)


class Examples:
    """Hooks on the outputs of the modules, while ``is_on``; in-place changes of outputs after a
    module do not matter, as a hook belongs to the value that it was registered on."""

    def __init__(
        self, model: nn.Module, parameters: Sequence[Tensor], groups: Sequence[int], cost: Cost
    ) -> None:
        self.is_on = False
        self._cost = cost
        self.fault = ""
        self._groups = {id(p): group for p, group in zip(parameters, groups, strict=True)}
        self._squares: dict[nn.Module, Tensor] = {}
        self._repeated: set[nn.Module] = set()
        self._modules = [] if _mixes(model) else _eligible(model, self._groups)
        if not self._modules:
            self.fault = (
                "BatchNorm mixes the samples of a batch: a single sample has no gradient of its own"
                if _mixes(model)
                else "the model has no Linear, LayerNorm or GroupNorm module whose single samples "
                "could be measured"
            )
        self._handles = [
            module.register_forward_hook(LocalHook(self._forward)) for module in self._modules
        ]

    def close(self) -> None:
        """Remove the hooks."""
        for handle in self._handles:
            handle.remove()
        self._handles.clear()

    def _forward(self, module: nn.Module, inputs: tuple[Any, ...], output: Any) -> None:
        if not (self.is_on and module.training and torch.is_grad_enabled() and inputs):
            return
        found = inputs[0]
        if not (isinstance(output, Tensor) and output.requires_grad and isinstance(found, Tensor)):
            return
        if isinstance(module, nn.Linear) and found.dim() != 2:
            return
        given = found.detach()
        output.register_hook(lambda grad: self._backward(module, given, grad))

    def _backward(self, module: nn.Module, given: Tensor, grad: Tensor) -> None:
        try:
            with torch.no_grad(), self._cost.measured():
                squares = _KINDS[type(module)](module, given, grad.detach())
        except Exception as error:
            self.fault = f"single samples of {type(module).__name__}: {error}"
            return
        if module in self._squares:
            self._repeated.add(module)  # used twice: the parts of a sample's gradient add up first
        self._squares[module] = squares

    def squares(self, records: Records, loss: Loss) -> tuple[Tensor, Tensor, Weights] | None:
        """The mean of single samples' squares and that of the batch's gradient, by group."""
        squares, self._squares = self._squares, {}
        used = {
            module: square for module, square in squares.items() if module not in self._repeated
        }
        if not used:
            self.fault = self.fault or "no Linear on a matrix, LayerNorm or GroupNorm ran"
            return None
        count = next(iter(used.values())).shape[0]
        if any(each.shape[0] != count for each in used.values()):
            self.fault = "modules saw batches of several sizes: single samples cannot be told apart"
            return None
        grads: list[Tensor] = []
        groups: list[int] = []
        norms: list[Tensor] = []
        norm_groups: list[int] = []
        # The gradient of a mean loss has 1 ÷ count of each sample's.
        factor = float(count) if loss == "mean" else 1.0 / count
        for module, each in used.items():
            own = [p for p in module.parameters(recurse=False) if id(p) in self._groups]
            norms.append((factor * each.sum()).sqrt())
            norm_groups.append(self._groups[id(own[0])])
            for parameter in own:
                if parameter.grad is not None:
                    grads.append(parameter.grad)
                    groups.append(self._groups[id(parameter)])
        weights = (
            Weights(1.0, 1.0, 1.0, 1.0 / count)
            if loss == "mean"
            else Weights(1.0, 1.0, float(count) ** 2, float(count))
        )
        return records.squares(norms, norm_groups), records.squares(grads, groups), weights


def _mixes(model: nn.Module) -> bool:
    return any(isinstance(module, _MIXING) and module.training for module in model.modules())


def _eligible(model: nn.Module, groups: dict[int, int]) -> list[nn.Module]:
    """All of their parameters are trained, and none is another module's, too."""
    owners: dict[int, int] = {}
    for module in model.modules():
        for parameter in module.parameters(recurse=False):
            owners[id(parameter)] = owners.get(id(parameter), 0) + 1
    modules = []
    for module in model.modules():
        own = [id(parameter) for parameter in module.parameters(recurse=False)]
        if type(module) in _KINDS and own and all(owners[p] == 1 and p in groups for p in own):
            modules.append(module)
    return modules


def _linear(module: nn.Module, given: Tensor, grad: Tensor) -> Tensor:
    squares = grad.float().square().sum(1)
    of_weight = given.float().square().sum(1) * squares
    return of_weight + squares if module.bias is not None else of_weight


def _layer_norm(module: nn.Module, given: Tensor, grad: Tensor) -> Tensor:
    assert isinstance(module, nn.LayerNorm)
    normal = nn.functional.layer_norm(given.float(), module.normalized_shape, eps=module.eps)
    shape = (given.shape[0], -1, module.weight.numel())
    return _affine(module, normal.reshape(shape), grad.float().reshape(shape), 1)


def _group_norm(module: nn.Module, given: Tensor, grad: Tensor) -> Tensor:
    assert isinstance(module, nn.GroupNorm)
    normal = nn.functional.group_norm(given.float(), module.num_groups, eps=module.eps)
    shape = (given.shape[0], module.num_channels, -1)
    return _affine(module, normal.reshape(shape), grad.float().reshape(shape), 2)


def _affine(module: nn.Module, normal: Tensor, grad: Tensor, summed: int) -> Tensor:
    squares = (grad * normal).sum(summed).square().sum(1)
    if module.bias is not None:
        squares = squares + grad.sum(summed).square().sum(1)
    return squares


_KINDS: Final[dict[type[nn.Module], Callable[[nn.Module, Tensor, Tensor], Tensor]]] = {
    nn.Linear: _linear,
    nn.LayerNorm: _layer_norm,
    nn.GroupNorm: _group_norm,
}


# ---
# What a measurement costs of a training's time, and how often it may run for that.


#: Share of the run's time that measuring may cost; the goal of the whole estimator is 2%, of which
#: the hooks that count backward passes need a part.
_ALLOWED: Final = 0.01
#: Measured steps before the rate is set, and between two changes of it.
_FIRST, _AGAIN = 4, 32
_MOST_EVERY: Final = 200
_KEPT: Final = 33


class Cost:
    """Seconds of measurements and of steps, on the host and, with CUDA events, on the device."""

    def __init__(self) -> None:
        self.every = 1
        self.uses_events = False
        self._events: deque[list[tuple[Any, Any]]] = deque(maxlen=_KEPT)
        self._open_events: list[tuple[Any, Any]] = []
        self._open_s = 0.0
        self._measured_s: deque[float] = deque(maxlen=_KEPT)
        self._device_s: deque[float] = deque(maxlen=_KEPT)
        self._step_s: deque[float] = deque(maxlen=_KEPT)
        self._last_step: float | None = None
        self._until_change = _FIRST
        self._total_s = self._elapsed_s = 0.0

    @contextlib.contextmanager
    def measured(self) -> Iterator[None]:
        """Around a part of a measurement."""
        first = self._event()
        began = time.perf_counter()
        try:
            yield
        finally:
            self._open_s += time.perf_counter() - began
            if first is not None:
                self._open_events.append((first, self._event()))

    def _event(self) -> Any:
        if not self.uses_events:
            return None
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def step(self) -> None:
        """Note the end of an optimizer step."""
        now = time.perf_counter()
        was_measured, measured_s = self._open_s > 0, self._open_s
        self._open_s = 0.0
        if self._last_step is not None:
            self._elapsed_s += now - self._last_step
            self._total_s += measured_s
            self._step_s.append(now - self._last_step - measured_s)
        self._last_step = now
        if was_measured:
            self._measured_s.append(measured_s)
            if self._open_events:
                self._events.append(self._open_events)
                self._open_events = []
            self._until_change -= 1
            if self._until_change <= 0:
                self._until_change = _AGAIN
                self._change()

    def _change(self) -> None:
        self._read_events()
        step = statistics.median(self._step_s) if self._step_s else 0.0
        if step > 0:
            cost = statistics.median(self._measured_s)
            if self._device_s:
                cost = max(cost, statistics.median(self._device_s))
            self.every = min(_MOST_EVERY, max(1, math.ceil(cost / (_ALLOWED * step))))

    def _read_events(self) -> None:
        """Read the events of steps that are done on the device; nothing waits."""
        while self._events and self._events[0][-1][1].query():
            parts = self._events.popleft()
            self._device_s.append(sum(first.elapsed_time(last) for first, last in parts) / 1e3)

    @property
    def share(self) -> float | None:
        """Measurements' share of the time so far, on the host; ``None`` before the second step."""
        return self._total_s / self._elapsed_s if self._elapsed_s > 0 else None
