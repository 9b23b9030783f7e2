"""Sparse tensors on the simulated device, as gradients of embeddings are: indices and values.

Of a sparse tensor the device holds two dense ones, and each operator does with them what PyTorch's
kernels for CUDA do: their memory is the dense operators'. That was read for additions and sums of
equal indices (ATen/native/sparse/cuda/SparseCUDATensor.cu, 2.13); the scratch of their sort, masks
and EmbeddingBag's backward pass are assumed.
How many rows are left when equal indices are summed up depends on the indices; where those are not
known, all are taken as different.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch.torch_version import TorchVersion

from trainfit.simgpu import constructors
from trainfit.simgpu.device.engine import Engine
from trainfit.simgpu.device.errors import UnsupportedOperatorError
from trainfit.simgpu.device.registry import handles
from trainfit.simgpu.device.sparse_tensor import SparseTensor, make_sparse
from trainfit.simgpu.device.tensor import CUDA, SimulatedTensor
from trainfit.simgpu.device.user_location import user_frame
from trainfit.simgpu.operators.data_dependent import contents_of
from trainfit.torch_private import operators as private
from trainfit.torch_private.autograd import current_node

aten = torch.ops.aten

_Kernel = Callable[[Engine, tuple[Any, ...], dict[str, Any]], Any]
_KERNELS: dict[Any, _Kernel] = {}


def _kernel(*overloads: Any) -> Callable[[_Kernel], _Kernel]:
    def register(function: _Kernel) -> _Kernel:
        _KERNELS.update(dict.fromkeys(overloads, function))
        return function

    return register


def run(engine: Engine, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Run an operator one of whose operands is sparse.

    Raises :class:`UnsupportedOperatorError` for one that nobody has described.
    """
    kernel = _KERNELS.get(func)
    if kernel is not None:
        with engine.mode(engine):
            return kernel(engine, args, kwargs)
    if engine.info(func).composite:
        with engine.mode(engine):
            return private.call_for(func)(private.COMPOSITE, *args, **kwargs)
    raise UnsupportedOperatorError(
        str(func), user_frame(), "sparse", "it is not simulated for sparse tensors"
    )


# -- made of indices and values -------------------------------------------------------------


@handles(private.sparse_coo_tensor_with_dims_and_tensors.default)
def with_dims_and_tensors(engine: Engine, func: Any, args: Any, kwargs: Any) -> SparseTensor:
    _, _, size, indices, values = args
    return make_sparse(tuple(size), indices, values, bool(kwargs.get("is_coalesced")))


@handles(private.sparse_coo_tensor_with_dims.default)
def with_dims(engine: Engine, func: Any, args: Any, kwargs: Any) -> SparseTensor:
    sparse, _, size = args
    dtype = kwargs.get("dtype") or torch.get_default_dtype()
    with engine.mode(engine):
        indices = constructors.empty((sparse, 0), dtype=torch.int64, device=CUDA)
        values = constructors.empty((0, *size[sparse:]), dtype=dtype, device=CUDA)
    return make_sparse(tuple(size), indices, values, True)


@handles(private.embedding_bag_backward.default)
def embedding_bag_backward(engine: Engine, func: Any, args: Any, kwargs: Any) -> Any:
    """_embedding_bag_sparse_backward: a row of the gradient for each index."""
    grad, indices, _, bag_of, bag_size, _, rows, by_frequency, mode, sparse, weights = args[:11]
    if not sparse:
        return engine.generic(engine.info(func), args, kwargs)
    padding = args[11] if len(args) > 11 else -1
    with engine.mode(engine):
        values = grad.index_select(0, bag_of)
        if mode == 1:  # the mean
            values *= (1 / bag_size.to(grad.dtype)).unsqueeze(1).index_select(0, bag_of)
        if weights is not None:
            values.mul_(weights.unsqueeze(1))
        return aten.embedding_sparse_backward.default(values, indices, rows, padding, by_frequency)


# -- what a sparse tensor consists of -------------------------------------------------------


@_kernel(private.indices.default, aten.indices.default)
def _indices(engine: Engine, args: Any, kwargs: Any) -> torch.Tensor:
    return args[0].parts[0].detach()  # type: ignore[no-any-return]


@_kernel(private.values.default, aten.values.default)
def _values(engine: Engine, args: Any, kwargs: Any) -> torch.Tensor:
    return args[0].parts[1].detach()  # type: ignore[no-any-return]


