"""Labels and indices that are out of range, where their values are known.

On a GPU a kernel's assertion ends the process some time later, at another line; here the CPU's
exception comes at once.
"""

from __future__ import annotations

from typing import Any

import torch

from trainfit.simgpu.device.engine import Engine
from trainfit.simgpu.device.registry import handles
from trainfit.torch_private.operators import no_dispatch

aten = torch.ops.aten


@handles(aten.nll_loss_forward.default, aten.nll_loss2d_forward.default)
def nll_loss(engine: Engine, func: Any, args: Any, kwargs: Any) -> Any:
    """A loss over classes: ``self`` has them in its second dimension (without a batch, its
    first)."""
    scores, ignored = args[0], args[4]
    labels = engine.values.read(args[1])
    if labels is not None:
        classes = scores.shape[1 if scores.dim() > 1 else 0]
        wrong = _outside(labels, classes, ignored)
        if wrong is not None:
            raise IndexError(f"Target {wrong} is out of bounds.")
    return engine.generic(engine.info(func), args, kwargs)


@handles(aten.embedding.default)
def embedding(engine: Engine, func: Any, args: Any, kwargs: Any) -> Any:
    """Rows of a table."""
    indices = engine.values.read(args[1])
    if indices is not None and _outside(indices, args[0].shape[0]) is not None:
        raise IndexError("index out of range in self")
    return engine.generic(engine.info(func), args, kwargs)


def _outside(values: torch.Tensor, size: int, ignored: int | None = None) -> int | None:
    """One of ``values`` that is not in 0 … size - 1; ``None``: all are."""
    with no_dispatch():
        wrong = values[(values < 0) | (values >= size)]
        if ignored is not None:
            wrong = wrong[wrong != ignored]
        return int(wrong[0]) if wrong.numel() else None
