"""Geometry of operators' results: arguments on "meta", memory formats, errors of invalid calls."""

from __future__ import annotations

from collections.abc import Callable, Container
from typing import Any, Final

import torch

from trainfit.simgpu import constructors
from trainfit.simgpu.device.errors import DeviceMismatch, UnsupportedOperatorError
from trainfit.simgpu.device.registry import MIXED_DEVICE, OperatorInfo
from trainfit.simgpu.device.tensor import META, DeviceTensor, SimulatedTensor, Spec, plain, spec_of
from trainfit.simgpu.device.user_location import user_frame
from trainfit.torch_private.decompositions import decompositions
from trainfit.torch_private.operators import (
    Generator,
    no_dispatch,
    storage_key,
    suggest_memory_format,
)

# ---
# Arguments of operators: as a key, on "meta", and without the classes of the user.


_empty_strided = torch.empty_strided
#: The class in C++; ``torch.Generator`` is another while a simulation runs.


def geometry_key(info: OperatorInfo, args: Any, kwargs: Any) -> tuple[Any, ...]:
    """What the geometry of an operator's results follows from, as a key of a dictionary."""
    key: list[Any] = [info.func]
    for value in args:
        if type(value) is SimulatedTensor:
            key.append(value._spec)
        else:
            _extend_key(key, value, info)
    for name, value in kwargs.items():
        key.append(name)
        _extend_key(key, value, info)
    return tuple(key)


def _extend_key(key: list[Any], value: Any, info: OperatorInfo) -> None:
    kind = type(value)
    if kind is SimulatedTensor:
        key.append(value._spec)
    elif kind is int or kind is float or kind is bool:
        key.append((kind, value))
    elif kind is list or kind is tuple:
        key.append(len(value))
        for each in value:
            _extend_key(key, each, info)
    elif isinstance(value, torch.Tensor):
        _check_device(value, info)
        key.append(("host", value.shape, value.stride(), value.dtype))
    elif not isinstance(value, Generator):
        key.append(value)


def _check_device(tensor: torch.Tensor, info: OperatorInfo) -> None:
    device = tensor.device
    if device.type == "meta" or tensor.dim() == 0 or info.func in MIXED_DEVICE:
        return
    if getattr(tensor, "is_paged", False):  # managed memory, which both sides address
        return
    raise DeviceMismatch(device, info.func)


def meta_arguments(value: Any) -> Any:
    """Arguments with meta tensors in place of simulated and host ones."""
    kind = type(value)
    if kind is SimulatedTensor:
        return value._meta
    if isinstance(value, Generator):
        return None
    if kind is tuple or kind is list:
        return kind([meta_arguments(each) for each in value])
    if isinstance(value, torch.Tensor) and value.device.type != "meta":
        return _empty_strided(value.shape, value.stride(), dtype=value.dtype, device=META)
    return value


def meta_keywords(kwargs: dict[str, Any]) -> dict[str, Any]:
    """Keywords likewise; whatever has a device is on "meta"."""
    keywords = {}
    for name, value in kwargs.items():
        if name == "device" and value is not None:
            value = META
        elif name == "pin_memory" or isinstance(value, Generator):
            value = None
        keywords[name] = meta_arguments(value)
    return keywords


def without_subclasses(value: Any, given: dict[int, Any]) -> Any:
    """Arguments as the engine knows them; notes in ``given`` whose stand-in is which."""
    kind = type(value)
    if kind is list or kind is tuple:
        return kind([without_subclasses(each, given) for each in value])
    if kind is SimulatedTensor or not isinstance(value, DeviceTensor):
        return value
    stand_in = plain(value)
    given[id(stand_in)] = value
    return stand_in


def with_subclasses(value: Any, given: dict[int, Any]) -> Any:
    """Results; an argument that an operator wrote to and returns is the user's object."""
    if type(value) is list or type(value) is tuple:
        return type(value)([with_subclasses(each, given) for each in value])
    return given.get(id(value), value)


