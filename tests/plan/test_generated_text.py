"""Text that Transformers' `generate()` makes: simulated from its first tokens to its end."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import importlib.util
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch

from helpers_cli import trainfit
from trainfit import simulate
from trainfit.hardware import find_gpu
from trainfit.memory.replay import Stream, replay
from trainfit.plan.command.parsing import parse_command
from trainfit.plan.runs.tracing import Trace, Tracer
from trainfit.plan.sizing.costing import machine_of
from trainfit.plan.sizing.generation import OtherLengths, decode_seconds, generation
from trainfit.plan.sizing.memory_model import MemoryModel
from trainfit.report.lengths import generation_sections
from trainfit.results.runs.generation import GeneratedText, generated_text
from trainfit.results.runs.recording import KINDS
from trainfit.results.runs.spec import RunSpec
from trainfit.results.runs.trace import Status
from trainfit.scripts.caches import DecodeLoop, fill, parts_of
from trainfit.scripts.generation import GenerationWatch, _to_length
from trainfit.simgpu.allocator.settings import AllocatorSettings
from trainfit.simgpu.patching import PatchSet
from trainfit.simgpu.session import Simulation

pytestmark = [
    pytest.mark.usefixtures("warm"),
    # The scripts import it, and no test: that takes a second.
    pytest.mark.skipif(
        importlib.util.find_spec("transformers") is None, reason="the package transformers"
    ),
]

SCRIPT = Path(__file__).parents[1] / "training_scripts" / "transformers_generate.py"
PROMPT, SEQUENCES, TOKEN_BYTES = 20, 4, 2 * 2 * 256


@functools.cache
def traced(*options: str, steps: int | None = None) -> Trace:
    words = ["python", str(SCRIPT), *options]
    with Tracer(parse_command(words), find_gpu("RTX 4090"), steps=steps) as tracer:
        return tracer.trace(RunSpec(count="calls"))


def text_of(trace: Trace) -> GeneratedText:
    text = generated_text(trace.recording) if trace.recording is not None else None
    assert text is not None, trace.output
    return text


def peaks(trace: Trace) -> tuple[int, int, tuple[int, int]]:
    assert trace.recording is not None
    outcome = replay(Stream.of(trace.recording))
    return outcome.peak_allocated, outcome.peak_reserved, outcome.step_peaks[-1]


def test_its_length_is_that_of_the_configuration() -> None:
    short, full = traced("--tokens=40"), traced("--tokens=40", steps=40)
    text = text_of(short)
    assert (text.prompt, text.rows, text.new_tokens) == (PROMPT, SEQUENCES, 40)
    assert (text.cache, text.limit, text.by) == ("dynamic", 4096, "generate()")
    assert short.outcome.steps <= 26 and text_of(full).calls_left == 0
    assert peaks(short) == peaks(full)


def test_an_assistant_has_the_time_of_a_round_and_two_rates() -> None:
    """Its calls and the one that checks what they propose; how many are accepted, data tells."""
    trace = traced("--tokens=60", "--batch_size=1", "--assistant=5")
    text, recording = text_of(trace), trace.recording
    assert recording is not None and text.round is not None and "an assistant" in text.by
    assert text.round[1] - text.round[0] == 5 + 1
    machine = machine_of(find_gpu("RTX 4090"))
    found = generation(
        recording, machine, MemoryModel(machine.gpu, AllocatorSettings(), 0.0, ()), 1
    )
    assert found is not None and found.round_s is not None and found.proposed == 5
    alone = traced("--tokens=60", "--batch_size=1").recording
    assert alone is not None
    one = decode_seconds(alone, text_of(traced("--tokens=60", "--batch_size=1")), machine)[0]
    assert 4 * one < found.round_s < 9 * one  # both models are the same
    (section,) = generation_sections(found)
    said = str(section)
    assert "for 5 proposed tokens and their check" in said
    assert "where no proposal is accepted" in said
    by_prompt = dataclasses.replace(found, proposed=0)  # no model proposes
    assert "a call, which gives one token at least" in str(generation_sections(by_prompt))


def test_calls_with_full_windows_need_the_time_of_their_masks() -> None:
    """A window of 50 is full from the 30th token on: calls make a mask then, of which the 17
    that are simulated tell nothing."""
    words = ("--tokens=60", "--window=50")
    machine, seconds = machine_of(find_gpu("RTX 4090")), []
    for trace in traced(*words), traced(*words, steps=60):
        text, recording = text_of(trace), trace.recording
        assert recording is not None
        calls = decode_seconds(recording, text, machine)
        seconds.append((calls[10], calls[-1]))
    assert seconds[0] == pytest.approx(seconds[1], rel=5e-3)
    assert seconds[0][1] > 1.03 * seconds[0][0]


def test_its_cache_is_a_kind_of_memory_of_its_own() -> None:
    recording = traced("--tokens=40").recording
    assert recording is not None
    cache = recording.alloc_bytes[recording.alloc_kind == KINDS.index("kv_cache")]
    # Keys and values of the last call are half of that each.
    assert int(cache[-1]) == SEQUENCES * (PROMPT + 39) * TOKEN_BYTES // 2


def test_what_a_beam_search_makes_of_its_cache_is_cache() -> None:
    """Most of a beam search's memory counted as temporaries: its cache, once it was reordered."""
    with simulate("custom:8GiB") as simulation:
        states = [torch.empty(2, 1 << 20, device="cuda") for _ in range(4)]
        layers = [SimpleNamespace(keys=states[0], values=states[1]),
                  SimpleNamespace(keys=states[2], values=states[3])]  # fmt: skip
        del states

        def reorder(cache: Any, beams: torch.Tensor) -> None:
            for layer in cache.layers:
                layer.keys, layer.values = layer.keys[beams], layer.values[beams]

        change = GenerationWatch(simulation)._changing(reorder)
        beams = torch.zeros(2, dtype=torch.long, device="cuda")
        change(SimpleNamespace(layers=layers), beams)
        other = layers[0].keys[beams]  # not in the cache
        recording = simulation.recording
    del other
    large = recording.alloc_bytes == 8 << 20
    kinds = [KINDS[kind] for kind in recording.alloc_kind[large].tolist()]
    assert kinds[4:8] == ["kv_cache"] * 4 and kinds[8] != "kv_cache"


