"""Squared norms of gradients, summed by module and kept on the device.

Nothing here waits for a device: values stay there until :meth:`Records.read`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

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
        """On the device; made once, as a copy from pageable memory waits for the device."""
        if groups not in self._indices:
            self._indices[groups] = torch.tensor(groups, device=self._device)
        return self._indices[groups]

    def read(self) -> NDArray[np.float64]:
        """All records, shape (length, 2, groups). Waits for the device."""
        return np.asarray(self._ring.cpu().double().numpy())
