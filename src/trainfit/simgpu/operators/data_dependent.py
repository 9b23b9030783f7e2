"""Operators that schema and meta kernel do not describe, as where shapes depend on data."""

from __future__ import annotations

import math
import sys
from typing import Any

import torch
from torch.torch_version import TorchVersion

from trainfit.results.runs.operands import WRONG_INDEX
from trainfit.simgpu import constructors
from trainfit.simgpu.device.engine import Engine
from trainfit.simgpu.device.geometry import indexed_on_host
from trainfit.simgpu.device.registry import MIXED_DEVICE, handles
from trainfit.simgpu.device.tensor import CPU, SimulatedTensor, spec_of, wrap
from trainfit.simgpu.device.values import MASKS, worth_keeping
from trainfit.torch_private import modules
from trainfit.torch_private import operators as private
from trainfit.torch_private.operators import no_dispatch

aten = torch.ops.aten


def contents_of(engine: Engine, *tensors: Any) -> list[torch.Tensor] | None:
    """What all of them hold; ``None`` where that of one is not known."""
    found = [engine.values.read(tensor) for tensor in tensors]
    return None if any(each is None for each in found) else found  # type: ignore[return-value]


def new_result(engine: Engine, func: Any, shape: tuple[int, ...], dtype: torch.dtype) -> Any:
    """A new tensor of this shape, as the result of ``func``, which is recorded."""
    engine.record(engine.info(func))
    return engine.empty(shape, dtype)


def _known_result(engine: Engine, func: Any, content: torch.Tensor) -> Any:
    result = new_result(engine, func, tuple(content.shape), content.dtype)
    if worth_keeping(content):
        engine.values.write(result, content)
    return result


def _assumed_count(engine: Engine, operation: str, mask: SimulatedTensor) -> int:
    """How many elements an unknown mask is assumed to choose: as many as were written to it at
    places that are not known, else all."""
    count = engine.values.nonzeros(mask)
    if count is None:
        count = mask.numel()
        engine.assume(f"{operation} was assumed to select all {count} elements")
    else:
        engine.assume(f"{operation} was assumed to select the {count} elements that were set")
    return count


@handles(aten.nonzero.default)
def nonzero(engine: Engine, func: Any, args: Any, kwargs: Any) -> Any:
    """CUDA's nonzero."""
    engine.wait_for_device("size")
    contents = contents_of(engine, args[0])
    if contents is not None:
        with no_dispatch():
            return _known_result(engine, func, contents[0].nonzero())
    engine.assumed_size = True
    count = _assumed_count(engine, "nonzero() of unknown data", args[0])
    return new_result(engine, func, (count, args[0].dim()), torch.int64)


@handles(aten.masked_select.default)
def masked_select(engine: Engine, func: Any, args: Any, kwargs: Any) -> Any:
    tensor, mask = args
    engine.wait_for_device("size")
    shape = torch.broadcast_shapes(tensor.shape, mask.shape)
    contents = contents_of(engine, mask)
    if contents is not None:
        with no_dispatch():
            count = int(contents[0].expand(shape).sum())
    elif shape == mask.shape:
        count = _assumed_count(engine, "masked_select() by an unknown mask", mask)
    else:
        count = math.prod(shape)
        engine.assume(
            f"masked_select() by an unknown mask was assumed to select all {count} elements"
        )
    result = new_result(engine, func, (count,), tensor.dtype)
    engine.workspace(("index_tensors", (count * len(shape),)))
    return result


@handles(aten.index.Tensor)
def index(engine: Engine, func: Any, args: Any, kwargs: Any) -> Any:
    """Indexing; boolean masks become the index tensors that CUDA's kernel makes of them."""
    tensor, indices = args
    info = engine.info(func)
    if type(tensor) is not SimulatedTensor:
        raise indexed_on_host(indices)
    if not any(each is not None and each.dtype in MASKS for each in indices):
        _check_indices(engine, tensor, indices)
        return engine.generic(info, args, kwargs)
    expanded: list[Any] = []
    for each in indices:
        if each is None or each.dtype not in MASKS:
            expanded.append(each)
        else:
            expanded.extend(_mask_to_indices(engine, each))
    return engine.generic(info, (tensor, expanded), kwargs)