@_kernel(private.nnz.default)
def _nnz(engine: Engine, args: Any, kwargs: Any) -> int:
    return int(args[0].parts[1].shape[0])


@_kernel(aten.sparse_dim.default, private.sparse_dim.default)
def _sparse_dim(engine: Engine, args: Any, kwargs: Any) -> int:
    return int(args[0].parts[0].shape[0])


@_kernel(aten.dense_dim.default, private.dense_dim.default)
def _dense_dim(engine: Engine, args: Any, kwargs: Any) -> int:
    return int(args[0].dim() - args[0].parts[0].shape[0])


@_kernel(aten.is_coalesced.default)
def _is_coalesced(engine: Engine, args: Any, kwargs: Any) -> bool:
    return bool(args[0].coalesced)


@_kernel(private.coalesced_.default)
def _set_coalesced(engine: Engine, args: Any, kwargs: Any) -> SparseTensor:
    args[0].coalesced = args[1]
    return args[0]  # type: ignore[no-any-return]


@_kernel(aten.detach.default, aten.alias.default)
def _alias(engine: Engine, args: Any, kwargs: Any) -> SparseTensor:
    sparse = args[0]
    indices, values = sparse.parts
    return make_sparse(tuple(sparse.shape), indices, values, sparse.coalesced)


def _changed(sparse: SparseTensor, indices: Any, values: Any, coalesced: bool) -> SparseTensor:
    sparse.parts, sparse.coalesced = (indices, values), coalesced
    return sparse


# -- operators ------------------------------------------------------------------------------


@_kernel(aten.clone.default)
def _clone(engine: Engine, args: Any, kwargs: Any) -> SparseTensor:
    sparse: SparseTensor = args[0]
    if engine.in_backward() and "AccumulateGrad" in type(current_node()).__name__:
        # It takes the parts over where nobody else holds them; here Python objects do.
        return make_sparse(tuple(sparse.shape), *sparse.parts, coalesced=sparse.coalesced)
    indices, values = (part.clone() for part in sparse.parts)
    return make_sparse(tuple(sparse.shape), indices, values, sparse.coalesced)


@_kernel(private.coalesce.default)
def _coalesce(engine: Engine, args: Any, kwargs: Any) -> SparseTensor:
    """_coalesce_sparse_cuda: sorted, and rows with the same index summed up."""
    sparse = args[0]
    indices, values = sparse.parts
    shape, count = tuple(sparse.shape), values.shape[0]
    if count < 2:
        cloned: SparseTensor = _clone(engine, args, kwargs)
        cloned.coalesced = True
        return cloned
    flat = _flat(sparse, copied=True)
    _places = [torch.empty_like(flat) for _ in range(2)]
    contents = contents_of(engine, flat)
    engine.workspace(("sort_pairs", (count,)))
    engine.wait_for_device("size")
    if contents is None:
        left = min(count, math.prod(shape[: indices.shape[0]]))
        engine.assume(f"coalesce() of unknown indices was assumed to keep {left} of {count} rows")
    else:
        with private.no_dispatch():
            found = contents[0].unique()
        left = found.numel()
    kept = flat[:left]  # resized within its storage
    if contents is not None:
        with private.no_dispatch():
            flat._life.value[:left] = found
    summed = constructors.empty((left, *values.shape[1:]), dtype=values.dtype, device=CUDA)
    values.contiguous()
    if indices.shape[0] == 1:
        return make_sparse(shape, kept.unsqueeze(0), summed, True)
    unflattened = constructors.empty((indices.shape[0], left), dtype=torch.int64, device=CUDA)
    for dim in reversed(range(indices.shape[0])):
        row = unflattened.narrow(0, dim, 1)
        row.copy_(kept)
        kept.div_(shape[dim], rounding_mode="trunc")
        row.add_(kept, alpha=-shape[dim])
    if contents is not None:
        with private.no_dispatch():
            on_host = torch.stack(torch.unravel_index(found, shape[: len(indices)]))
        engine.values.write(unflattened, on_host)  # type: ignore[arg-type]
    return make_sparse(shape, unflattened, summed, True)


def _flat(sparse: SparseTensor, copied: bool = False) -> Any:
    """flatten_indices: one number for each row."""
    indices = sparse.parts[0]
    if indices.shape[0] == 1:
        flat = indices.squeeze(0)
        return flat.clone() if copied else flat
    if not indices.shape[1]:
        return indices.new_zeros(0)
    steps = [math.prod(sparse.shape[dim + 1 : indices.shape[0]]) for dim in range(len(indices))]
    with private.no_dispatch():
        on_host = constructors.tensor(steps, device="cpu").view(-1, 1)
    return indices.mul(on_host.to(CUDA)).sum(0)


