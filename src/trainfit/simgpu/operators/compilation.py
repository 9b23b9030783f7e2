"""``torch.compile`` and FlexAttention on the simulated device."""

from __future__ import annotations

import contextlib
import copy
import functools
import inspect
import weakref
from collections.abc import Callable, Iterable
from types import ModuleType
from typing import Any, Final

import torch

from trainfit.results.gpus import Kernel
from trainfit.simgpu import constructors
from trainfit.simgpu.device.engine import Engine
from trainfit.simgpu.device.registry import handles
from trainfit.simgpu.device.tensor import META, DeviceTensor, SimulatedTensor
from trainfit.simgpu.device.user_location import called_by_user
from trainfit.simgpu.operators.kernel_rules import (
    Arguments,
    bytes_of,
    dtype_of,
    launched_by,
)
from trainfit.simgpu.patching import PatchSet
from trainfit.torch_private import compiled
from trainfit.torch_private.compiled import EAGER_FLEX, class_of_compiled
from trainfit.torch_private.modules import COMPILED, forward_hooks_of
from trainfit.torch_private.operators import no_dispatch

#: PyTorch "compiles" it, with a backend that runs eagerly, for FlexAttention outside of a
#: compiled callable.
_EAGER: Final = EAGER_FLEX
_FLEX: Final = "torch.nn.attention.flex_attention"


def _class_of(compiled: Any) -> type:
    return class_of_compiled() or type(compiled)


class CompiledModule(torch.nn.Module):
    """What ``torch.compile`` gives for a module, which is called in its place.

    To the script it is PyTorch's own (torch/_dynamo/eval_frame.py): names of its state begin with
    ``_orig_mod.``, attributes are those of the module, and it is an ``OptimizedModule``.
    """

    #: For isinstance(), which asks for it where the type does not fit. With it, super() needs its
    #: arguments, or the base class stands in its place.
    __class__ = property(_class_of)

    def __init__(self, module: torch.nn.Module) -> None:
        torch.nn.Module.__init__(self)
        self._orig_mod = module
        self.training = module.training

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if forward_hooks_of(self)[0] or forward_hooks_of(self)[1]:
            return torch.nn.Module.__call__(self, *args, **kwargs)
        return self._orig_mod(*args, **kwargs)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """The compiled call of the module."""
        return self._orig_mod(*args, **kwargs)

    def dynamo_ctx(self, function: Any) -> Any:
        """What would compile a function (Lightning asks for it): it is left as it is."""
        return function

    def __getattr__(self, name: str) -> Any:
        if name == COMPILED:
            return torch.nn.Module.__getattr__(self, name)
        return getattr(self._orig_mod, name)

    def __setattr__(self, name: str, value: Any) -> None:
        if name == COMPILED or COMPILED not in vars(self).get("_modules", ()):
            torch.nn.Module.__setattr__(self, name, value)
        else:
            setattr(self._orig_mod, name, value)
            if name == "training":
                torch.nn.Module.__setattr__(self, name, value)