@handles(aten.index_put_.default, private.index_put_impl_.default)
def index_put(engine: Engine, func: Any, args: Any, kwargs: Any) -> Any:
    """Writing by index; what is known of the target outlives a mask that nothing is known of,
    as a condition on such data is taken as False."""
    target, indices = args[0], args[1]
    followed = type(target) is SimulatedTensor and worth_keeping(target._meta)
    known = target._life.value if followed else None  # many floats are data from then on
    if any(each is not None and each.dtype in MASKS for each in indices):
        _wait_for_mask(engine, args)
    else:
        _check_indices(engine, target, indices)
    result = engine.generic(engine.info(func), args, kwargs)
    if known is not None and any(_is_unknown_mask(engine, each) for each in indices):
        target._life.value = known
        engine.assume("writing by an unknown mask was assumed to change nothing")
    return result


def _wait_for_mask(engine: Engine, args: Any) -> None:
    """The host needs how many elements a mask selects, unless one number is written there: that is
    masked_fill (TensorAdvancedIndexing.cpp: canDispatchToMaskedFill, for a number of the host's,
    which is not told from one of the device here)."""
    indices, value = args[1:3]
    given = [each for each in indices if each is not None]
    accumulates = len(args) > 3 and args[3]
    if value.numel() != 1 or len(given) != 1 or accumulates:
        engine.wait_for_device("size")


def _is_unknown_mask(engine: Engine, index: Any) -> bool:
    return index is not None and index.dtype in MASKS and contents_of(engine, index) is None


def _mask_to_indices(engine: Engine, mask: Any) -> list[Any]:
    engine.wait_for_device("size")
    contents = contents_of(engine, mask)
    if contents is not None:
        with no_dispatch():
            found = contents[0].nonzero()
        columns = [_known_result(engine, aten.nonzero.default, c) for c in found.unbind(1)]
        return columns
    if modules.in_sync_batch_norm(sys._getframe()):
        # It leaves out ranks that had no sample: of equal ranks there are none, though their counts
        # come in one tensor with statistics that are not known.
        count = mask.numel()
    else:
        engine.assumed_size = True
        count = _assumed_count(engine, "indexing by an unknown mask", mask)
    return [
        new_result(engine, aten.nonzero.default, (count,), torch.int64) for _ in range(mask.dim())
    ]


@handles(private.unique2.default, aten.unique_dim.default, aten.unique_consecutive.default)
def unique(engine: Engine, func: Any, args: Any, kwargs: Any) -> Any:
    """Unique values; without content as many are assumed to differ as can: of places that argmax
    gave no more than there are classes."""
    engine.wait_for_device("size")
    contents = contents_of(engine, args[0])
    if contents is not None:
        with no_dispatch():
            real = func(contents[0], *args[1:], **kwargs)
        return tuple(_known_result(engine, func, each) for each in real)
    tensor = args[0]
    along = args[1] if func is aten.unique_dim.default else None
    count = engine.values.different(tensor) if along is None else tensor.shape[along]
    inverts = any(flag is True for flag in args[1:])
    engine.workspace(("unique", (tensor.numel(), tensor.dtype.itemsize, int(inverts))))
    all_of = "all " if count == tensor.numel() or along is not None else ""
    engine.assume(f"unique() of unknown data was assumed to keep {all_of}{count} values")
    shape = (count,) if along is None else tuple(tensor.shape)
    inverse = tuple(tensor.shape) if along is None else (count,)
    return (
        new_result(engine, func, shape, tensor.dtype),
        new_result(engine, func, inverse, torch.int64),
        new_result(engine, func, (count,), torch.int64),
    )


