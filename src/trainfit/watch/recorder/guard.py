"""What each hook goes through: an error of ours never reaches the training."""

from __future__ import annotations

import contextlib
import functools
import math
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Protocol, TypeVar

import torch
from torch import nn
from torch.nn import functional

from trainfit.results.runs.watched import NO_VALUES
from trainfit.simgpu.patching import PatchSet
from trainfit.torch_private.compiled import traces_original
from trainfit.torch_private.modules import Convolution, TransposedConvolution
from trainfit.watch.recorder.job import LoaderRecord, script_place
from trainfit.watch.recorder.step_recorder import StepRecorder

# ---
# Floating-point operations of one training step, by the shapes that its layers are given.
#
# Matmuls and convolutions are counted, two operations for each multiplication and addition: a
# layer's forward pass once, its backward pass once for each of input and weight that needs a
# gradient. What checkpointing computes again is no part of it (as for MFU: PaLM, arXiv:2204.02311,
# appendix B). Matmuls that a model calls as functions are not seen, but for
# ``scaled_dot_product_attention``.


class FlopCount:
    """Counts from :meth:`install` to :meth:`remove`, in a call of a model; again for the next."""

    def __init__(self) -> None:
        self.flops = 0.0
        self._patches = PatchSet()

    def install(self) -> None:
        self._patches.hook(nn.Module, "__call__", self._counting)
        self._patches.hook(functional, "scaled_dot_product_attention", self._counting_attention)

    def remove(self) -> None:
        self._patches.restore()

    def _counting(self, call: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(call)
        def __call__(module: Any, /, *args: Any, **kwargs: Any) -> Any:
            result = call(module, *args, **kwargs)
            self.add_module(module, args, result)
            return result

        return __call__

    def _counting_attention(self, attention: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(attention)
        def counted(query: Any, key: Any, value: Any, *args: Any, **kwargs: Any) -> Any:
            self._add(_of_attention, query, key, value)
            return attention(query, key, value, *args, **kwargs)

        return counted

    def add_module(self, module: nn.Module, args: tuple[Any, ...], result: Any) -> None:
        """A module that was called itself; what it called has been counted."""
        self._add(_of_module, module, args, result)

    def per_sample(self, samples: int) -> float | None:
        """The FLOPs of a sample, by what was counted; ``None`` where nothing was, or not all."""
        known = samples > 0 and math.isfinite(self.flops) and self.flops > 0
        return self.flops / samples if known else None

    def _add(self, count: Callable[..., float], *of: Any) -> None:
        try:
            self.flops += count(*of)
        except Exception:  # a layer unlike PyTorch's: its part is not known, so nothing is
            self.flops = math.nan


def _of_module(module: nn.Module, args: tuple[Any, ...], result: Any) -> float:
    if isinstance(module, nn.MultiheadAttention):
        return _of_multihead(module, args)
    if isinstance(module, nn.RNNBase):
        weights = sum(
            parameter.numel() for name, parameter in module.named_parameters() if "weight" in name
        )
        steps = args[0].data.shape[0] if not isinstance(args[0], torch.Tensor) else _rows(args[0])
        return 2.0 * float(weights) * steps * _passes(args[0], next(module.parameters()))
    weight = getattr(module, "weight", None)
    if not isinstance(weight, torch.Tensor) or not args or not isinstance(args[0], torch.Tensor):
        return 0.0
    if isinstance(module, TransposedConvolution):
        taps = weight.numel() / weight.shape[0]
        return 2.0 * args[0].numel() * taps * _passes(args[0], weight)
    if isinstance(module, Convolution):
        taps = weight[0].numel()
        return 2.0 * float(result.numel()) * taps * _passes(args[0], weight)
    # Transformers' Conv1D is a linear layer whose weight lies the other way.
    if isinstance(module, nn.Linear) or type(module).__name__ == "Conv1D":
        return 2.0 * _rows(args[0]) * weight.numel() * _passes(args[0], weight)
    return 0.0


def _passes(given: Any, weight: torch.Tensor) -> int:
    """Forward, and backward by the input and by the weight."""
    return 1 + bool(getattr(given, "requires_grad", False)) + weight.requires_grad


def _rows(tensor: torch.Tensor) -> int:
    return math.prod(tensor.shape[:-1])


def _of_attention(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> float:
    """Scores and weighted values; the half that a causal mask leaves out counts (as PaLM's)."""
    products = (
        query.numel() * key.shape[-2] + query[..., :1].numel() * value.shape[-2] * (value.shape[-1])
    )
    return 2.0 * products * (3 if query.requires_grad else 1)


def _of_multihead(module: nn.MultiheadAttention, args: tuple[Any, ...]) -> float:
    """``args`` are query, key and value; its projections are no modules that are called."""
    query, key = args[0], args[1]
    width = float(module.embed_dim)
    rows, keys = _rows(query), _rows(key)
    projections = 2.0 * width * (rows * width * 2 + keys * ((module.kdim or width) * 2))
    length = float(key.shape[1 if module.batch_first or key.dim() == 2 else 0])
    attention = 4.0 * rows * length * width
    trains = bool(module.out_proj.weight.requires_grad)
    return projections * (2 + trains) + attention * 3


Hook = TypeVar("Hook", bound=Callable[..., Any])


class Host(Protocol):
    """The recorder, as the hooks see it."""

    live: bool
    """Does it record? ``False`` in a process that was forked off, and after too many errors."""
    steps: StepRecorder

    def failed(self, where: str, error: Exception) -> None:
        """A hook of ours raised."""

    def saw(self, error: BaseException) -> None:
        """The training raised, in a call that we watch."""

    def event(
        self,
        kind: str,
        *,
        seconds: float | None = None,
        text: str = "",
        values: Mapping[str, float] = NO_VALUES,
    ) -> None: ...

    def learn(self, **facts: Any) -> None:
        """Fields of the run's header."""

    def count_flops(self, module: torch.nn.Module) -> FlopCount | None:
        """What counts the operations of this call of a model, if they shall be."""

    def scaled_by(self, scaler: Any) -> None:
        """The GradScaler of the training."""

    def note_loader(self, loader: LoaderRecord) -> None:
        """A DataLoader that is iterated."""


def in_place_of(original: Any) -> Callable[[Hook], Hook]:
    """Decorates a function that stands where ``original`` stood. torch.compile traces the
    original, as it would have; our code in its graphs would break them."""

    def named(hook: Hook) -> Hook:
        functools.update_wrapper(hook, original)
        traces_original(hook, original)
        return hook

    return named


def watched(host: Host) -> bool:
    """Is there anything to record, here and now?"""
    return host.live and host.steps.mine


@contextlib.contextmanager
def careful(host: Host, where: str) -> Iterator[None]:
    """A guard for hooks that are rare; those of every step are written out."""
    try:
        yield
    except Exception as error:
        host.failed(where, error)


def in_phase(
    host: Host, phase: int, function: Callable[..., Any], event: str = ""
) -> Callable[..., Any]:
    """``function``, whose calls are a phase (and, the outermost, an event)."""

    @in_place_of(function)
    def phased(*args: Any, **kwargs: Any) -> Any:
        token, began = -1, 0.0
        try:
            if watched(host) and host.steps.phases.current != phase:
                token, began = host.steps.enter(phase), host.steps.now
        except Exception as error:
            host.failed(function.__name__, error)
        if token < 0:
            return function(*args, **kwargs)
        try:
            return function(*args, **kwargs)
        finally:
            try:
                host.steps.leave(token)
                if event:
                    seconds = host.steps.now - began
                    host.event(event, seconds=seconds, text=script_place())
            except Exception as error:
                host.failed(function.__name__, error)

    return phased
