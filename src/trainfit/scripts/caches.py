"""Generating text: caches of keys and values, and loops of a script's own.

Of the caches of Transformers' models: what holds them, positions that they are given at once, and a
call with one whose sliding windows are full. Loops that generate text are told by what a model is
given, and counted.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, Final

import torch

from trainfit.results.runs.generation import GeneratedText
from trainfit.results.runs.recording import FullWindowCall, Recording
from trainfit.simgpu.session import Simulation

#: What of a cache's layer holds it, in the versions of Transformers.
LAYER: Final = ("keys", "values", "conv_states", "recurrent_states", "indexer_keys",
                 "_quantized_keys", "_quantized_values")  # fmt: skip
_LISTS: Final = ("key_cache", "value_cache")
#: What a cache is called where ``generate()`` is given it and gives it: since 5.24, and before.
NAMES: Final = ("cache", "past_key_values")
#: What a cache is called by what its layers' classes have in their names.
_CACHES: Final = {"Static": "static", "Sliding": "sliding window", "Quant": "quantized",
                  "Linear": "recurrent"}  # fmt: skip


def cache_among(named: Mapping[str, Any]) -> Any:
    """The cache among arguments, or fields of a result; ``None``: there is none."""
    return next((named[name] for name in NAMES if named.get(name) is not None), None)


def fill(cache: Any, positions: int) -> None:
    """A cache of Transformers is given the positions that it lacks, as its layers' calls would."""
    more = positions - int(cache.get_seq_length())
    layers = getattr(cache, "layers", None)
    held = zip(*(getattr(cache, name, ()) for name in _LISTS), strict=True)
    pairs = list(held) if layers is None else [(layer.keys, layer.values) for layer in layers]
    for index, pair in enumerate(pairs if more > 0 else ()):
        cache.update(
            *(each.new_empty((*each.shape[:-2], more, each.shape[-1])) for each in pair), index
        )


def held_by(cache: Any, index: int) -> list[Any]:
    """What holds the keys and values of a layer."""
    if (layers := getattr(cache, "layers", None)) is not None:
        return [getattr(layers[index], name, None) for name in LAYER]
    return [getattr(cache, name)[index] for name in _LISTS if hasattr(cache, name)]


def parts_of(held: Any) -> Iterator[torch.Tensor]:
    """The tensors of a layer's cache; a quantized one's values, scales and zero points."""
    if isinstance(held, torch.Tensor):
        flatten = getattr(held, "__tensor_flatten__", None)
        inner = [getattr(held, name) for name in flatten()[0]] if flatten else []
        yield from parts_of(inner) if inner else (held,)
    elif isinstance(held, dict | list | tuple):
        for each in held.values() if isinstance(held, dict) else held:
            yield from parts_of(each)


def kinds_of(name: str) -> set[str]:
    return {text for part, text in _CACHES.items() if part in name} or {"dynamic"}


# ---
# A call whose sliding windows are full.


#: Arguments that have a value for each position so far.
_OF_POSITIONS: Final = ("attention_mask",)
#: What a kernel's time depends on.
_COLUMNS: Final = (
    *("kind", "dtype", "flops", "read", "written", "rows", "columns", "depth", "batches"),
    "launches",
)