@_kernel(aten.add_.Tensor)
def _add_(engine: Engine, args: Any, kwargs: Any) -> Any:
    target, other = args
    alpha = kwargs.get("alpha", 1)
    if not isinstance(target, SparseTensor):
        indices, values = other.parts
        if values.numel():
            rows = math.prod(other.shape[: indices.shape[0]])
            shape = (rows, values[0].numel())
            values = values.to(target.dtype).reshape(len(values), shape[1])
            target.view(shape).index_add_(0, _flat(other), values, alpha=alpha)
        return target
    return _changed(target, *_joined(target, other, alpha), False)


@_kernel(aten.add.Tensor)
def _add(engine: Engine, args: Any, kwargs: Any) -> Any:
    one, other = args
    alpha = kwargs.get("alpha", 1)
    if isinstance(one, SparseTensor) and isinstance(other, SparseTensor):
        return make_sparse(tuple(one.shape), *_joined(one, other, alpha), False)
    if isinstance(one, SparseTensor):
        one, other = other, one
    return _add_(engine, (one.clone(), other), kwargs)


def _joined(one: SparseTensor, other: Any, alpha: Any) -> tuple[Any, Any]:
    """add_out_sparse_cuda: the rows of both, one after the other."""
    if not isinstance(other, SparseTensor):
        raise RuntimeError("add(sparse, dense) is not supported. Use add(dense, sparse) instead.")
    values = other.parts[1].to(one.dtype)
    if alpha != 1:
        values = values.mul(alpha)
    return torch.cat([one.parts[0], other.parts[0]], 1), torch.cat([one.parts[1], values], 0)


def _vector_norm(engine: Engine, args: Any, kwargs: Any) -> Any:
    """The norm of the values, once equal indices are summed up."""
    sparse, *rest = args
    coalesced = sparse if sparse.coalesced else _coalesce(engine, (sparse,), {})
    return aten.linalg_vector_norm.default(coalesced.parts[1], *rest, **kwargs)


# PyTorch before refuses it, and so to clip such gradients.
if TorchVersion(torch.__version__) >= "2.15":
    _kernel(aten.linalg_vector_norm.default)(_vector_norm)


# -- products with a dense matrix -------------------------------------------------------------


@_kernel(aten.mm.default, private.sparse_mm.default)
def _mm(engine: Engine, args: Any, kwargs: Any) -> torch.Tensor:
    """_sparse_mm: of zeros and the product."""
    one, other = args
    zeros = constructors.zeros((one.shape[0], other.shape[1]), dtype=other.dtype, device=CUDA)
    return _addmm(engine, (zeros, one, other), {})  # type: ignore[no-any-return]


@_kernel(aten.addmm.default, private.sparse_addmm.default)
def _addmm(engine: Engine, args: Any, kwargs: Any) -> torch.Tensor:
    """s_addmm_out_sparse_dense_cuda: cuSPARSE reads rows by 32-bit offsets, of sorted indices, and
    writes column after column. What it launches is taken for a kernel that reads a row of the dense
    matrix for each value; how large its own workspace is, is not known."""
    bias, sparse, dense = args[:3]
    if not isinstance(sparse, SparseTensor) or isinstance(dense, SparseTensor):
        raise UnsupportedOperatorError(
            "aten.mm", user_frame(), "sparse", "only a sparse matrix times a dense one is"
        )
    if not sparse.coalesced:
        sparse = private.coalesce.default(sparse)
    indices, _ = sparse.parts
    made = constructors.empty((sparse.shape[0], dense.shape[1]), dtype=dense.dtype, device=CUDA)
    _offsets = constructors.empty(sparse.shape[0] + 1, dtype=torch.int32, device=CUDA)
    indices[0].to(torch.int32)  # of which the offsets are made
    columns = indices[1].to(torch.int32)
    made.copy_(bias)
    written = made.t().clone(memory_format=torch.contiguous_format)
    if dense.stride() not in ((1, dense.shape[0]), (dense.shape[1], 1)):
        dense = dense.contiguous()
    info = engine.info(aten.index_select.default)
    operands = (dense, 0, columns)
    engine.accounting.attempt(info.func, engine.on_launch, info, None, operands, {}, written)
    return made.copy_(written.t())


