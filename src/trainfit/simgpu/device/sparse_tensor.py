"""A sparse tensor (COO) of the simulated device: two dense ones, of which it keeps hold.

C++ sees a sparse tensor on "meta", without content. What is done with one is in
:mod:`trainfit.simgpu.operators.sparse`.
"""

from __future__ import annotations

from typing import Any

import torch

from trainfit.simgpu import constructors
from trainfit.simgpu.device.tensor import CUDA, META, DeviceTensor, current_engine
from trainfit.torch_private.operators import disabled_torch_function, make_subclass, no_dispatch


class SparseTensor(DeviceTensor):
    """``parts`` are its indices (of shape (sparse dimensions, rows)) and its values (rows first);
    ``coalesced``: are the indices sorted, each there once?"""

    parts: tuple[Any, Any]
    coalesced: bool

    __torch_function__ = disabled_torch_function

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        return current_engine().run_sparse(func, args, kwargs or {})

    def new(self, *args: Any, **kwargs: Any) -> Any:
        # The legacy constructor of a sparse type takes indices, values and a size.
        return torch.sparse_coo_tensor(*args, dtype=self.dtype, check_invariants=False)

    def __repr__(  # type: ignore[override]
        self, *, tensor_contents: Any = None
    ) -> str:
        return (
            f"tensor(..., device='cuda:0', size={tuple(self.shape)}, dtype={self.dtype}, "
            f"nnz={self.parts[1].shape[0]}, layout=torch.sparse_coo, simulated)"
        )


def make_sparse(shape: tuple[int, ...], indices: Any, values: Any, coalesced: bool) -> SparseTensor:
    """A sparse tensor over these indices and values; nothing is copied."""
    with no_dispatch():
        meta = constructors.empty(shape, dtype=values.dtype, layout=torch.sparse_coo, device=META)
    made: SparseTensor = make_subclass(SparseTensor, meta, False, device_for_backend_keys=CUDA)
    made.parts, made.coalesced = (indices, values), coalesced
    return made