def kinds_of_updates(*, offloading: bool) -> list[str]:
    """Of what two layers of a cache hold on the GPU, in the order of its allocation."""

    class Cache:
        def __init__(self) -> None:
            keys = (torch.empty(1 << 20) for _ in range(2))
            self.layers = [SimpleNamespace(keys=each, values=None) for each in keys]
            self.offloading = offloading

        def __len__(self) -> int:
            return len(self.layers)

        def update(self, added: torch.Tensor, _: None, index: int) -> tuple[torch.Tensor]:
            """As Transformers' (5.24): the next layer's comes, this one's goes."""
            if self.offloading:
                following = self.layers[(index + 1) % 2]
                following.keys = following.keys.to("cuda")
            layer = self.layers[index]
            held = layer.keys = added + layer.keys.to("cuda")
            if self.offloading:
                layer.keys = held.cpu()
            return (held,)

    with simulate("custom:8GiB") as simulation:
        cache = Cache()
        update = GenerationWatch(simulation)._updating(Cache.update)
        added = torch.zeros(1 << 20, device="cuda")
        for index in range(2):
            update(cache, added, None, index)
        recording = simulation.recording
    large = recording.alloc_bytes == 4 << 20
    return [KINDS[kind] for kind in recording.alloc_kind[large].tolist()]


@contextlib.contextmanager
def watching(
    simulation: Simulation, monkeypatch: pytest.MonkeyPatch, kind: type
) -> Iterator[GenerationWatch]:
    """Transformers' module of caches has this class, and what generates is watched."""
    module = ModuleType("transformers.cache_utils")
    setattr(module, kind.__name__, kind)
    monkeypatch.setitem(sys.modules, module.__name__, module)
    watch, patches = GenerationWatch(simulation), PatchSet()
    watch.install(patches)
    try:
        yield watch
    finally:
        patches.restore()


class OffloadedLayer:
    """As a layer of Transformers' caches."""

    def __init__(self, keys: torch.Tensor) -> None:
        self.keys = keys

    def offload(self) -> None:
        self.keys = self.keys.to("cpu", non_blocking=True)