class WindowProbe:
    """Notes how a model is called for one more token, and calls it so.

    Windows that are full within a text need masks that calls before do not: the text's first calls
    cannot tell. So when its cache has been given all of its positions, its model is called once
    more.
    """

    def __init__(self, simulation: Simulation) -> None:
        self._simulation = simulation
        self._module: torch.nn.Module | None = None
        self._given: dict[str, Any] = {}
        self._entered = 0
        #: Of the latest call: operators before the model's own, since the call before.
        self._before = 0
        self._ended = 0
        self.is_calling = False

    def enter(self) -> None:
        """The outermost module is called."""
        self._entered = self._simulation.operators

    def leave(self, module: torch.nn.Module, kwargs: Mapping[str, Any]) -> None:
        """Note the end of a call. Of tensors only their form is kept: they would live longer."""
        self._before = self._entered - self._ended
        self._ended = self._simulation.operators
        self._module = module
        self._given = {
            name: (tuple(each.shape), each.dtype, each.device)
            if isinstance(each, torch.Tensor)
            else each
            for name, each in kwargs.items()
            if isinstance(each, torch.Tensor | bool | int)
        }

    def takes(self, name: str) -> bool:
        """Has the model such an argument?"""
        forward = getattr(self._module, "forward", None)
        return forward is not None and name in inspect.signature(forward).parameters

    def call(self, cache_name: str, cache: Any, positions: int) -> FullWindowCall | None:
        """What such a call launches with ``cache``, which has all but the last of so many
        positions; ``None``: the model was not called by name alone."""
        if self._module is None or not self._given:
            return None
        given = {name: self._tensor(name, each, positions) for name, each in self._given.items()}
        first, before = self._simulation.operators, self._before
        self.is_calling = True
        try:
            with torch.no_grad():
                self._module(**given, **{cache_name: cache})
        finally:
            self.is_calling = False
        return _launched(self._simulation.recording, first, before)

    @staticmethod
    def _tensor(name: str, form: Any, positions: int) -> Any:
        if not isinstance(form, tuple):
            return form
        shape, dtype, device = form
        if name in _OF_POSITIONS and len(shape) == 2:
            shape = (shape[0], positions)
        return torch.ones(shape, dtype=dtype, device=device)


def _launched(recording: Recording, first: int, before: int) -> FullWindowCall:
    """The kernels of all operators from number ``first`` on."""
    mine = recording.kernel_op >= first
    return FullWindowCall(
        before=before,
        op_phase=recording.op_phase[first:].tolist(),
        op=(recording.kernel_op[mine] - first).tolist(),
        stream=recording.kernel_stream[mine].tolist(),
        table={name: getattr(recording, f"kernel_{name}")[mine].tolist() for name in _COLUMNS},
    )


#: Names of the tensors that a call was given, and their shapes.
Signature = tuple[tuple[str, tuple[int, ...]], ...]
#: Calls in a row, each given one position more, that are a text: padded batches may be one position
#: longer than the one before by chance.
_GROWN = 3
#: Calls for a further token that a loop has at least, to be one.
_LEAST = 3
#: What embeddings look up.
_INTEGERS = (torch.int32, torch.int64)


class DecodeLoop:
    """A loop of the script's own: calls of one model, each of them given as much as the one before
    or one position more."""

    def __init__(self) -> None:
        self.module: torch.nn.Module | None = None
        self.signature: Signature = ()
        self.decodes = 0
        self._prefill = self._grown = 0
        self._before: Signature = ()
        self._prompt: Signature = ()
        self._integers: frozenset[str] = frozenset()
        #: Was the call before of the same module, and was the prompt's?
        self._is_same = self._is_its_own = False
        self.is_text = self._follows = self._grows = False

    @property
    def prompt(self) -> Signature:
        """What the call for the prompt was given."""
        return self._prompt

    @property
    def is_too_short(self) -> bool:
        """Is it maybe no text, as too few calls were made for it?"""
        return self.decodes < _LEAST

    @property
    def is_of_tokens(self) -> bool:
        """Was the same model given integers, those of many positions and then of one each time? It
        reads its own text then, whether or not its memory changes (a cache of full length)."""
        before = dict(self._prompt)
        return (
            self.is_text
            and self._is_its_own
            and any(
                name in self._integers
                and len(shape) == 2
                and shape[1] == 1 < before.get(name, (0, 0))[1]
                and before[name][0] == shape[0]
                for name, shape in self.signature
            )
        )

    def forget(self) -> None:
        """The next call has nothing to do with those before."""
        self.module, self.signature = None, ()

    def given(
        self, module: torch.nn.Module, signature: Signature, integers: Iterable[str] = ()
    ) -> None:
        """An outermost module was called with tensors of these shapes, some of them integers."""
        self._is_same = module is self.module
        self._follows = self._is_same and follows(self.signature, signature)
        self._integers = frozenset(integers)
        self._grows = self._follows and signature != self.signature
        self._before = self.signature
        self.module, self.signature = module, signature

    def called(self, steps: int) -> bool:
        """Note that the call was step ``steps`` (from 1). Is it one for a further token?"""
        if self._follows:
            self.decodes += 1
            self._grown = self._grown + 1 if self._grows else 0
            self.is_text = self.is_text or self._grown >= _GROWN
        else:
            # The call before was for the prompt, if this one is for a single position.
            self.is_text = steps > 1 and _is_next(self._before, self.signature)
            self._grown, self._is_its_own = 0, self._is_same
            self.decodes = int(self.is_text)
            self._prefill = steps - 1 - self.decodes
            self._prompt = self._before if self.is_text else self.signature
        return self.is_text

    def text(self) -> GeneratedText:
        """What was seen of it: the first tensor of the prompt's call has its sequences."""
        shape = next((shape for _, shape in self._prompt if len(shape) > 1), (None, None))
        return GeneratedText(
            self._prefill,
            self.decodes,
            prompt=shape[1],
            rows=shape[0],
            sequences=shape[0],
            by="the script's loop",
        )