@handles(aten.repeat_interleave.Tensor)
def repeat_interleave(engine: Engine, func: Any, args: Any, kwargs: Any) -> Any:
    size = kwargs.get("output_size")
    if size is None:
        engine.wait_for_device("size")  # for the sum of the counts
    contents = contents_of(engine, args[0])
    if contents is not None:
        with no_dispatch():
            return _known_result(engine, func, func(contents[0], **kwargs))
    if size is None:
        size = args[0].numel()
        engine.assume("repeat_interleave() by unknown counts was assumed to repeat each once")
    return new_result(engine, func, (size,), torch.int64)


@handles(aten.bincount.default)
def bincount(engine: Engine, func: Any, args: Any, kwargs: Any) -> Any:
    """Counts; with weights their sums, which nobody knows."""
    engine.wait_for_device("size")  # for the largest value
    named = dict(zip(("self", "weights", "minlength"), args, strict=False)) | kwargs
    weights, least = named.get("weights"), named.get("minlength", 0)
    contents = contents_of(engine, args[0])
    if contents is not None and weights is None:
        with no_dispatch():
            real = torch.bincount(contents[0], minlength=least)
        return _known_result(engine, func, real)
    bins = max(least, 1)
    if contents is not None and contents[0].numel():
        bins = max(bins, int(contents[0].max()) + 1)
    if weights is not None:  # SummaryOps.cu: of float32 in float32, else in float64
        dtype = torch.float32 if weights.dtype == torch.float32 else torch.float64
        return new_result(engine, func, (bins,), dtype)
    result = new_result(engine, func, (bins,), torch.int64)
    if least:
        _count_evenly(engine, "bincount()", args[0], result)
    else:
        engine.assume("bincount() of unknown data was assumed to have 1 bin")
    return result


@handles(aten.histc.default)
def histc(engine: Engine, func: Any, args: Any, kwargs: Any) -> Any:
    """Counts as floats, one for each bin."""
    result = engine.generic(engine.info(func), args, kwargs)
    if contents_of(engine, args[0]) is None:
        _count_evenly(engine, "histc()", args[0], result)
    return result