def test_an_offloaded_layer_needs_no_values_on_the_host(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each token filled the whole cache with ones, once more: most of the time of a simulation."""
    with simulate("custom:8GiB") as simulation:
        with watching(simulation, monkeypatch, OffloadedLayer):
            layer, other = (OffloadedLayer(torch.randn(1 << 19, device="cuda")) for _ in range(2))
            layer.offload()
        other.offload()  # what nobody knows to be cache has values
    assert layer.keys.device.type == "cpu"
    assert not layer.keys.any() and other.keys.all()


def test_an_offloaded_cache_is_cache_while_it_is_on_the_gpu() -> None:
    """Layers that came back for their call counted as inputs, and what a call added as results."""
    added, *held = kinds_of_updates(offloading=True)
    assert added != "kv_cache" and held.count("kv_cache") == 4 and len(held) == 5
    stays = kinds_of_updates(offloading=False)
    assert stays.count("kv_cache") == 2 and len(stays) == 5  # … and the copies from the host


class LinearAttentionLayer:
    def __init__(self) -> None:
        self.conv_states: dict[int, torch.Tensor] = {}
        self.recurrent_states: dict[int, torch.Tensor] = {}


class StatesCache:
    """As Transformers' of a model with layers that have a state instead of keys and values."""

    def __init__(self) -> None:
        self.layers = [LinearAttentionLayer() for _ in range(2)]

    def get_seq_length(self) -> int:
        return 0

    def update(self, keys: torch.Tensor, values: torch.Tensor, layer_idx: int) -> None:
        raise NotImplementedError

    def update_conv_state(self, states: torch.Tensor, layer_idx: int, state_idx: int = 0) -> Any:
        return self.layers[layer_idx].conv_states.setdefault(state_idx, states.clone())

    def update_recurrent_state(self, states: torch.Tensor, layer_idx: int) -> torch.Tensor:
        return self.layers[layer_idx].recurrent_states.setdefault(0, states.clone())


def test_the_states_of_recurrent_layers_are_cache(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a hybrid model (Bamba, Jamba, Qwen3-Next) only the layers with attention counted."""
    with (
        simulate("custom:8GiB") as simulation,
        watching(simulation, monkeypatch, StatesCache) as watch,
    ):
        cache, states = StatesCache(), torch.empty(1 << 20, device="cuda")
        cache.update_conv_state(states, 1)
        cache.update_recurrent_state(states, layer_idx=0)
        kept = states.clone()  # in no cache
        recording = simulation.recording
    del kept
    large = recording.alloc_bytes == 4 << 20
    kinds = [KINDS[kind] for kind in recording.alloc_kind[large].tolist()]
    assert [kind == "kv_cache" for kind in kinds] == [False, True, True, False]
    assert watch._of_cache()["cache"] == "recurrent"


def test_a_length_that_gpu_data_tells_is_the_models() -> None:
    model = SimpleNamespace(max_position_embeddings=512)
    for assumed, length in ((False, 101), (True, 512)):
        simulation: Any = SimpleNamespace(engine=SimpleNamespace(assumed_number=assumed))
        watch, config = GenerationWatch(simulation), SimpleNamespace(max_length=101)
        watch._begin(model, config, {"input_ids_length": 100})
        assert watch.text is not None and config.max_length == length
        assert (watch.text.calls_left, "GPU data" in watch.text.by) == (length - 100, assumed)


def test_the_longest_of_several_texts_is_kept() -> None:
    simulation: Any = SimpleNamespace(engine=SimpleNamespace(assumed_number=False))
    watch, model, repeated = GenerationWatch(simulation), SimpleNamespace(), []
    watch.is_repeated = lambda: repeated.append(watch.text)
    recordings: list[Any] = [SimpleNamespace(), SimpleNamespace()]
    for length, taken in ((100, 0), (60, None), (300, 1), (100, None)):
        watch._begin(model, SimpleNamespace(max_length=length + 20), {"input_ids_length": length})
        # A shorter text than one that is known ends with its first call.
        assert watch.text is not None and watch._ends is (taken is None)
        if taken is not None:
            watch._keep(recordings[taken], watch.text)
    assert watch.frozen is recordings[1] and not repeated
    for _ in range(2):
        watch._begin(model, SimpleNamespace(max_length=80), {"input_ids_length": 60})
    assert len(repeated) == 1  # as many in a row were like ones before as there are different ones


def test_what_is_left_of_a_text_is_in_its_tokens_and_its_cache() -> None:
    text = GeneratedText(0, 17, 100, prompt=20, by="a test")
    assert _to_length(torch.ones(3, 38), text).shape == (3, 138)
    assert _to_length(SimpleNamespace(sequences=torch.ones(3, 38)), text).sequences.shape[1] == 138
    layer = SimpleNamespace(keys=torch.ones(3, 2, 37, 4), values=torch.ones(3, 2, 37, 4))
    given: list[tuple[int, ...]] = []
    cache = SimpleNamespace(
        layers=[layer],
        get_seq_length=lambda: 37,
        update=lambda keys, values, index: given.append((*keys.shape, *values.shape, index)),
    )
    fill(cache, 137)
    assert given == [(3, 2, 100, 4, 3, 2, 100, 4, 0)]
    fill(cache, 37)
    assert len(given) == 1


def test_a_quantized_cache_is_all_of_its_tensors_and_follows_no_law() -> None:
    one = torch.ones(2)
    assert len([*parts_of([one, (one, {"scale": one, "shape": (2,), "zero": one}), None])]) == 4
    watch = GenerationWatch(SimpleNamespace())  # type: ignore[arg-type]
    watch._kinds.add("quantized")
    assert watch._of_cache() == {"cache": "quantized"} and "quantized" in watch._uneven


def test_batches_of_padded_texts_are_no_text() -> None:
    loop, found = DecodeLoop(), []
    for call, length in enumerate((291, 292, 292, 293, 294, 270, 271, 272, 273)):
        loop.given(torch.nn.Identity() if not call else loop.module, (("ids", (64, length)),))  # type: ignore[arg-type]
        found.append(loop.called(call + 1))
    assert found == [False] * 8 + [True]


def test_a_loop_without_end_ends_with_the_models_positions() -> None:
    module: Any = torch.nn.Identity()
    module.config = SimpleNamespace(n_positions=130)
    watch = GenerationWatch(SimpleNamespace())  # type: ignore[arg-type]
    for call in range(21):
        watch._loop.given(module, (("ids", (4, 1 if call else 100)),))
        watch.called(call + 1)
    assert watch.text is not None
    assert (watch.text.prompt, watch.text.decodes, watch.text.limit) == (100, 20, 130)
    while not watch.is_full:
        watch._add_call()
    watch.cut_short()
    assert watch.text.positions == 130 and watch.text.by.endswith("the model's last position")


def test_a_loop_that_was_cut_is_not_said_to_be_whole() -> None:
    """Its calls are no other than those of batches: memory does not change with them."""
    watch = GenerationWatch(SimpleNamespace())  # type: ignore[arg-type]
    module = torch.nn.Identity()
    with simulate("RTX 4090") as simulation:
        torch.ones(2, device="cuda")
    for call in range(21):
        watch._loop.given(module, (("x", (4, 1 if call else 100)),))
        watch.called(call + 1)

    def said(status: Status) -> str:
        found = watch.described(simulation.recording, status)
        return str((found.header.get("generation") or {}).get("by"))

    assert said("ended") == "the script's loop"
    assert said("finished").endswith("had not ended when the simulation did: at least")


def test_a_loop_of_tokens_is_followed_where_its_first_calls_differ() -> None:
    """A cache that was made ahead grows with no call: one that reads tokens may still be a text's
    after 17 calls that follow no law, where one that is given other numbers is batches."""
    for tokens, begins in ((True, True), (False, False)):
        watch = GenerationWatch(SimpleNamespace())  # type: ignore[arg-type]
        module = torch.nn.Identity()
        for call in range(1 + 17 + 8):
            names = ["ids"] if tokens else []
            watch._loop.given(module, (("ids", (4, 1 if call else 100)),), names)
            watch.called(call + 1)
        assert watch.begins is begins


@pytest.mark.slow
@pytest.mark.parametrize("options", [("--beams=3",), ("--cache=static",), ("--warmup",)])
def test_other_ways_to_generate(options: tuple[str, ...]) -> None:
    """A stop that is not known goes on to the length; a shorter text does not stand for another."""
    before = 3 if "--warmup" in options else 0
    short = traced("--tokens=60", *options)
    full = traced("--tokens=60", *options, steps=before + 60)
    text = text_of(short)
    assert (text.new_tokens, text.prefill, text.calls_left > 0) == (60, before, True)
    assert text_of(full).new_tokens == 60 and peaks(short) == peaks(full)


@pytest.mark.slow
def test_the_verbs_say_how_long_a_context_fits(tmp_path: Path) -> None:
    words = ["--gpu", "RTX 4090", "--output", str(tmp_path / "text.trainfit")]
    said = trainfit("simulate", *words, "--", "python", SCRIPT, "--tokens=2000", cwd=tmp_path)
    assert said.returncode == 0, said.stderr
    text = " ".join(said.stdout.split())
    assert "20 prompt + 2,000 new tokens, 4 sequences (by generate())" in text
    assert "longest that fits: 4,096 tokens (the model's limit)" in text
    assert "KV cache" in text and "tokens/s" in text


MADE_AHEAD = """
import sys, torch
PROMPT, NEW, ALL = 12, 40, sys.argv[1] == "all"
class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.words = torch.nn.Embedding(100, 64)
        self.register_buffer("keys", torch.zeros(4, PROMPT + NEW, 64))
    def forward(self, ids, at):
        to = at + ids.shape[1]
        self.keys[:, at:to] = self.words(ids)
        return self.words(ids) @ (self.keys if ALL else self.keys[:, :to]).mT
net = Net().cuda().eval()
with torch.no_grad():
    made = [net(torch.zeros(4, PROMPT, dtype=torch.long, device="cuda"), 0)[:, -1:].argmax(-1)]
    for at in range(PROMPT, PROMPT + NEW - 1):
        made.append(net(torch.zeros(4, 1, dtype=torch.long, device="cuda"), at).argmax(-1))
"""


def test_a_loop_with_a_cache_that_is_made_ahead_is_followed_to_its_end(tmp_path: Path) -> None:
    script = tmp_path / "made_ahead.py"
    script.write_text(MADE_AHEAD)

    def trace(which: str) -> Trace:
        command = parse_command(["python", str(script), which])
        with Tracer(command, find_gpu("RTX 4090")) as tracer:
            return tracer.trace(RunSpec(count="calls"))

    # Attention over the positions so far, and over all: there each call is as the one before, and
    # what tells a text is that the model is given integers of one position after those of many.
    for which in ("so far", "all"):
        followed = text_of(found := trace(which))
        assert (followed.prompt, followed.new_tokens, followed.decodes) == (12, 40, 17)
    # The calls leave their tokens behind, and no cache: a longer text has a larger one from the
    # first call on, and no context that fits follows from these.
    assert found.recording is not None and OtherLengths.of(found.recording, 40) is None


def test_keys_that_were_there_before_the_call_are_a_cache() -> None:
    """A cache of full length, written in place; keys that each call makes are none."""

    class Net(torch.nn.Module):
        def __init__(self, ahead: bool) -> None:
            super().__init__()
            self.words = torch.nn.Embedding(100, 64)
            self.keys = torch.zeros(4, 4096, 64, device="cuda") if ahead else None

        def forward(self, ids: torch.Tensor) -> torch.Tensor:
            x = self.words(ids)
            keys = torch.zeros(4, 4096, 64, device="cuda") if self.keys is None else self.keys
            return torch.nn.functional.scaled_dot_product_attention(x, keys, keys) @ (
                self.words.weight.mT
            )

    for ahead in (True, False):
        with simulate("custom:8GiB") as simulation:
            watch, patches, net = GenerationWatch(simulation), PatchSet(), Net(ahead).cuda()
            watch.install(patches)
            with torch.no_grad():
                ids = torch.zeros(4, 12, dtype=torch.long, device="cuda")
                for step in range(1, 6):
                    ids = net(ids)[:, -1:].argmax(-1)
                    watch.called(step)
            patches.restore()
            recording = simulation.recording
        large = recording.alloc_bytes == 4 * 4096 * 64 * 4
        found = {KINDS[kind] for kind in recording.alloc_kind[large].tolist()}
        assert ("kv_cache" in found) is ahead, found
