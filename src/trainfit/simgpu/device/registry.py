"""Operators with an implementation of their own, what others attach to the engine, and operators
that are refused.

PyTorch refuses, while ``torch.use_deterministic_algorithms(True)`` is on: operators of a GPU
without a deterministic form.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable
from typing import Any, Final

import torch

from trainfit.torch_private import operators as private
from trainfit.torch_private.operators import has_kernel

#: Operators that ask ``alertNotDeterministic`` in ATen/native/cuda, and the name that they give
#: there; torch.use_deterministic_algorithms lists them.
_ALWAYS: Final = {
    "avg_pool3d_backward": "avg_pool3d_backward_cuda",
    "_adaptive_avg_pool2d_backward": "adaptive_avg_pool2d_backward_cuda",
    "_adaptive_avg_pool3d_backward": "adaptive_avg_pool3d_backward_cuda",
    "adaptive_max_pool2d_backward": "adaptive_max_pool2d_backward_cuda",
    "fractional_max_pool2d_backward": "fractional_max_pool2d_backward_cuda",
    "fractional_max_pool3d_backward": "fractional_max_pool3d_backward_cuda",
    "max_unpool2d": "max_unpooling2d_forward_out_cuda",
    "max_unpool3d": "max_unpooling3d_forward_out_cuda",
    "upsample_linear1d_backward": "upsample_linear1d_backward_out_cuda",
    "upsample_bilinear2d_backward": "upsample_bilinear2d_backward_out_cuda",
    "upsample_bicubic2d_backward": "upsample_bicubic2d_backward_out_cuda",
    "upsample_trilinear3d_backward": "upsample_trilinear3d_backward_out_cuda",
    "reflection_pad1d_backward": "reflection_pad1d_backward_out_cuda",
    "reflection_pad2d_backward": "reflection_pad2d_backward_cuda",
    "reflection_pad3d_backward": "reflection_pad3d_backward_out_cuda",
    "_ctc_loss_backward": "ctc_loss_backward_gpu",
    "grid_sampler_2d_backward": "grid_sampler_2d_backward_cuda",
    "grid_sampler_3d_backward": "grid_sampler_3d_backward_cuda",
    "put_": "put_",
}
_MEAN_OR_SUM: Final = (1, 2)
_MAXIMUM: Final = 2


def _is_float(args: Any, kwargs: Any) -> bool:
    dtype = kwargs.get("dtype") or args[0].dtype
    return bool(dtype.is_floating_point or dtype.is_complex)


#: … and those that ask for some arguments only.
_SOMETIMES: Final[dict[str, tuple[str, Callable[[Any, Any], bool]]]] = {
    "nll_loss2d_forward": (
        "nll_loss2d_forward_out_cuda_template",
        lambda args, _: args[3] in _MEAN_OR_SUM,
    ),
    "cumsum": ("cumsum_cuda_kernel", _is_float),
    "histc": ("_histc_cuda with floating point input", _is_float),
    "bincount": (
        "_bincount_cuda",
        lambda args, kwargs: (args[1:2] or (kwargs.get("weights"),))[0] is not None,
    ),
    "median.dim": ("median CUDA with indices output", lambda *_: True),
    "nanmedian.dim": ("median CUDA with indices output", lambda *_: True),
    "_embedding_bag_dense_backward": (
        "embedding_bag_backward_cuda_max",
        lambda args, _: args[7] == _MAXIMUM,
    ),
}
#: Of PyTorch 2.8, whose documentation names the variable, up to one that no longer asks for it:
#: matmuls of cuBLAS (ATen/cuda/CUDABlas.cpp; those with a bias go to cuBLASLt, which is not asked).
_MATMULS: Final = {"mm", "bmm", "baddbmm"}
_CONFIG: Final = "CUBLAS_WORKSPACE_CONFIG"
_DETERMINISTIC: Final = (":4096:8", ":16:8")


def wants_config() -> bool:
    """Does this PyTorch refuse matmuls without ``CUBLAS_WORKSPACE_CONFIG``?"""
    return _CONFIG in (torch.use_deterministic_algorithms.__doc__ or "")


def refusal(name: str, overload: str) -> Callable[[Any, Any], str | None] | None:
    """What tells by an operator's arguments what PyTorch would raise of it while deterministic
    algorithms are on (``None``: nothing); ``None``: it is never refused."""
    if name in _MATMULS and wants_config():
        return lambda *_: None if os.environ.get(_CONFIG) in _DETERMINISTIC else _OF_CUBLAS
    if name in _ALWAYS:
        said = _told(_ALWAYS[name])
        return lambda *_: said
    if (some := _SOMETIMES.get(f"{name}.{overload}" if overload else name)) is not None:
        caller, asks = some
        return lambda args, kwargs: _told(caller) if asks(args, kwargs) else None
    return None


def are_refused() -> bool:
    """Does PyTorch raise for operators without a deterministic form now?"""
    return (
        torch.are_deterministic_algorithms_enabled()
        and not torch.is_deterministic_algorithms_warn_only_enabled()
    )


def _told(caller: str) -> str:
    """aten/src/ATen/Context.cpp (alertNotDeterministic)"""
    return (
        f"{caller} does not have a deterministic implementation, but you set "
        "'torch.use_deterministic_algorithms(True)'. You can turn off determinism just for this "
        "operation, or you can use the 'warn_only=True' option, if that's acceptable for your "
        "application. You can also file an issue at https://github.com/pytorch/pytorch/issues to "
        "help us prioritize adding deterministic support for this operation."
    )


#: aten/src/ATen/Context.cpp (alertCuBLASConfigNotDeterministic)
_OF_CUBLAS: Final = (
    "Deterministic behavior was enabled with either `torch.use_deterministic_algorithms(True)` or "
    "`at::Context::setDeterministicAlgorithms(true)`, but this operation is not deterministic "
    "because it uses CuBLAS and you have CUDA >= 10.2. To enable deterministic behavior in this "
    "case, you must set an environment variable before running your PyTorch application: "
    "CUBLAS_WORKSPACE_CONFIG=:4096:8 or CUBLAS_WORKSPACE_CONFIG=:16:8."
)


#: Functions that operators call; the first argument is the engine.
Handler = Callable[[Any, Any, tuple[Any, ...], dict[str, Any]], Any]
KernelModel = Callable[[Any, tuple[Any, ...], Any], None]
Maker = Callable[[Any, Any, tuple[Any, ...]], Any]
LibraryFinder = Callable[[Any, tuple[Any, ...]], str | None]

#: Operators with their own implementation, and models of kernels' extra memory.
HANDLERS: dict[Any, Handler] = {}
KERNELS: dict[Any, KernelModel] = {}
#: What makes the results of operators that take extra memory between them.
MAKERS: dict[Any, Maker] = {}

#: The same by an operator's whole name: of packages that may be imported later.
NAMED_HANDLERS: dict[str, Handler] = {}

#: By an operator's name without "aten::": what finds the library that its kernel is from.
LIBRARY_OF: dict[str, LibraryFinder] = {}

#: Operators that are the engine's whatever device their tensors are on.
EVERYWHERE: set[Any] = set()

#: Operators that accept CPU tensors with dimensions alongside CUDA ones, as CUDA's kernels do.
MIXED_DEVICE: set[Any] = set()


def handles(*overloads: Any) -> Callable[[Handler], Handler]:
    """Register a function as the implementation of operators."""

    def register(function: Handler) -> Handler:
        for overload in overloads:
            HANDLERS[overload] = function
        return function

    return register


def handles_named(*names: str) -> Callable[[Handler], Handler]:
    """Register a function for operators by their whole names ("package::operator"), whatever their
    overload."""

    def register(function: Handler) -> Handler:
        NAMED_HANDLERS.update(dict.fromkeys(names, function))
        return function

    return register


def allocates(*overloads: Any) -> Callable[[KernelModel], KernelModel]:
    """Register a function that takes the extra memory of operators' kernels."""

    def register(function: KernelModel) -> KernelModel:
        for overload in overloads:
            KERNELS[overload] = function
        return function

    return register