def _count_evenly(engine: Engine, operation: str, counted: Any, result: Any) -> None:
    """Give each bin as many of what is counted as the others: of tokens that a router gives to
    experts, whose numbers say what ranks send each other, all are somewhere."""
    bins, number = result.numel(), counted.numel()
    engine.assume(f"{operation} of unknown data was assumed to find as many in each of {bins} bins")
    with no_dispatch():
        counts = constructors.full((bins,), number // bins, dtype=result.dtype, device=CPU)
        counts[: number % bins] += 1
    if worth_keeping(counts):
        engine.values.write(result, counts)


# ---
# Operators whose behavior on the device does not follow from schema and meta kernel.


MIXED_DEVICE |= {
    aten.index.Tensor,
    aten.index_put.default,
    aten.index_put_.default,
    private.index_put_impl_.default,
    private.pack_padded_sequence.default,
    private.foreach_copy_.default,
    private.fused_adam_.default,
    private.fused_adamw_.default,
}


@handles(private.pack_padded_sequence.default)
def pack_padded_sequence(engine: Engine, func: Any, args: Any, kwargs: Any) -> Any:
    """Lengths are on the host, and so are the batch sizes that result."""
    source, lengths, batch_first = args
    if type(lengths) is SimulatedTensor:
        raise RuntimeError(
            "'lengths' argument should be a 1D CPU int64 tensor, but got "
            f"{lengths.dim()}D cuda:0 {_long_name(lengths)} tensor"
        )
    with no_dispatch():
        like = constructors.zeros((*source.shape[:2], 1), device=CPU)
        packed, sizes = func(like, lengths, batch_first)
    shape = (packed.shape[0], *source.shape[2:])
    return new_result(engine, func, shape, source.dtype), sizes


def _long_name(tensor: torch.Tensor) -> str:
    return tensor.type().rpartition(".")[2].removesuffix("Tensor")


@handles(private.nested_tensor_from_mask_left_aligned.default)
def left_aligned(engine: Engine, func: Any, args: Any, kwargs: Any) -> bool:
    engine.assume("nested tensors of a padded batch in evaluation were skipped")
    return False


@handles(private.ctc_loss.default, private.ctc_loss.Tensor)
def ctc_loss(engine: Engine, func: Any, args: Any, kwargs: Any) -> Any:
    """PyTorch's own kernel; log_alpha has a row for each blank and label."""
    log_probs, targets, inputs, lengths = args[:4]
    longest = targets.shape[-1]
    if isinstance(lengths, torch.Tensor):
        contents = contents_of(engine, lengths)
        longest = int(contents[0].max()) if contents is not None else longest
    elif lengths:
        longest = max(lengths)
    steps = log_probs.shape[0]
    batch = log_probs.shape[1] if log_probs.dim() == 3 else 1
    for name, each in (("input", inputs), ("target", lengths)):  # as LossCTC.cpp does
        if log_probs.dim() == 3 and len(each) != batch:
            raise RuntimeError(f"{name}_lengths must be of size batch_size")
    if isinstance(inputs, list | tuple) and (maximum := max(inputs, default=0)) > steps:
        raise RuntimeError(
            f"Expected input_lengths to have value at most {steps}, but got value {maximum} (while "
            "checking arguments for ctc_loss_gpu)"
        )
    loss = new_result(engine, func, (batch,), log_probs.dtype)
    return loss, engine.empty((batch, steps, 2 * longest + 1), loss.dtype)


@handles(aten.geqrf.default)
def geqrf(engine: Engine, func: Any, args: Any, kwargs: Any) -> Any:
    *batch, rows, columns = args[0].shape
    factors = new_result(engine, func, (*batch, columns, rows), args[0].dtype).mT
    return factors, engine.empty((*batch, min(rows, columns)), factors.dtype)


@handles(private.sample_dirichlet.default)
def like_first(engine: Engine, func: Any, args: Any, kwargs: Any) -> Any:
    return new_result(engine, func, tuple(args[0].shape), args[0].dtype)


@handles(
    aten.multi_margin_loss_backward.default,
    aten.multilabel_margin_loss_backward.default,
    private.ctc_loss_backward.default,
    private.ctc_loss_backward.Tensor,
    private.dirichlet_grad.default,
)
def like_second(engine: Engine, func: Any, args: Any, kwargs: Any) -> Any:
    return new_result(engine, func, tuple(args[1].shape), args[1].dtype)


@handles(private.cudnn_rnn_flatten_weight.default)
def flatten_weights(engine: Engine, func: Any, args: Any, kwargs: Any) -> Any:
    """An RNN's weights move into one buffer, of which they become views."""
    weights = args[0]
    buffer = new_result(engine, func, (sum(w.numel() for w in weights),), weights[0].dtype)
    start = 0
    for weight in weights:
        part = buffer[start : start + weight.numel()].view(weight.shape)
        engine.set_data(weight, part)
        start += weight.numel()
    return buffer


# -- views that the schema does not call views ---------------------------------------------


@handles(private.unsafe_view.default)
def unsafe_view(engine: Engine, func: Any, args: Any, kwargs: Any) -> Any:
    source = args[0]
    engine.record(engine.info(func))
    with no_dispatch():
        meta = source._meta.view(args[1])
    return wrap(meta, spec_of(meta), source._life)


# -- fake kernels that older versions lack -----------------------------------------------


@handles(private.weight_norm_interface_backward.default)
def weight_norm_backward(engine: Engine, func: Any, args: Any, kwargs: Any) -> Any:
    """Gradients of direction and magnitude (2.8 has no meta kernel for it)."""
    engine.record(engine.info(func))
    with no_dispatch():
        gradients = [torch.empty_like(saved._meta) for saved in args[1:3]]
    return tuple(engine.adopt(gradient) for gradient in gradients)


def product(engine: Engine, func: Any, args: Any, kwargs: Any) -> Any:
    """A product that is told its result's dtype (2.8's meta kernel does not take it)."""
    info = engine.info(func)
    engine.record(info)
    left, right, dtype = args[-3:]
    out = engine.empty((left.shape[0], right.shape[1]), dtype)
    if info.kernel is not None:
        engine.accounting.attempt(func, info.kernel, engine, args, out)
    return out


if TorchVersion(torch.__version__) < "2.9":
    for _operator in (aten.mm.dtype, aten.addmm.dtype):
        handles(_operator)(product)


# ---
# Labels and indices that are out of range, where their values are known. On a GPU a kernel's
# assertion ends the process some time later, at another line; here the CPU's exception comes at
# once.


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
    size = args[0].shape[0]
    if indices is not None and (wrong := _outside(indices, size)) is not None:
        error = IndexError("index out of range in self")
        setattr(error, WRONG_INDEX, (wrong, size))
        raise error
    return engine.generic(engine.info(func), args, kwargs)


@handles(
    aten.gather.default,
    *(aten.scatter.value, aten.scatter.src, aten.scatter_.value, aten.scatter_.src),
    *(aten.scatter_add.default, aten.scatter_add_.default),
    *(aten.scatter_reduce.two, aten.scatter_reduce_.two),
    *(aten.index_add.default, aten.index_add_.default),
)
def along_a_dimension(engine: Engine, func: Any, args: Any, kwargs: Any) -> Any:
    """Reading or writing at places of one dimension, that of the second argument."""
    tensor, dimension, indices = args[:3]
    known = engine.values.read(indices)
    if known is not None and tensor.dim():
        _check(known, tensor, dimension % tensor.dim())
    return engine.generic(engine.info(func), args, kwargs)


@handles(aten.index_select.default)
def index_select(engine: Engine, func: Any, args: Any, kwargs: Any) -> Any:
    """Entries of one dimension."""
    tensor, dimension, indices = args
    known = engine.values.read(indices)
    size = tensor.shape[dimension] if tensor.dim() else 1
    if known is not None and _outside(known, size) is not None:
        raise IndexError("index out of range in self")
    return engine.generic(engine.info(func), args, kwargs)


@handles(aten.index_fill_.int_Scalar, aten.index_fill_.int_Tensor)
def index_fill(engine: Engine, func: Any, args: Any, kwargs: Any) -> Any:
    """One number at places of one dimension, which may count from the end."""
    tensor, dimension, indices = args[:3]
    if tensor.dim():
        dimension %= tensor.dim()
        _check_indices(engine, tensor, [*[None] * dimension, indices])
    return engine.generic(engine.info(func), args, kwargs)


def _check_indices(engine: Engine, tensor: Any, indices: Any) -> None:
    """Check the indices of ``tensor[indices]``, which may count from the end."""
    for dimension, each in enumerate(indices):
        known = None if each is None else engine.values.read(each)
        if known is not None:
            _check(known, tensor, dimension, least=-tensor.shape[dimension])


def _check(values: torch.Tensor, tensor: Any, dimension: int, least: int = 0) -> None:
    size = tensor.shape[dimension]
    wrong = _outside(values, size, least=least)
    if wrong is not None:
        raise IndexError(
            f"index {wrong} is out of bounds for dimension {dimension} with size {size}"
        )


def _outside(
    values: torch.Tensor, size: int, ignored: int | None = None, least: int = 0
) -> int | None:
    """One of ``values`` that is not in ``least`` … size - 1; ``None``: all are."""
    with no_dispatch():
        wrong = values[(values < least) | (values >= size)]
        if ignored is not None:
            wrong = wrong[wrong != ignored]
        return int(wrong[0]) if wrong.numel() else None