def follows(before: Signature, now: Signature) -> bool:
    """Is ``now`` given as ``before`` was, or one position more of some tensors?"""
    if not now or [name for name, _ in before] != [name for name, _ in now]:
        return False
    for (_, old), (_, new) in zip(before, now, strict=True):
        if len(old) != len(new):
            return False
        grown = [b - a for a, b in zip(old, new, strict=True) if a != b]
        if grown not in ([], [1]):
            return False
    return True


def _is_next(prompt: Signature, now: Signature) -> bool:
    """Is ``now`` given a single position of the sequences that ``prompt`` was given many of?"""
    rows = {shape[0] for _, shape in prompt if len(shape) > 1 and shape[1] > 1}
    return any(len(s) in (2, 3) and s[1] == 1 and s[0] in rows for _, s in now)


def signature_of(args: Any, kwargs: Any) -> Signature:
    return tuple((name, tuple(tensor.shape)) for name, tensor in _tensors(args, kwargs))


def integers_of(args: Any, kwargs: Any) -> list[str]:
    """Names of the tensors of integers that a call was given, as its signature has them."""
    return [name for name, tensor in _tensors(args, kwargs) if tensor.dtype in _INTEGERS]


def _tensors(args: Any, kwargs: Any) -> list[tuple[str, torch.Tensor]]:
    named = [
        *((str(place), argument) for place, argument in enumerate(args)),
        *sorted(kwargs.items()),
    ]
    return [(name, tensor) for name, tensor in named if isinstance(tensor, torch.Tensor)]


class CountedCalls:
    """Stands in for a model's forward call: gives what the first such call gave, and counts."""

    def __init__(
        self,
        module: torch.nn.Module,
        signature: Signature,
        count: Callable[[], None],
        over: Callable[[Signature], None],
    ) -> None:
        self._module, self._signature = module, signature
        self._count, self._over = count, over
        self._forward = module.forward
        self._held = vars(module).get("forward")
        self._found: list[Any] = []
        module.forward = self._call

    def _call(self, *args: Any, **kwargs: Any) -> Any:
        now = signature_of(args, kwargs)
        if not follows(self._signature, now):
            self._over(now)
            return self._forward(*args, **kwargs)
        self._signature = now
        self._count()
        if not self._found:
            self._found.append(self._forward(*args, **kwargs))
        return self._found[0]

    def remove(self) -> None:
        """The module is as it was."""
        if self._held is None:
            vars(self._module).pop("forward", None)
        else:
            self._module.forward = self._held