def makes(*overloads: Any) -> Callable[[Maker], Maker]:
    """Register a function that makes operators' results, one after the other, from their geometry
    and the arguments."""

    def register(function: Maker) -> Maker:
        MAKERS.update(dict.fromkeys(overloads, function))
        return function

    return register


class OperatorInfo:
    """What the schema of an operator says, worked out once."""

    __slots__ = (
        "body", "composite", "fresh", "func", "handler", "inplace_view", "kernel", "launches",
        "library", "maker", "mutates", "name", "of_lists", "random", "refusal", "returns", "view",
        "written",
    )  # fmt: skip

    def __init__(self, func: Any, name: int) -> None:
        schema = private.schema(func)
        own = schema.name.removeprefix("aten::")
        self.func = func
        self.name = name
        self.handler = HANDLERS.get(func) or NAMED_HANDLERS.get(schema.name)
        self.kernel = KERNELS.get(func)
        self.maker = MAKERS.get(func)
        self.library = LIBRARY_OF.get(own)
        self.composite = self.handler is None and _is_composite(func)
        #: The operator as it is written in Python, where that is to be run.
        self.body = None if self.handler is not None else _body_of(func)
        self.mutates = schema.is_mutable
        #: Does its kernel itself count that the tensors of a list were changed in place? (foreach,
        #: ATen/native/cuda/Foreach*.cu; fused optimizers do not.)
        self.of_lists = self.mutates and schema.name.startswith("aten::_foreach_")
        self.inplace_view = torch.Tag.inplace_view in func.tags
        self.random = torch.Tag.nondeterministic_seeded in func.tags
        #: What PyTorch raises of it while deterministic algorithms are on.
        self.refusal = None if own == schema.name else refusal(own, schema.overload_name)
        returned = [r.alias_info for r in schema.returns]
        self.view = any(a is not None and not a.is_write for a in returned)
        self.launches = not self.view and not self.composite and self.body is None
        written = {}
        #: The arguments that it writes to (index or name): fused optimizers return none of them.
        self.written: list[int | str] = []
        for index, argument in enumerate(schema.arguments):
            alias = argument.alias_info
            if alias is not None and alias.is_write:
                place = argument.name if argument.kwarg_only else index
                self.written.append(place)
                for mark in alias.before_set:
                    written[mark] = place
        #: For each return: the argument (index or name) that it is, or None if it is new.
        self.returns = [
            next((written[m] for m in a.before_set if m in written), None) if a else None
            for a in returned
        ]
        self.fresh = any(place is None for place in self.returns)