@_kernel(aten.t.default, aten.transpose.int)
def _transpose(engine: Engine, args: Any, kwargs: Any) -> SparseTensor:
    """sparse_transpose_: of a copy, whose rows of indices change places."""
    sparse = args[0]
    one, other = (argument % sparse.dim() for argument in (args[1:] or (0, 1)))
    if max(one, other) >= sparse.parts[0].shape[0]:
        raise UnsupportedOperatorError(
            "aten.transpose", user_frame(), "sparse", "only that of its sparse dimensions is"
        )
    indices, values = (part.clone() for part in sparse.parts)
    if one != other and indices.shape[1]:
        row = indices[one].clone()
        indices[one].copy_(indices[other])
        indices[other].copy_(row)
    shape = list(sparse.shape)
    shape[one], shape[other] = shape[other], shape[one]
    return make_sparse(tuple(shape), indices, values, sparse.coalesced and one == other)


@handles(private.to_sparse.default)
def _to_sparse(engine: Engine, func: Any, args: Any, kwargs: Any) -> SparseTensor:
    """dense_to_sparse: what is not zero; all of it where that is not known."""
    dense = args[0]
    with engine.mode(engine):
        indices = dense.nonzero().t().clone(memory_format=torch.contiguous_format)
        values = dense[tuple(indices.unbind(0))]
    return make_sparse(tuple(dense.shape), indices, values, True)


# -- element by element ------------------------------------------------------------------------


def _by_values(func: Any) -> _Kernel:
    """An operator on each value, with the same indices."""

    def kernel(engine: Engine, args: Any, kwargs: Any) -> SparseTensor:
        sparse, *rest = args
        if not isinstance(sparse, SparseTensor) or any(
            isinstance(tensor, torch.Tensor) and tensor.dim() for tensor in rest
        ):
            raise UnsupportedOperatorError(
                str(func), user_frame(), "sparse", "it is not simulated for a sparse operand"
            )
        indices, values = sparse.parts
        made = func(values, *rest, **kwargs)
        if made is values:
            return sparse
        return make_sparse(tuple(sparse.shape), indices.clone(), made, sparse.coalesced)

    return kernel


for _func in (
    aten.mul.Tensor, aten.mul.Scalar, aten.div.Tensor, aten.div.Scalar, aten.neg.default,
    aten.mul_.Tensor, aten.mul_.Scalar, aten.div_.Tensor, aten.div_.Scalar, aten.neg_.default,
    aten.pow.Tensor_Scalar, aten.sqrt.default, aten.abs.default,
):  # fmt: skip
    _KERNELS[_func] = _by_values(_func)


@_kernel(aten.zero_.default)
def _zero_(engine: Engine, args: Any, kwargs: Any) -> SparseTensor:
    indices, values = args[0].parts
    empty = indices.new_empty((indices.shape[0], 0)), values.new_empty((0, *values.shape[1:]))
    return _changed(args[0], *empty, True)


@_kernel(aten.sparse_mask.default)
def _sparse_mask(engine: Engine, args: Any, kwargs: Any) -> SparseTensor:
    """The rows of a dense tensor where another has some (sparse_mask, _mul_dense_sparse_out)."""
    dense, mask = args
    indices, values = mask.parts
    ones = constructors.ones(1, dtype=values.dtype, device=CUDA)
    rows = dense[tuple(indices.unbind(0))]
    return make_sparse(tuple(mask.shape), indices.clone(), rows.mul(ones), mask.coalesced)


@_kernel(private.to_dense.default)
def _to_dense(engine: Engine, args: Any, kwargs: Any) -> Any:
    sparse = args[0]
    dtype = (args[1] if len(args) > 1 else kwargs.get("dtype")) or sparse.dtype
    zeros = constructors.zeros(tuple(sparse.shape), dtype=dtype, device=CUDA)
    return _add_(engine, (zeros, sparse), {})


@_kernel(private.to_copy.default)
def _to_copy(engine: Engine, args: Any, kwargs: Any) -> Any:
    sparse, keywords = args[0], {n: v for n, v in kwargs.items() if n != "layout"}
    indices = sparse.parts[0].to(device=keywords.get("device") or CUDA, copy=True)
    values = private.to_copy.default(sparse.parts[1], **keywords)
    if isinstance(values, SimulatedTensor):
        return make_sparse(tuple(sparse.shape), indices, values, sparse.coalesced)
    with private.no_dispatch():
        return torch.sparse_coo_tensor(
            indices, values, sparse.shape, is_coalesced=sparse.coalesced, check_invariants=False
        )
