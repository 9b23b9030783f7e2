"""Caches of keys and values of Transformers' models: what holds them, positions that they are given
at once, and a call with one whose sliding windows are full."""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Mapping
from typing import Any, Final

import torch

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
    pairs = list(held) if layers is None else [(each.keys, each.values) for each in layers]
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