# ---
# Error messages of invalid calls: those of PyTorch's kernels, not of its fake kernels.
#
# Shape functions in Python check the same things in other words, and a few things (operands of
# two dtypes) not at all. People search for the words they know.


aten = torch.ops.aten

#: Elements of all operands together up to which a failed call is repeated on the CPU.
_MAX_ELEMENTS = 1 << 26
_CPP_NAMES = {
    torch.float32: "float",
    torch.float64: "double",
    torch.float16: "c10::Half",
    torch.bfloat16: "c10::BFloat16",
}


def kernels_words(func: Any, args: Any, kwargs: Any, error: Exception) -> Exception:
    """The exception that the CPU's kernel raises for such operands, else ``error``."""
    count = sum(tensor.numel() for tensor in _tensors(args) + _tensors(list(kwargs.values())))
    if count > _MAX_ELEMENTS:
        return error
    try:
        with no_dispatch():
            func(*_on_host(args), **{n: _on_host(v) for n, v in kwargs.items() if n != "device"})
    except (RuntimeError, IndexError, ValueError) as other:
        if "not implemented for" not in str(other):
            return other
    return error


def _tensors(value: Any) -> list[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        return [value]
    if isinstance(value, (list, tuple)):
        return [tensor for each in value for tensor in _tensors(each)]
    return []


def _on_host(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return constructors.zeros(value.shape, dtype=value.dtype, device="cpu")
    if isinstance(value, (list, tuple)):
        return type(value)([_on_host(each) for each in value])
    return value


# -- operands that fake kernels do not check --------------------------------------------

CHECKS: dict[Any, Callable[[Any, Any], None]] = {}


def _product(first: int) -> Callable[[Any, Any], None]:
    def check(args: Any, _: Any) -> None:
        one, two = args[first], args[first + 1]
        if one.dtype is not two.dtype:
            names = [_CPP_NAMES.get(each.dtype, str(each.dtype)) for each in (one, two)]
            raise RuntimeError(
                f"expected mat1 and mat2 to have the same dtype, but got: {names[0]} != {names[1]}"
            )

    return check


for _func in (aten.mm.default, aten.bmm.default, aten.mv.default, aten.dot.default):
    CHECKS[_func] = _product(0)
for _func in (aten.addmm.default, aten.baddbmm.default, aten.addmv.default):
    CHECKS[_func] = _product(1)


def _convolution(args: Any, _: Any) -> None:
    source, weight, bias = args[0], args[1], args[2]
    for name, tensor in (("weight", weight), ("bias", bias)):
        if tensor is not None and tensor.dtype is not source.dtype:
            kinds = [each.type() for each in (source, tensor)]
            raise RuntimeError(
                f"Input type ({kinds[0]}) and {name} type ({kinds[1]}) should be the same"
            )


CHECKS[aten.convolution.default] = _convolution


def _in_32_bits(kernel: str) -> Callable[[Any, Any], None]:
    """Operators of linear algebra and distances, whose kernels are not made for 16 bits
    (AT_DISPATCH_FLOATING_AND_COMPLEX_TYPES in ATen/native/cuda/linalg, DistanceKernel.cu)."""

    def check(args: Any, _: Any) -> None:
        if args[0].dtype in (torch.float16, torch.bfloat16):
            raise NotImplementedError(f"\"{kernel}\" not implemented for '{_name_of(args[0])}'")

    return check


#: The kernel of each, by the operator's name; PyTorch renames some of them.
_KERNELS_IN_32_BITS: Final = {
    "linalg_cholesky_ex": "cholesky_cuda",
    "cholesky_solve": "cholesky_solve_cuda",
    "_linalg_eigh": "linalg_eigh_cuda",
    "_linalg_svd": "svd_cuda",
    "linalg_qr": "geqrf_cuda",
    "linalg_lu_factor_ex": "lu_factor_cuda",
    "_linalg_solve_ex": "lu_factor_cuda",
    "_linalg_det": "lu_factor_cuda",
    "linalg_solve_triangular": "triangular_solve_cuda",
    "_cdist_forward": "cdist_cuda",
}
for _name, _kernel in _KERNELS_IN_32_BITS.items():
    if (_packet := getattr(aten, _name, None)) is not None:
        CHECKS[_packet.default] = _in_32_bits(_kernel)


def _of_one_dtype(words: str, *places: int) -> Callable[[Any, Any], None]:
    """Operands that a kernel reads as numbers of the first one's type. ``words`` has {wanted} and
    {given}, as CUDA's kernels (data_ptr) or TensorIterator name them."""

    def check(args: Any, _: Any) -> None:
        tensors = [args[place] for place in places if place < len(args) and args[place] is not None]
        for tensor in tensors[1:]:
            if tensor.dtype is not tensors[0].dtype:
                names = {"wanted": _name_of(tensors[0]), "given": _name_of(tensor)}
                raise RuntimeError(words.format(**names))

    return check


def _name_of(tensor: torch.Tensor) -> str:
    """ "Float", "Half", …: the dtype, as C++ has it."""
    return str(tensor.type()).rpartition(".")[2].removesuffix("Tensor")


_DATA: Final = "expected scalar type {wanted} but found {given}"
_ITERATED: Final = "Found dtype {given} but expected {wanted}"
_PUT: Final = (
    "Index put requires the source and destination dtypes match, got {wanted} for the destination "
    "and {given} for the source."
)
_ADDED: Final = "index_add_(): self ({wanted}) and source ({given}) must have the same scalar type"
_COPIED: Final = (
    "index_copy_(): self and source expected to have the same dtype, but got (self) {wanted} and "
    "(source) {given}"
)
for _words, _places, _funcs in (
    (_DATA, (0, 2, 3), (aten.native_layer_norm.default,)),
    (_DATA, (0, 1, 2), (aten.native_group_norm.default,)),
    (_DATA, (0, 1), (aten.grid_sampler_2d.default, aten.grid_sampler_3d.default)),
    (_ITERATED, (0, 1), (aten.binary_cross_entropy.default,)),
    (_ITERATED, (1, 2), (aten.binary_cross_entropy_backward.default,)),
    (_ITERATED, (1, 2), (aten.huber_loss_backward.default,)),
    (_PUT, (0, 2), (aten.index_put.default, aten.index_put_.default)),
    (_ADDED, (0, 3), (aten.index_add.default, aten.index_add_.default)),
    (_COPIED, (0, 3), (aten.index_copy.default, aten.index_copy_.default)),
):
    CHECKS.update(dict.fromkeys(_funcs, _of_one_dtype(_words, *_places)))


def _classes(kernel: str) -> Callable[[Any, Any], None]:
    """Targets of a loss over classes: CUDA's kernels are made for int64, and where there are no
    pixels for uint8 as well (AT_DISPATCH_NLL_LOSS_INDEX_TYPES in ATen/native/cuda/Loss.cu,
    data_ptr<int64_t> in NLLLoss2d.cu)."""

    def check(args: Any, _: Any) -> None:
        target = args[1]
        if target.dtype is torch.int64 or (kernel and target.dtype is torch.uint8):
            return _of_one_dtype(_DATA, 0, 2)(args, {})  # its weights (optional_data<scalar_t>)
        name = _name_of(target)
        if kernel:
            raise NotImplementedError(f"\"{kernel}\" not implemented for '{name}'")
        raise RuntimeError(f"expected scalar type Long but found {name}")

    return check


CHECKS[aten.nll_loss_forward.default] = _classes("nll_loss_forward_reduce_cuda_kernel_2d_index")
CHECKS[aten.nll_loss2d_forward.default] = _classes("")
#: Where operators have classes that are uint8 on a GPU, and int64 for their fake kernels.
_CLASSES: Final = {aten.nll_loss_forward.default: 1, aten.nll_loss_backward.default: 2}


def _filled(at: int) -> Callable[[Any, Any], None]:
    """A number that the dtype cannot hold: -1e9 in float16, whose largest is 65504."""

    def check(args: Any, kwargs: Any) -> None:
        dtype = kwargs.get("dtype") or getattr(args[0], "dtype", None)
        if dtype is not None and isinstance(args[at], (int, float)):
            with no_dispatch():
                # One element is not checked.
                constructors.full((2,), args[at], dtype=dtype, device="cpu")

    return check


for _at, _fills in (
    (1, (aten.fill.Scalar, aten.fill_.Scalar, aten.full.default, aten.full_like.default)),
    (2, (aten.masked_fill.Scalar, aten.masked_fill_.Scalar, aten.new_full.default)),
):
    CHECKS.update(dict.fromkeys(_fills, _filled(_at)))


def _in_place(args: Any, _: Any) -> None:
    """A result that its own tensor cannot hold: whole numbers times 0.999. It is checked by
    TensorIterator (ATen/TensorIterator.cpp), which no fake kernel asks."""
    target, other = meta_arguments(args)[:2]
    with no_dispatch():
        wanted = torch.result_type(target, other)
    if not torch.can_cast(wanted, target.dtype):
        given, own = (
            _name_of(constructors.empty((), dtype=each)) for each in (wanted, target.dtype)
        )
        raise RuntimeError(f"result type {given} can't be cast to the desired output type {own}")


for _arithmetic in ("add_", "sub_", "mul_", "div_"):
    _of_name = getattr(aten, _arithmetic)
    CHECKS.update(dict.fromkeys((_of_name.Tensor, _of_name.Scalar), _in_place))


def indexed_on_host(indices: Any) -> RuntimeError:
    """A host tensor was indexed with tensors of the device."""
    assert any(type(index) is SimulatedTensor for index in indices)
    return RuntimeError(
        "indices should be either on cpu or on the same device as the indexed tensor (cpu)"
    )


# ---
# Memory formats of convolutions' results.
#
# Shape functions of plain meta tensors leave them contiguous, for they do not know the device.
# On CUDA they follow input and weight: cudnn_conv_suggest_memory_format in
# ATen/native/ConvUtils.h.


CHANNELS_LAST = (torch.channels_last, torch.channels_last_3d)
#: Workspaces that are copies of operands, and the kinds of kernels that make them.
COPIES: Final = {"contiguous_copy": "pointwise", "reordered_copy": "pointwise_reordered"}


def convolution_format(source: torch.Tensor, weight: torch.Tensor) -> torch.memory_format:
    """The format that cuDNN computes in and gives its result."""
    if torch.float64 not in (source.dtype, weight.dtype):
        for tensor in (source, weight):
            found = suggest_memory_format(tensor)
            if found in CHANNELS_LAST:
                return found
    return torch.contiguous_format


def innermost(spec: Spec) -> int | None:
    """The dimension of neighbours in memory, counted from the last; ``None``: there is none."""
    found = [
        place - len(spec.size)
        for place, (size, step) in enumerate(zip(spec.size, spec.stride, strict=True))
        if step == 1 and size > 1
    ]
    return found[-1] if found else None


def dense_copy(
    tensor: SimulatedTensor, wanted: torch.memory_format = torch.contiguous_format
) -> tuple[str, tuple[int, ...]]:
    """The workspace (model, arguments) of a copy in that format, by the order that it had."""
    neighbours = 1 - tensor.dim() if wanted in CHANNELS_LAST else -1
    same = innermost(tensor._spec) in (None, neighbours)
    return "contiguous_copy" if same else "reordered_copy", (tensor._spec.nbytes,)


def _of_forward(args: Any, result: Any) -> Any:
    return _laid_out(result, convolution_format(args[0], args[1]))


def _of_backward(args: Any, result: Any) -> Any:
    wanted = convolution_format(args[1], args[2])
    return type(result)([*(_laid_out(each, wanted) for each in result[:2]), result[2]])


def _laid_out(meta: torch.Tensor | None, wanted: torch.memory_format) -> torch.Tensor | None:
    if meta is None:
        return None
    return constructors.empty(meta.shape, dtype=meta.dtype, device="meta", memory_format=wanted)


#: By operator: from meta arguments and the fake kernel's result to CUDA's result.
LAYOUTS: dict[Any, Callable[[Any, Any], Any]] = {
    aten.convolution.default: _of_forward,
    aten.convolution_backward.default: _of_backward,
}


#: By an operator's whole name: what stands for its fake kernel, given the operator and meta
#: arguments.
FAKES: dict[str, Callable[[Any, Any, Any], Any]] = {}


def infer(func: Any, args: Any, kwargs: Any) -> Any:
    """Result of ``func`` as meta tensors, from its fake kernel."""
    plain, plain_kwargs = meta_arguments(args), meta_keywords(kwargs)
    if (fake := FAKES.get(func.name().partition(".")[0])) is not None:
        return fake(func, plain, plain_kwargs)
    check, layout = CHECKS.get(func), LAYOUTS.get(func)
    if check is not None:
        check(args, kwargs)
    if (at := _CLASSES.get(func)) is not None and plain[at].dtype is torch.uint8:
        plain = (*plain[:at], torch.empty_like(plain[at], dtype=torch.int64), *plain[at + 1 :])
    try:
        with no_dispatch(), constructors.pytorchs_own():
            result = func(*plain, **plain_kwargs)
            return result if layout is None else layout(plain, result)
    except ZeroDivisionError:
        # The mean of a loss over no number, in the decomposition of its backward: (gradient, input,
        # target, …). The kernel's result is as empty.
        return torch.empty_like(plain[1])
    except NotImplementedError as error:
        return _infer_otherwise(func, plain, plain_kwargs, error)
    except RuntimeError as error:
        if "fake impl" in str(error):
            raise UnsupportedOperatorError(str(func), user_frame(), str(error)) from None
        if "as opposed to FakeTensors" in str(error):
            remedy = "its fake kernel's result shape depends on data"
            raise UnsupportedOperatorError(str(func), user_frame(), str(error), remedy) from None
        if "NestedTensorImpl" in str(error):
            remedy = "nested tensors are simulated in layout torch.jagged, without attention"
            raise UnsupportedOperatorError(str(func), user_frame(), str(error), remedy) from None
        raise kernels_words(func, plain, plain_kwargs, error) from None


def _infer_otherwise(func: Any, args: Any, kwargs: Any, error: Exception) -> Any:
    """Shape functions that are not registered as meta kernels."""
    with no_dispatch(), constructors.pytorchs_own():
        decomposition = decompositions.get(func)
        if decomposition is not None:
            return decomposition(*args, **kwargs)
        result = func.decompose(*args, **kwargs)
        if result is not NotImplemented:
            return result
    raise UnsupportedOperatorError(str(func), user_frame(), str(error)) from None


class Sequence:
    """Description of a list or tuple of results."""

    __slots__ = ("items", "kind")

    def __init__(self, kind: Any, items: list[Any]) -> None:
        self.kind = kind
        self.items = items


def describe(meta: Any) -> Any:
    """The geometry of results, from which `Engine.materialize` makes new ones."""
    if isinstance(meta, torch.Tensor):
        return spec_of(meta)
    if isinstance(meta, (list, tuple)):
        return Sequence(type(meta), [describe(each) for each in meta])
    return meta


def aliases(meta: Any, storages: Container[int]) -> bool:
    """Does an operator without alias annotation return an existing storage, one of those?"""
    if isinstance(meta, torch.Tensor):
        if meta.layout is not torch.strided:
            return True
        return storage_key(meta.untyped_storage()) in storages
    return isinstance(meta, (list, tuple)) and any(aliases(each, storages) for each in meta)
