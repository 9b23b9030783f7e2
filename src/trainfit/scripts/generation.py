"""Follows the texts that a script generates: `generate()` of Transformers, which says how long they
get, and loops of the script's own, of which the calls are counted."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
from collections.abc import Callable
from types import ModuleType
from typing import Any, Final

import torch
from torch.nn.modules import module as nn_module

from trainfit.results.runs.generation import GeneratedText
from trainfit.simgpu.patching import ImportHook, PatchSet
from trainfit.simgpu.session import Simulation

#: Different texts of a script that are simulated: a short one may come first, to warm up.
_TEXTS: Final = 4
#: What of a cache's layer holds it, in the versions of Transformers.
_LAYER: Final = ("keys", "values", "conv_states", "recurrent_states")
_LISTS: Final = ("key_cache", "value_cache")
#: What a cache is called by what its layers' classes have in their names.
_CACHES: Final = {"Static": "static", "Sliding": "sliding window", "Quant": "quantized",
                  "Linear": "recurrent"}  # fmt: skip

_Signature = tuple[tuple[str, tuple[int, ...]], ...]


class GenerationWatch:
    """Tells which calls of models make a text, and how many are still to come.

    Args:
        simulation: where the caches are.
    """

    def __init__(self, simulation: Simulation) -> None:
        self._simulation = simulation
        self._imports: list[ImportHook] = []
        self._handles: list[Any] = []
        self._depth = self._inner = 0
        self._seen: set[tuple[Any, ...]] = set()
        self._kinds: set[str] = set()
        self._layers: set[int] = set()
        self._windows: dict[str, int] = {}
        self._loop = _Loop()
        self._counted: _Counted | None = None
        self._uneven = ""
        #: The text in the making, or the last one.
        self.text: GeneratedText | None = None
        self.is_repeated: Callable[[], None] = lambda: None
        """Called before a text that is like one before, or when there were many of them."""

    def install(self, patches: PatchSet) -> None:
        """Watch from now on, until ``patches`` is restored and :meth:`remove` is called."""

        def generating(module: ModuleType) -> None:
            for name, make in (
                ("generate", self._generating),
                ("_prepare_generated_length", self._length),
                ("_beam_search_has_unfinished_sequences", self._unfinished),
                ("_assisted_decoding", self._assisted),
            ):
                if hasattr(module.GenerationMixin, name):
                    patches.hook(module.GenerationMixin, name, make)

        def caching(module: ModuleType) -> None:
            for kind in vars(module).values():
                if (
                    isinstance(kind, type)
                    and "update" in vars(kind)
                    and hasattr(kind, "get_seq_length")
                    and kind.__name__.endswith("Cache")
                ):
                    patches.hook(kind, "update", self._updating)

        self._imports = [
            ImportHook("transformers.generation.utils", generating),
            ImportHook("transformers.cache_utils", caching),
        ]
        for each in self._imports:
            each.install()
        self._handles = [
            nn_module.register_module_forward_pre_hook(self._enter),
            nn_module.register_module_forward_hook(self._leave, with_kwargs=True, always_call=True),
        ]

    def remove(self) -> None:
        """Take the hooks away; the patches are their owner's to restore."""
        for hook in self._imports:
            hook.remove()
        for handle in self._handles:
            handle.remove()
        self._imports, self._handles = [], []
        if self._counted is not None:
            self._counted.remove()

    # -- what is asked of it -----------------------------------------------------------------

    @property
    def in_generate(self) -> bool:
        """Does ``generate()`` make a text now of which the length is known?"""
        return bool(self._depth and self.text is not None)

    @property
    def in_loop(self) -> bool:
        """Are the last calls of a loop that asks for one more token with each?"""
        return not self._depth and self._loop.is_text

    @property
    def is_counting(self) -> bool:
        """Are the calls of a loop counted, without being made?"""
        return self._counted is not None

    def called(self, steps: int) -> None:
        """A call of a model has ended, the step number ``steps`` (from 1)."""
        if self._depth:
            self._call_of_generate(steps)
        elif self._loop.called(steps):
            self.text = self._loop.text()

    def refuse(self, reason: str) -> None:
        """What is left of the text cannot be told from what was simulated."""
        if self.text is not None and self.text.calls_left:
            self.text = dataclasses.replace(self.text, reason=reason)

    @property
    def uneven(self) -> str:
        """Why calls of the present text differ by more than a length; empty: they do not."""
        return self._uneven

    def count_on(self, over: Callable[[], None]) -> bool:
        """From now on the model of the loop is not called, its calls are counted; ``over`` is
        called when it is given something else. Returns whether that can be done."""
        module = self._loop.module
        if module is None or self.text is None:
            return False
        self._counted = _Counted(module, self._loop.signature, self._add_call, over)
        return True

    def _add_call(self) -> None:
        if self.text is not None:
            self.text = dataclasses.replace(self.text, calls_left=self.text.calls_left + 1)

    # -- generate() ----------------------------------------------------------------------------

    def _generating(self, generate: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(generate)
        def wrapper(*args: Any, **kwargs: Any) -> Any:
            self._depth += 1
            try:
                return generate(*args, **kwargs)
            finally:
                self._depth -= 1

        return wrapper

    def _length(self, prepare: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(prepare)
        def wrapper(model: Any, *args: Any, **kwargs: Any) -> Any:
            config = prepare(model, *args, **kwargs)
            with contextlib.suppress(Exception):
                if self._depth == 1:
                    self._begin(model.config, config, kwargs)
            return config

        return wrapper

    def _begin(self, model: Any, config: Any, given: dict[str, Any]) -> None:
        prompt, inputs = int(given["input_ids_length"]), given.get("inputs_tensor")
        rows = int(inputs.shape[0]) if isinstance(inputs, torch.Tensor) else None
        beams = int(getattr(config, "num_beams", None) or 1)
        several = int(getattr(config, "num_return_sequences", None) or 1)
        new = max(1, int(config.max_length) - prompt)
        key = (id(model), rows, beams, several, prompt, new)
        if key in self._seen or len(self._seen) >= _TEXTS:
            self.is_repeated()
        self._seen.add(key)
        self._uneven = ""
        if getattr(config, "prefill_chunk_size", None):
            self._uneven = "the prompt is read in chunks"
        text = model.get_text_config()
        sequences = None if rows is None else rows * (several if beams == 1 else 1)
        self.text = GeneratedText(
            prefill=-1,
            decodes=0,
            calls_left=new,
            prompt=prompt,
            rows=None if rows is None else rows * max(beams, several),
            sequences=sequences,
            limit=getattr(text, "max_position_embeddings", None),
            by="generate()",
        )

    def _call_of_generate(self, steps: int) -> None:
        text = self.text
        if text is None or not text.calls_left:
            return
        changes: dict[str, Any] = {"calls_left": text.calls_left - 1, "cache": self._cache()}
        if self._windows:
            if len(set(self._windows.values())) > 1:
                self._uneven = "layers have sliding windows of different lengths"
            changes |= {
                "window": max(self._windows.values()),
                "in_window": tuple(sorted(self._windows)),
            }
        if text.prefill < 0:
            changes["prefill"] = steps - 1
        else:
            changes["decodes"] = text.decodes + 1
        self.text = dataclasses.replace(text, **changes)

    def _unfinished(self, ask: Callable[..., Any]) -> Callable[..., Any]:
        """Scores are not known here: beams go on to the length that was asked for."""

        @functools.wraps(ask)
        def wrapper(*args: Any, **kwargs: Any) -> Any:
            if not self.in_generate or self.text is None:
                return ask(*args, **kwargs)
            return self.text.calls_left > 0

        return wrapper

    def _assisted(self, decode: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(decode)
        def wrapper(*args: Any, **kwargs: Any) -> Any:
            self._uneven = "an assistant proposes tokens: how many a call accepts is not known"
            return decode(*args, **kwargs)

        return wrapper

    # -- caches ----------------------------------------------------------------------------------

    def _updating(self, update: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(update)
        def wrapper(cache: Any, *args: Any, **kwargs: Any) -> Any:
            found = update(cache, *args, **kwargs)
            with contextlib.suppress(Exception):
                index = kwargs["layer_idx"] if "layer_idx" in kwargs else args[2]
                self._mark(cache, int(index))
            return found

        return wrapper

    def _mark(self, cache: Any, index: int) -> None:
        layers = getattr(cache, "layers", None)
        if layers is not None:
            layer = layers[index]
            held = [getattr(layer, name, None) for name in _LAYER]
            self._kinds.update(_kinds_of(type(layer).__name__))
            self._note_window(layer)
        else:
            held = [getattr(cache, name)[index] for name in _LISTS if hasattr(cache, name)]
            self._kinds.update(_kinds_of(type(cache).__name__))
        if getattr(cache, "offloading", False) or "Offload" in type(cache).__name__:
            self._kinds.add("offloaded")
        for each in held:
            for tensor in each.values() if isinstance(each, dict) else (each,):
                self._simulation.mark_cache(tensor)

    def _note_window(self, layer: Any) -> None:
        """Its cache grows up to a window, if it has one."""
        window = getattr(layer, "sliding_window", None)
        if window and "Dynamic" in type(layer).__name__ and id(layer) not in self._layers:
            self._layers.add(id(layer))
            self._windows[self._simulation.module()] = int(window)

    def _cache(self) -> str:
        return ", ".join(sorted(self._kinds))

    # -- calls of models ---------------------------------------------------------------------------

    def _enter(self, module: torch.nn.Module, _: Any) -> None:
        self._inner += 1

    def _leave(self, module: torch.nn.Module, args: Any, kwargs: Any, _: Any) -> None:
        self._inner = max(0, self._inner - 1)
        if not self._inner and not self._depth:
            with contextlib.suppress(Exception):
                self._loop.given(module, _signature(args, kwargs))


def _kinds_of(name: str) -> set[str]:
    return {text for part, text in _CACHES.items() if part in name} or {"dynamic"}


class _Loop:
    """A loop of the script's own: calls of one model, each of them given as much as the one before
    or one position more."""

    def __init__(self) -> None:
        self.module: torch.nn.Module | None = None
        self.signature: _Signature = ()
        self.decodes = 0
        self._prefill = 0
        self.is_text = self._follows = self._grows = False

    def given(self, module: torch.nn.Module, signature: _Signature) -> None:
        """An outermost module was called with tensors of these shapes."""
        self._follows = module is self.module and follows(self.signature, signature)
        self._grows = self._follows and signature != self.signature
        self.module, self.signature = module, signature

    def called(self, steps: int) -> bool:
        """That call was step ``steps`` (from 1); is it one for a further token?"""
        if self._follows:
            self.decodes += 1
            self.is_text = self.is_text or self._grows
        else:
            # The call before was for the prompt, if this one is for a single position.
            self.is_text = steps > 1 and _has_one_position(self.signature)
            self.decodes = int(self.is_text)
            self._prefill = steps - 1 - self.decodes
        return self.is_text

    def text(self) -> GeneratedText:
        """What was seen of it."""
        return GeneratedText(self._prefill, self.decodes, by="the script's loop")


def follows(before: _Signature, now: _Signature) -> bool:
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


def _has_one_position(signature: _Signature) -> bool:
    return any(len(shape) > 1 and shape[1] == 1 for _, shape in signature)


def _signature(args: Any, kwargs: Any) -> _Signature:
    named = [*((str(place), each) for place, each in enumerate(args)), *sorted(kwargs.items())]
    return tuple(
        (name, tuple(each.shape)) for name, each in named if isinstance(each, torch.Tensor)
    )


class _Counted:
    """Stands in for a model's forward call: gives what the first such call gave, and counts."""

    def __init__(
        self,
        module: torch.nn.Module,
        signature: _Signature,
        count: Callable[[], None],
        over: Callable[[], None],
    ) -> None:
        self._module, self._signature = module, signature
        self._count, self._over = count, over
        self._forward = module.forward
        self._held = vars(module).get("forward")
        self._found: list[Any] = []
        module.forward = self._call

    def _call(self, *args: Any, **kwargs: Any) -> Any:
        now = _signature(args, kwargs)
        if not follows(self._signature, now):
            self._over()
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
