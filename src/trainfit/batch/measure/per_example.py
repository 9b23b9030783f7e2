"""Squared norms of single samples' gradients, of modules where they are exact and cheap.

A Linear on a matrix: the gradient of a sample is an outer product, whose norm is that of its
factors (Goodfellow 2015, arXiv:1510.01799). The scale and shift of LayerNorm and GroupNorm: a sum
over what is not a sample or a channel. The noise scale of normalization layers alone predicts the
whole model's (Gray et al. 2024, arXiv:2411.00999); it is reported as that of these modules.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Final

import torch
from torch import Tensor, nn

from trainfit.batch.measure.cost import Cost
from trainfit.batch.measure.estimate import Loss, Weights
from trainfit.batch.measure.norms import Records
from trainfit.simgpu.patching import LocalHook
from trainfit.torch_private.modules import BatchNorm

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
        used = {module: each for module, each in squares.items() if module not in self._repeated}
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
    found = []
    for module in model.modules():
        own = [id(parameter) for parameter in module.parameters(recurse=False)]
        if type(module) in _KINDS and own and all(owners[p] == 1 and p in groups for p in own):
            found.append(module)
    return found


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
