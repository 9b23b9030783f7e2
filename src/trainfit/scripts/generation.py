"""Follows the texts that a script generates: `generate()` of Transformers, which says how long they
get, and loops of the script's own, of which the calls are counted."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import json
import weakref
from collections.abc import Callable
from types import ModuleType
from typing import Any, Final

import torch

from trainfit.results.files.decoding import as_json
from trainfit.results.runs.continuation import DecodeLaw, is_enough
from trainfit.results.runs.generation import GeneratedText
from trainfit.results.runs.recording import FullWindowCall, Recording
from trainfit.results.runs.trace import Status
from trainfit.scripts.caches import (
    LAYER,
    NAMES,
    CountedCalls,
    DecodeLoop,
    Signature,
    WindowProbe,
    cache_among,
    fill,
    held_by,
    integers_of,
    kinds_of,
    parts_of,
    signature_of,
)
from trainfit.scripts.samples.context_length import positions_of
from trainfit.simgpu.patching import PatchSet
from trainfit.simgpu.session import Simulation

#: Texts of a script that are looked at.
_TEXTS: Final = 64
#: Calls of the model for which an assistant proposes tokens, that are simulated.
_ASSISTED: Final = 3
#: Calls for further tokens of a text that a script makes before it trains or while it does, that
#: are simulated: what grows shows in the last two.
_OF_TRAINING: Final = 2
#: Calls of a loop after which it is known whether they are a text's: their cache may be as large
#: from the first one on. The longer, where Transformers' cache or the tokens that the model is
#: given say that they are.
_FEW, _OF_CACHE = 17, 49
#: Methods of a cache that are given a layer's states, and which argument says whose.
_UPDATES: Final = {"update": 2, "update_conv_state": 1, "update_recurrent_state": 1,
                   "update_indexer": 1}  # fmt: skip
#: Methods of a cache that replace what all of its layers hold.
_CHANGES: Final = ("reorder_cache", "batch_repeat_interleave", "batch_select_indices")
#: When a loop is left that has not come to its end by itself.
_LATE: Final = "after half of the time limit: at least"
#: What is said of a loop that went on when no more calls were simulated.
_CUT: Final = ", which had not ended when the simulation did: at least"
#: What is not looked at of a script that makes texts by loops of its own.
_FIRST: Final = ", one of several texts: later ones were not looked at"
_QUANTIZED: Final = "a quantized cache quantizes all of it once more each time its rest is full"
_BY_ASSISTANT: Final = ", an assistant proposing tokens"
#: What ends a text whose length only GPU data tells.
_BY_DATA: Final = "the model's positions, as the script asks for a length that GPU data tells"


class GenerationWatch:
    """Tells which calls of models make a text, and how many are still to come.

    Args:
        simulation: where the caches are.
    """

    def __init__(self, simulation: Simulation) -> None:
        self._simulation = simulation
        self._depth = self._inner = self._called = 0
        #: The newest allocation that the call of a model is given.
        self._given = -1
        self._seen: set[tuple[Any, ...]] = set()
        self._looked = self._alike = self._beams_left = 0
        #: Does the text in the making end now, as what is left of it is known?
        self._ends = self._is_assisted = False
        #: The text that ``frozen`` is continued to the end of, and the assistant's cache.
        self._kept: GeneratedText | None = None
        self._drafts: Any = None
        #: The cache that was updated last, and the one that a text that is cut short leaves behind.
        self._updated: Callable[[], Any] = lambda: None
        self._left: Any = None
        self._kinds: set[str] = set()
        self._layers: set[int] = set()
        self._windows: dict[str, int] = {}
        self._loop = DecodeLoop()
        self._probe = WindowProbe(simulation)
        self._full_window: FullWindowCall | None = None
        self._counted: CountedCalls | None = None
        self._uneven = ""
        self._earlier: list[GeneratedText] = []
        #: Operators when each call of the text in the making had ended.
        self._bounds: list[int] = []
        #: Calls of texts within a training's steps that stand for further ones, as
        #: :class:`~trainfit.results.runs.recording.RepeatedCall` has them.
        self.repeated: list[list[int]] = []
        #: The text in the making, or the last one.
        self.text: GeneratedText | None = None
        #: The recording as it was when the longest text's calls were no longer made.
        self.frozen: Recording | None = None
        self.over: Callable[[], None] = lambda: None
        """Called when a loop is over whose calls were counted."""
        self.is_repeated: Callable[[], None] = lambda: None
        """Called before a text that is like those before, or when there were many of them."""

    def install(self, patches: PatchSet) -> None:
        """Watch from now on, until ``patches`` is restored and :meth:`remove` is called."""

        def generating(module: ModuleType) -> None:
            for name, make in (
                ("generate", self._generating),
                ("_prepare_generated_length", self._length),
                ("_has_unfinished_sequences", self._unfinished),
                ("_beam_search_has_unfinished_sequences", self._unfinished_beams),
                ("_assisted_decoding", self._assisted),
            ):
                if hasattr(module.GenerationMixin, name):
                    patches.hook(module.GenerationMixin, name, make)

        def caching(module: ModuleType) -> None:
            for kind in vars(module).values():
                is_layer = isinstance(kind, type) and "Layer" in kind.__name__
                if is_layer and "offload" in vars(kind):
                    patches.hook(kind, "offload", self._offloading)
                if (
                    isinstance(kind, type)
                    and "update" in vars(kind)
                    and hasattr(kind, "get_seq_length")
                    and kind.__name__.endswith("Cache")
                ):
                    for name, update in _UPDATES.items():
                        if name in vars(kind):
                            patches.hook(kind, name, functools.partial(self._updating, at=update))
                    for name in _CHANGES:
                        if name in vars(kind):
                            patches.hook(kind, name, self._changing)

        patches.hook(torch.nn.functional, "scaled_dot_product_attention", self._attending)
        patches.when_imported("transformers.generation.utils", generating)
        patches.when_imported("transformers.cache_utils", caching)
        patches.see_calls(self._enter, self._leave, with_kwargs=True)
        patches.on_restore(self._count_no_more)

    def _count_no_more(self) -> None:
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
    def begins(self) -> bool:
        """Is it a loop of so few calls so far that they may be a text's?"""
        most = _OF_CACHE if self._kinds or self._loop.is_of_tokens else _FEW
        return self.in_loop and self.frozen is None and self._loop.decodes <= most

    @property
    def is_counting(self) -> bool:
        """Are the calls of a loop counted, without being made?"""
        return self._counted is not None

    def called(self, steps: int) -> None:
        """A call of a model has ended, the step number ``steps`` (from 1)."""
        if self._probe.is_calling:
            return
        if self._depth:
            self._call_of_generate(steps)
        elif self._loop.called(steps) and not self._loop.is_too_short:
            limit = positions_of(getattr(self._loop.module, "config", None))
            text = dataclasses.replace(self._loop.text(), limit=limit, **self._of_cache())
            if self.text is not None and self.text.prefill != text.prefill:
                self._earlier.append(self.text)
            self.text = text

    def fed(self) -> None:
        """A DataLoader has given a batch: no call that follows is for one more token."""
        self._loop.forget()

    def look(self, snapshot: Callable[[], Recording | None]) -> None:
        """Leave the calls of a text that follow from those seen.

        ``generate()`` ends then, with as many tokens as it was to make, and the script goes on to
        its next text: the longest is kept. Those of a loop of the script's own are counted before
        they are known: its model is not called any more, and ``over`` is called when it is given
        something else.
        """
        text = self.text
        if text is None or self._ends:
            return
        if self.in_generate and self._kept is not None and not text.calls_left:
            self._keep(snapshot(), text)
        if self._is_assisted and self.in_generate:
            self._ends = self._depth == 1 and text.decodes >= _ASSISTED
            return
        if self._uneven or not is_enough(text.decodes):
            return
        if not (self.in_loop or text.calls_left > 1):
            return
        recording = snapshot()
        law = None if recording is None else DecodeLaw.of(recording, text)
        if law is None:
            return
        known = self.in_generate or self._kinds or self._loop.is_of_tokens
        if not known and not law.changes:
            return
        if self.in_generate:
            self._keep(recording, text)
            self._ends = True
            if text.window is not None:
                self._left = self._updated()
            return
        module = self._loop.module
        if module is not None and self.in_loop:
            self.frozen, self._kept = recording, None
            rounds = self._simulation.engine.rounds
            rounds.most = max(rounds.most, text.limit or 0)
            self._counted = CountedCalls(
                module, self._loop.signature, self._add_call, self._loop_over
            )

    def shorten(self) -> None:
        """A call of a model has ended, in a run that counts other steps: after a few of
        ``generate()`` its text ends, and its cache is given all of its positions."""
        text = self.text
        if self._depth != 1 or text is None or self._ends:
            return
        self._call_of_generate(1)
        self._bounds.append(self._simulation.operators)
        text = self.text or text
        if text.decodes < _OF_TRAINING or not text.calls_left:
            return
        self._ends, self._left = True, self._updated()
        if not self._is_assisted:  # of which nobody knows how many tokens a call gives
            self.repeated.append([*self._bounds[-3:], text.calls_left])
        self._simulation.engine.assume(
            f"of a text of {text.new_tokens} tokens, made before the training or by it, "
            f"{1 + _OF_TRAINING} calls of the model are simulated, its whole cache"
            + ("" if self._is_assisted else ", and the time of all")
        )

    def _keep(self, recording: Recording | None, text: GeneratedText) -> None:
        if recording is None or (self._kept is not None and _extent(text) <= _extent(self._kept)):
            return
        self.frozen, self._kept = recording, text

    def described(self, recording: Recording, status: Status) -> Recording:
        """``recording``, whose header says what text its calls make; ``status`` is what became of
        the script."""
        text = self._kept or self.text
        if text is None:
            return recording
        if status != "ended" and self.in_loop and self.frozen is None:
            text = dataclasses.replace(text, by=f"{text.by}{_CUT}")
        if not text.calls_left:
            text = max((*self._earlier, text), key=_extent)
        if text.calls_left and not self.is_counting:
            reason = "" if self._is_assisted else self._uneven
            if not self._is_assisted and not reason and DecodeLaw.of(recording, text) is None:
                reason = "its calls follow no law, and were not simulated to its end"
            text = dataclasses.replace(text, reason=reason)
        if self._kept is not None and len(self._seen) > 1:
            text = dataclasses.replace(
                text, by=f"{text.by}, the longest of {len(self._seen)} lengths"
            )
        told: Any = {"generation": json.loads(as_json(text)), "full_window": self._full_window}
        return dataclasses.replace(recording, header={**recording.header, **told})

    @property
    def texts(self) -> list[GeneratedText]:
        """The generated texts that were seen, the last one included."""
        every = (*self._earlier, self._kept, self.text)
        return [text for text in every if text is not None]

    @property
    def is_full(self) -> bool:
        """Has a loop whose calls are counted come to the end of the model's positions?"""
        text = self.text
        return bool(text and text.limit and text.positions and text.positions >= text.limit)

    def cut_short(self) -> None:
        """The loop whose calls are counted has not ended where the model's positions do, or by the
        time that there was for it."""
        if self.text is not None:
            by = "the script's loop, which had not ended "
            by += "at the model's last position" if self.is_full else _LATE
            self.text = dataclasses.replace(self.text, by=by)

    def _loop_over(self, given: Signature) -> None:
        """The model that is no longer called is given something else."""
        if self.text is not None and given != self._loop.prompt:
            self.text = dataclasses.replace(self.text, by=f"{self.text.by}{_FIRST}")
        self.over()

    def _add_call(self) -> None:
        if self.text is not None:
            self.text = dataclasses.replace(self.text, calls_left=self.text.calls_left + 1)

    # -- generate() ----------------------------------------------------------------------------

    def _generating(self, generate: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(generate)
        def wrapper(*args: Any, **kwargs: Any) -> Any:
            self._depth += 1
            try:
                found = generate(*args, **kwargs)
                with contextlib.suppress(Exception):
                    cache = cache_among(getattr(found, "__dict__", {}))
                    if self._depth > 1:
                        self._drafts = cache
                    elif self._ends and self.text is not None:
                        cache = cache_among(kwargs) or cache or self._left
                        self._continue(cache)
                        found = _to_length(found, self.text)
                        self._see_full_windows(cache)
                return found
            finally:
                self._depth -= 1
                if not self._depth:
                    self._ends, self._drafts, self._left = False, None, None

        return wrapper

    def _continue(self, cache: Any) -> None:
        """Caches that are still held have all of the text, but for its last token."""
        assert self.text is not None
        for each in (cache, self._drafts):
            if each is not None and self.text.positions:
                fill(each, self.text.positions - 1)

    def _see_full_windows(self, cache: Any) -> None:
        """Its masks cost time that calls before had not."""
        text = self.text
        if self.frozen is None or text is None or not (text.window and text.positions):
            return
        if self._kept is text and text.positions > text.window:
            name = NAMES[0] if self._probe.takes(NAMES[0]) else NAMES[1]
            self._full_window = self._probe.call(name, cache, text.positions)

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
        limit = positions_of(model)
        new, by = max(1, int(config.max_length) - prompt), "generate()"
        if new == 1 and limit and self._simulation.engine.assumed_number:
            # That is what a number of GPU data is assumed to be.
            config.max_length, by = max(limit, prompt + 1), _BY_DATA
            new = config.max_length - prompt
        key = (id(model), rows, beams, several, prompt, new)
        self._looked += 1
        self._alike = self._alike + 1 if key in self._seen else 0
        self._seen.add(key)
        if self._alike >= len(self._seen) or self._looked > _TEXTS:
            self.is_repeated()
        self._uneven, self._is_assisted, self._bounds = "", False, []
        if getattr(config, "prefill_chunk_size", None):
            self._uneven = "the prompt is read in chunks"
        if self.text is not None:
            self._earlier.append(self.text)
        self._beams_left = new
        sequences = None if rows is None else rows * (several if beams == 1 else 1)
        self.text = GeneratedText(
            prefill=-1,
            decodes=0,
            calls_left=new,
            prompt=prompt,
            rows=None if rows is None else rows * max(beams, several),
            sequences=sequences,
            limit=limit,
            by=by,
        )
        # No longer than one that is known: a call tells that it can be made.
        self._ends = self._kept is not None and _extent(self.text) <= _extent(self._kept)

    def _call_of_generate(self, steps: int) -> None:
        text = self.text
        if text is None or not text.calls_left or self._depth > 1:
            return
        changes = {"calls_left": text.calls_left - 1, **self._of_cache()}
        if text.prefill < 0:
            changes["prefill"] = steps - 1
        else:
            changes["decodes"] = text.decodes + 1
            if self._is_assisted:
                changes["round"] = (self._called, steps)
        self._called = steps
        self.text = dataclasses.replace(text, **changes)

    def _unfinished(self, ask: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(ask)
        def wrapper(*args: Any, **kwargs: Any) -> Any:
            return False if self._ends and self._depth == 1 else ask(*args, **kwargs)

        return wrapper

    def _unfinished_beams(self, ask: Callable[..., Any]) -> Callable[..., Any]:
        """Scores are not known here: beams go on to the length that was asked for."""

        @functools.wraps(ask)
        def wrapper(*args: Any, **kwargs: Any) -> Any:
            if not self.in_generate:
                return ask(*args, **kwargs)
            self._beams_left -= 1
            return self._beams_left > 0 and not self._ends

        return wrapper

    def _assisted(self, decode: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(decode)
        def wrapper(*args: Any, **kwargs: Any) -> Any:
            if self._depth == 1 and self.text is not None:
                self._is_assisted = True
                self.text = dataclasses.replace(self.text, by=f"{self.text.by}{_BY_ASSISTANT}")
            found = decode(*args, **kwargs)
            with contextlib.suppress(Exception):
                if self._depth == 1 and self._ends:
                    self._continue(cache_among(kwargs))
            return found

        return wrapper

    # -- caches ----------------------------------------------------------------------------------

    def _attending(self, attend: Callable[..., Any]) -> Callable[..., Any]:
        """Keys and values that were there before the call for one more token, of a loop of the
        script's own, are a cache that was made ahead."""

        @functools.wraps(attend)
        def wrapper(*args: Any, **kwargs: Any) -> Any:
            if self.in_loop:
                with contextlib.suppress(Exception):
                    for argument in (*args[1:3], kwargs.get("key"), kwargs.get("value")):
                        if 0 <= self._number(argument) < self._given:
                            self._simulation.mark_cache(argument)
            return attend(*args, **kwargs)

        return wrapper

    def _updating(self, update: Callable[..., Any], at: int = 2) -> Callable[..., Any]:
        @functools.wraps(update)
        def wrapper(cache: Any, *args: Any, **kwargs: Any) -> Any:
            found = update(cache, *args, **kwargs)
            with contextlib.suppress(Exception):
                self._updated = weakref.ref(cache)
                index = kwargs["layer_idx"] if "layer_idx" in kwargs else args[at]
                self._mark(cache, int(index), found)
            return found

        return wrapper

    def _offloading(self, offload: Callable[..., Any]) -> Callable[..., Any]:
        """What goes to the host is known to be cache before it does: it needs no values there."""

        @functools.wraps(offload)
        def wrapper(layer: Any, *args: Any, **kwargs: Any) -> Any:
            with contextlib.suppress(Exception):
                for tensor in parts_of([getattr(layer, name, None) for name in LAYER]):
                    self._simulation.mark_cache(tensor)
            return offload(layer, *args, **kwargs)

        return wrapper

    def _changing(self, change: Callable[..., Any]) -> Callable[..., Any]:
        """All layers hold other tensors then: beams that go on have what others had."""

        @functools.wraps(change)
        def wrapper(cache: Any, *args: Any, **kwargs: Any) -> Any:
            found = change(cache, *args, **kwargs)
            with contextlib.suppress(Exception):
                for index in range(len(cache.layers)):
                    self._mark(cache, index)
            return found

        return wrapper

    def _mark(self, cache: Any, index: int, given: Any = ()) -> None:
        """``given`` is what an update of that layer gave: an offloaded layer's goes to the host,
        while the GPU has the layer that comes next."""
        layers = getattr(cache, "layers", None)
        if layers is not None:
            layer = layers[index]
            self._kinds.update(kinds_of(type(layer).__name__))
            self._note_window(layer)
        else:
            self._kinds.update(kinds_of(type(cache).__name__))
        held = held_by(cache, index)
        if getattr(cache, "offloading", False) or "Offload" in type(cache).__name__:
            self._kinds.add("offloaded")
            held = [given, *(held_by(cache, number) for number in range(len(cache)))]
        for tensor in parts_of(held):
            self._simulation.mark_cache(tensor)

    def _note_window(self, layer: Any) -> None:
        """Note the window up to which a layer's cache grows, if it has one."""
        window = getattr(layer, "sliding_window", None)
        if window and "Dynamic" in type(layer).__name__ and id(layer) not in self._layers:
            self._layers.add(id(layer))
            self._windows[self._simulation.module()] = int(window)

    def _of_cache(self) -> dict[str, Any]:
        """What is known of the cache, as fields of the text."""
        found: dict[str, Any] = {"cache": ", ".join(sorted(self._kinds))}
        if "quantized" in self._kinds:
            self._uneven = _QUANTIZED
        if self._windows:
            if len(set(self._windows.values())) > 1:
                self._uneven = "layers have sliding windows of different lengths"
            found["window"] = max(self._windows.values())
            found["in_window"] = tuple(sorted(self._windows))
        return found

    # -- calls of models ---------------------------------------------------------------------------

    def _enter(self, module: torch.nn.Module, args: Any) -> None:
        if not self._inner and not self._depth:
            with contextlib.suppress(Exception):
                self._given = max(map(self._number, args), default=-1)
        if not self._inner and self._depth == 1:
            self._probe.enter()
        self._inner += 1

    def _number(self, tensor: Any) -> int:
        """The number of a tensor's allocation; -1 if it has none."""
        allocation = None
        if isinstance(tensor, torch.Tensor):
            allocation = self._simulation.allocation_of(tensor)
        return -1 if allocation is None else allocation

    def _leave(self, module: torch.nn.Module, args: Any, kwargs: Any, _: Any = None) -> None:
        """PyTorch gives a hook of all modules no ``kwargs`` where the call failed: ``None`` is in
        its place."""
        self._inner = max(0, self._inner - 1)
        if kwargs and not self._inner and self._depth == 1 and not self._probe.is_calling:
            with contextlib.suppress(Exception):
                self._probe.leave(module, kwargs)
        if kwargs is not None and not self._inner and not self._depth:
            with contextlib.suppress(Exception):
                given = args, kwargs
                self._loop.given(module, signature_of(*given), integers_of(*given))


def _to_length(tensor: Any, text: GeneratedText) -> Any:
    """What ``generate()`` gives, with as many tokens as it was to make."""
    tokens = tensor if isinstance(tensor, torch.Tensor) else tensor.sequences
    more = (text.positions or 0) - tokens.shape[-1]
    if more > 0:
        tokens = torch.cat([tokens, tokens.new_zeros((*tokens.shape[:-1], more))], -1)
    if isinstance(tensor, torch.Tensor):
        return tokens
    tensor.sequences = tokens
    return tensor


def _extent(text: GeneratedText) -> int:
    """Positions of all its sequences."""
    return (text.positions or text.new_tokens) * (text.rows or 1)