class Compilation:
    """Stands for ``torch.compile`` and notes which of its results were called.

    Attributes: ``models`` are the modules that were compiled and not yet called; ``left_out``: what
    a GPU would have run compiled ran in eager mode.
    """

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._depth = 0
        self._any_model = False
        self.left_out = False
        self.models: weakref.WeakSet[torch.nn.Module] = weakref.WeakSet()

    def inside(self) -> bool:
        """Would what is called now be compiled? In a script that compiled a model, all is."""
        return bool(self._depth) or self._any_model

    def compile(self, model: Any = None, *_: Any, **__: Any) -> Any:
        """``torch.compile(model)``, or the decorator ``torch.compile(mode=...)``."""
        if model is None:
            return self.compile
        if isinstance(model, CompiledModule):
            return model
        if isinstance(model, torch.nn.Module):
            self.models.add(model)
            self._any_model = True
            # A library that compiles knows how to go on with either.
            return CompiledModule(model) if called_by_user() else model
        if getattr(model, "__name__", "") == _EAGER:
            return model
        if inspect.isclass(model) or not callable(model):
            return model
        return self._function(model)

    def trace(self, func: Any, example_inputs: Any = None, *_: Any, **kwargs: Any) -> Any:
        """``torch.jit.trace``: what it is given runs once, as there, and stays as it is.

        PyTorch records with sizes that are tensors, which kernels in Python do not take.
        """
        given = example_inputs if isinstance(example_inputs, tuple) else (example_inputs,)
        named = kwargs.get("example_kwarg_inputs") or {}
        self._engine.assume("torch.jit.trace was skipped: the model was simulated in eager mode")
        func(*(() if example_inputs is None else given), **named)
        return _as_traced(func)

    def install_tracing(self, patches: PatchSet) -> None:
        """Trace so from now on, until ``patches`` is restored; what draws a traced graph
        (``SummaryWriter.add_graph``) leaves it out."""
        patches.hook(torch.jit, "trace", lambda _: self.trace)

        def writer(module: ModuleType) -> None:
            patches.hook(module.SummaryWriter, "add_graph", self._without_graph)

        for name in ("torch.utils.tensorboard.writer", "tensorboardX.writer"):
            patches.when_imported(name, writer)

    def _without_graph(self, add_graph: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(add_graph)
        def added(_: Any, model: Any, input_to_model: Any = None, *__: Any, **___: Any) -> None:
            is_list = isinstance(input_to_model, list)
            self.trace(model, tuple(input_to_model) if is_list else input_to_model)

        return added

    def called(self, module: torch.nn.Module, args: tuple[Any, ...]) -> None:
        """A module is called; noted at the first time that it is a compiled one's."""
        if (
            self.models
            and module in self.models
            and (_on_device(args) or _on_device(module.parameters()))
        ):
            self.models.discard(module)
            self.left_out = True
            self._engine.assume("torch.compile was skipped: the model was simulated in eager mode")

    def _function(self, function: Callable[..., Any]) -> Callable[..., Any]:
        # FlexAttention is simulated as the kernel that it is compiled to.
        noted = getattr(function, "__module__", "") == _FLEX

        @functools.wraps(function)
        def called(*args: Any, **kwargs: Any) -> Any:
            nonlocal noted
            if not noted and (_on_device(args) or _on_device(kwargs.values())):
                noted = self.left_out = True
                self._engine.assume(
                    f"torch.compile was skipped: {_name(function)} ran in eager mode"
                )
            self._depth += 1
            try:
                return function(*args, **kwargs)
            finally:
                self._depth -= 1

        return called


def _as_traced(function: Any) -> Any:
    """What was traced, with the method by which a traced one is saved."""
    made = copy.copy(function) if isinstance(function, torch.nn.Module) else function
    state = made.state_dict if isinstance(made, torch.nn.Module) else dict
    with contextlib.suppress(AttributeError):  # a function of C has none
        object.__setattr__(made, "save", lambda file, *_, **__: torch.save(state(), file))
    return made


def _name(function: Any) -> str:
    """What to call it: ``Module.compile()`` compiles a module's bound method."""
    owner = getattr(function, "__self__", None)
    if isinstance(owner, torch.nn.Module):
        return f"a {type(owner).__name__}"
    name = getattr(function, "__qualname__", type(function).__name__)
    return f"{name.rpartition('<locals>.')[2]}()"


def _on_device(values: Iterable[Any], depth: int = 3) -> bool:
    """Is a tensor of the device among arguments, or in lists and dicts among them?"""
    for value in values:
        if isinstance(value, (DeviceTensor, torch.nn.Module)):
            if isinstance(value, DeviceTensor) or _on_device(value.parameters(), 0):
                return True
        elif depth and isinstance(value, (list, tuple)):
            if _on_device(value, depth - 1):
                return True
        elif depth and isinstance(value, dict) and _on_device(value.values(), depth - 1):
            return True
    return False


# ---
# FlexAttention on the simulated device, compiled and not.
#
# Its higher-order operator traces the score function with FakeTensors, which simulated tensors
# cannot be wrapped in. It is called in its place here. Without compilation PyTorch computes the
# whole matrix of scores, with functions of its own that run as they are. Compiled, it is one Triton
# kernel (two for the gradients): results and the logarithms of the sums are all that is allocated.
# How many pairs the mask lets meet, which only costs time, is asked of the mask at a few positions.


#: Positions along a side at which the mask is asked.
_SAMPLES: Final = 64

_library = torch.library.Library("trainfit", "FRAGMENT")
_library.define(
    "flex_attention(Tensor query, Tensor key, Tensor value, int pairs) -> (Tensor, Tensor)"
)
_library.define(
    "flex_attention_backward(Tensor grad_out, Tensor query, Tensor key, Tensor value, Tensor out, "
    "Tensor sums, int pairs) -> (Tensor, Tensor, Tensor)"
)
_forward_op = torch.ops.trainfit.flex_attention.default
_backward_op = torch.ops.trainfit.flex_attention_backward.default


@functools.cache
def _hop() -> Any:
    """The operator's module, whose name in its package is the operator's."""
    return compiled.flex_attention()


@functools.cache
def _gives_maxima() -> bool:
    return compiled.gives_maxima(_hop())


def install(patches: PatchSet, compiled: Callable[[], bool]) -> None:
    """Let simulated tensors take this module's way; ``compiled`` tells whether the call would
    be compiled."""
    original = _hop().FlexAttentionHOP.__call__

    def call(
        self: Any, query: Any, key: Any, value: Any, score_mod: Any, block_mask: Any, scale: float,
        kernel_options: Any, *others: Any,
    ) -> Any:  # fmt: skip
        if not isinstance(query, DeviceTensor):
            return original(
                self, query, key, value, score_mod, block_mask, scale, kernel_options, *others
            )
        operands = _cast(query, key, value)
        learned = _learned(score_mod)
        if not compiled():
            setting = (score_mod, block_mask, scale, kernel_options)
            return _Unfused.apply(setting, *operands, *learned)  # type: ignore[no-untyped-call]
        pairs = _pairs(query, key, block_mask)
        out, sums = _Fused.apply(pairs, *operands, *learned)  # type: ignore[no-untyped-call]
        return (out, sums, sums.new_empty(0)) if _gives_maxima() else (out, sums)

    patches.set(_hop().FlexAttentionHOP, "__call__", call)


def _cast(*tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """Autocast casts to its dtype, as the operator's own rule does."""
    if not torch.is_autocast_enabled("cuda"):
        return tensors
    dtype = torch.get_autocast_dtype("cuda")
    return tuple(tensor.to(dtype) for tensor in tensors)


def _learned(score_mod: Any) -> list[torch.Tensor]:
    """Tensors in the score function's closure that gradients go to."""
    cells = getattr(score_mod, "__closure__", None) or ()
    found = [cell.cell_contents for cell in cells]
    return [
        contents
        for contents in found
        if isinstance(contents, torch.Tensor) and contents.requires_grad
    ]


class _Fused(torch.autograd.Function):
    """The compiled operator."""

    @staticmethod
    def forward(ctx: Any, pairs: int, query: Any, key: Any, value: Any, *learned: Any) -> Any:
        out, sums = _forward_op(query, key, value, pairs)
        ctx.save_for_backward(query, key, value, out, sums, *learned)
        ctx.pairs = pairs
        ctx.mark_non_differentiable(sums)
        return out, sums

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        query, key, value, out, sums, *learned = ctx.saved_tensors
        gradients = _backward_op(grads[0], query, key, value, out, sums, ctx.pairs)
        return None, *gradients, *map(torch.zeros_like, learned)


class _Unfused(torch.autograd.Function):
    """Attention as ``FlexAttentionAutogradOp`` runs it eagerly: scores are recomputed for
    gradients."""

    @staticmethod
    def forward(ctx: Any, setting: Any, query: Any, key: Any, value: Any, *learned: Any) -> Any:
        score_mod, block_mask, scale, options = setting
        out, *others = _hop().math_attention(
            query, key, value, score_mod, block_mask, scale, options
        )
        out = compiled.permute_strides(_hop())(out, query.stride())
        ctx.save_for_backward(query, key, value, out, others[0], *learned)
        ctx.setting = setting
        ctx.mark_non_differentiable(*others)
        return out, *others

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        query, key, value, out, sums, *learned = ctx.saved_tensors
        score_mod, block_mask, scale, options = ctx.setting
        of_sums = None if _gives_maxima() else grads[1]
        found = _hop().sdpa_dense_backward(
            query, key, value, out, sums, grads[0], of_sums, score_mod, _passed_on, block_mask,
            scale, options, (), (),
        )  # fmt: skip
        return None, *found[:3], *map(torch.zeros_like, learned)


def _passed_on(score: Any, b: Any, h: Any, m: Any, n: Any, grad: Any) -> Any:
    """The gradient through the score function: as large as it, whatever it is."""
    return [grad * 1, None, None, None, None]


# --- The compiled operator --------------------------------------------------------------------


def _like(shape: Any, strides: Any, dtype: torch.dtype) -> torch.Tensor:
    """A tensor whose dimensions lie in the order of ``strides``, the last one innermost."""
    with no_dispatch():
        dense = constructors.empty(shape, dtype=dtype, device=META)
        return compiled.permute_strides(_hop())(dense, strides)  # type: ignore[no-any-return]


@handles(_forward_op)
def _fused(engine: Engine, func: Any, args: Any, kwargs: Any) -> Any:
    query, _, value = args[:3]
    engine.record(engine.info(func))
    shape = (*query.shape[:3], value.shape[3])
    out = engine.adopt(_like(shape, query.stride(), query.dtype))
    return out, engine.empty(query.shape[:3], torch.float32)


@handles(_backward_op)
def _fused_backward(engine: Engine, func: Any, args: Any, kwargs: Any) -> Any:
    """The gradients, and the sums of out × gradient, one for each query."""
    _, query, key, value, _, sums, _ = args
    engine.record(engine.info(func))
    delta = engine.empty(sums.shape, torch.float32)
    grads = tuple(
        engine.adopt(_like(tuple(each.shape), each.stride(), each.dtype))
        for each in (query, key, value)
    )
    del delta
    return grads


@launched_by("flex_attention", "flex_attention_backward")
def _kernels(call: Arguments, result: Any, flops: int) -> list[Kernel]:
    """The kernel of scaled dot-product attention over the pairs that meet
    (``flops._attention``)."""
    query, key, value = call["query"], call["key"], call["value"]
    batch, heads, rows, size = query._spec.size
    backward = "grad_out" in call
    by_query, by_value = (3, 2) if backward else (1, 1)
    operands = [each for each in call.values() if type(each) is SimulatedTensor]
    return [
        Kernel(
            "attention_gradient" if backward else "attention",
            dtype_of(query, "matmul"),
            2 * batch * heads * call["pairs"] * (by_query * size + by_value * value._spec.size[3]),
            bytes_of(operands),
            bytes_of(result),
            rows,
            key._spec.size[2],
            size,
            batch * heads,
        )
    ]


# --- The mask ---------------------------------------------------------------------------------


def _pairs(query: Any, key: Any, block_mask: Any) -> int:
    """Pairs of a query and a key that meet; all where the mask cannot be asked on the host."""
    queries, keys = query.shape[-2], key.shape[-2]
    total: int = queries * keys
    rows = torch.linspace(0, queries - 1, min(_SAMPLES, queries), device="cpu").long()[:, None]
    columns = torch.linspace(0, keys - 1, min(_SAMPLES, keys), device="cpu").long()[None]
    zero = constructors.zeros((), dtype=torch.int64, device="cpu")
    try:
        with no_dispatch():
            meets = block_mask[-1](zero, zero, rows, columns)
            share = float(torch.as_tensor(meets, dtype=torch.float32).mean())
    except Exception:  # it looks at tensors of the device
        return total
    return max(1, round(share * total))