def _is_composite(func: Any) -> bool:
    """Is the operator nothing but calls of others on a GPU too?"""
    name = func.name()
    return has_kernel(name, "CompositeImplicitAutograd") and not has_kernel(name, "CUDA")


def _body_of(func: Any) -> Callable[..., Any] | None:
    """What an operator defined in Python (``torch.library.custom_op``, ``triton_op``) consists of,
    if it is to be run for its result's shape.

    That is so without a registered fake kernel, and where the function itself is that one
    (``triton_op``): it allocates what it needs and launches its kernels. With a fake kernel the
    body may be anything, also a library's that takes addresses.
    """
    name = private.schema(func).name
    definition = private.python_operators.get(name)
    if definition is None:
        return None
    if private.fake_kernel(definition) is not None and not private.is_of_triton(definition):
        return None
    bodies = private.bodies(definition)
    body: Callable[..., Any] | None = bodies.get("cuda") or bodies.get(None)
    return body


# ---
# What others attach to the engine: modes, and callbacks for what happens in it.


LaunchListener = Callable[[OperatorInfo, Any, tuple[Any, ...], dict[str, Any], Any], None]


class Hooks:
    """Each does nothing until it is set."""

    def __init__(self) -> None:
        #: Makes the dispatch mode, which PyTorch takes off its stack to call the engine.
        self.mode: Callable[[Any], Any] = contextlib.nullcontext
        #: Makes the mode for Python that names devices.
        self.function_mode: Callable[[Any], Any] = contextlib.nullcontext
        #: Runs an operator on sparse tensors, given the engine.
        self.on_sparse: Handler = lambda *_: NotImplemented
        #: Called when a library is used for the first time.
        self.on_library: Callable[[], None] = lambda: None
        #: Called when the simulator starts to run (was the script running?), and when the script
        #: resumes.
        self.on_enter: Callable[[], bool] = lambda: False
        self.on_leave: Callable[[], None] = lambda: None
        #: Is told of every operator that may launch kernels, with its geometry's key.
        self.on_launch: LaunchListener = lambda *_: None
        #: Called after each operator that a thread of several runs (`communication.replicas`).
        self.on_done: Callable[[], None] = lambda: None
        #: Is told of two tensors, or one and a number of the script, and their sum, difference or
        #: product.
        self.on_arithmetic: Callable[[Any, Any, Any], None] = lambda *_: None
        #: … and of a tensor that the script itself makes a view of, and that.
        self.on_view: Callable[[Any, Any], None] = lambda *_: None
        #: … and of a function of PyTorch, what it got, and the tensor on the device that it gave;
        #: of one that changes all tensors of a list, too.
        self.on_result: Callable[[Any, Any, Any, Any], None] = lambda *_: None
        #: Is told when random numbers are drawn on the device.
        self.on_random: Callable[[], None] = lambda: None
