"""Calls of a model that a script makes before it trains: a text to show what it has not learned."""

from __future__ import annotations

import dataclasses
import functools
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from trainfit.hardware import find_gpu
from trainfit.memory.replay import Stream, replay
from trainfit.plan.command.parsing import parse_command
from trainfit.plan.runs.tracing import Tracer
from trainfit.plan.sizing.costing import machine_of
from trainfit.results.runs.recording import Recording
from trainfit.results.runs.spec import RunSpec
from trainfit.scripts import steps
from trainfit.scripts.generation import GenerationWatch
from trainfit.scripts.steps import InferenceWatch, source_trains
from trainfit.simgpu.patching import PatchSet
from trainfit.simgpu.session import Simulation
from trainfit.speed.step import step_time
from trainfit.speed.work import Work

TRAINS = "for x in data:\n    loss = model(x)\n    loss.backward()\n"


@pytest.mark.parametrize(
    ("source", "trains"),
    [
        (TRAINS, True),
        ("Seq2SeqTrainer(model=model).train()", True),
        ("lightning.Trainer(max_epochs=1)", True),
        ("model.fit(data)", True),
        ("with torch.no_grad():\n    print(model(x).argmax(-1))", False),
        ("model.train(False)\nprint('loss.backward()')", False),
        ("this is no Python", False),
    ],
)
def test_source_trains_where_it_calls_what_trains(
    tmp_path: Path, source: str, trains: bool
) -> None:
    script = tmp_path / "script.py"
    script.write_text(source)
    assert source_trains(str(script)) is trains


def calls_until_it_only_infers(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, source: str, *, fed: bool
) -> int:
    script = tmp_path / "script.py"
    script.write_text(source)
    monkeypatch.setattr(steps, "files_of_user", lambda: (str(script),))
    counted = SimpleNamespace(calls=0)
    interventions: Any = SimpleNamespace(optimizers=(), forward_calls=lambda: counted)
    simulation: Any = SimpleNamespace(recording=SimpleNamespace(op_phase=torch.zeros(1)))
    watch = InferenceWatch(simulation, interventions)
    while counted.calls < 2000:
        counted.calls += 1
        if fed:
            watch.fed()
        if watch.only_infers():
            break
    return counted.calls


def test_a_text_before_a_training_is_no_inference(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Otherwise a script that first shows 200 tokens was planned as one that only infers."""
    assert calls_until_it_only_infers(monkeypatch, tmp_path, TRAINS, fed=False) == 700
    # An evaluation is fed, and a script that never trains goes on no longer than before.
    assert calls_until_it_only_infers(monkeypatch, tmp_path, TRAINS, fed=True) == 100
    assert calls_until_it_only_infers(monkeypatch, tmp_path, "model(x)", fed=False) == 100


SCRIPT = """
import torch
model = torch.nn.Linear(8, 8).cuda()
x = torch.zeros(1, 8, device="cuda")
for _ in range({calls}):
    x = torch.cat([x, model(x)[-1:].detach()])
optimizer = torch.optim.SGD(model.parameters(), 0.1)
for _ in range(9):
    model(x).sum().backward()
    optimizer.step()
"""


def test_the_steps_of_a_training_after_a_text_are_simulated(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(SCRIPT.format(calls=120))
    with Tracer(parse_command(["python", str(script)]), find_gpu("RTX 4090")) as tracer:
        outcome = tracer.trace(RunSpec()).outcome
    assert (outcome.status, outcome.optimizers != ()) == ("finished", True)
    assert outcome.steps >= 3


def test_generate_makes_few_calls_before_a_training_and_its_whole_cache() -> None:
    transformers = pytest.importorskip("transformers")
    config = transformers.GPT2Config(n_layer=1, n_embd=64, n_head=2, vocab_size=100)
    watch, patches, calls = None, PatchSet(), 0
    with Simulation("RTX 4090") as simulation:
        watch = GenerationWatch(simulation)
        watch.install(patches)

        def count(*_: Any) -> None:
            nonlocal calls
            calls += 1
            watch.shorten()

        model = transformers.GPT2LMHeadModel(config).cuda().eval()
        handle = model.register_forward_hook(count)
        prompt = torch.ones(2, 10, dtype=torch.long, device="cuda")
        options = {"do_sample": False, "pad_token_id": 0}
        found = model.generate(prompt, max_new_tokens=500, return_dict_in_generate=True, **options)
        made = calls
        short = model.generate(prompt, max_new_tokens=2, **options)
        handle.remove()
        patches.restore()
    assert (made, found.sequences.shape) == (3, (2, 510))
    assert found.past_key_values.get_seq_length() == 509
    assert (calls - made, short.shape) == (2, (2, 12))
    assert any("500 tokens" in text for text in simulation.recording.header["assumptions"])


@functools.cache
def of_a_step_with_a_text(new_tokens: int, *, shortened: bool) -> Recording:
    """A step of a training that generates a text, and learns from something else."""
    transformers = pytest.importorskip("transformers")
    config = transformers.GPT2Config(n_layer=2, n_embd=64, n_head=2, vocab_size=100)
    patches = PatchSet()
    with Simulation("RTX 4090") as simulation:
        watch = GenerationWatch(simulation)
        watch.install(patches)
        model = transformers.GPT2LMHeadModel(config).cuda()
        if shortened:
            model.register_forward_hook(lambda *_: watch.shorten())
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        prompt = torch.ones(4, 10, dtype=torch.long, device="cuda")
        options = {"do_sample": True, "pad_token_id": 0, "eos_token_id": None}
        text = model.generate(prompt, max_new_tokens=new_tokens, **options)
        assert text.shape == (4, 10 + new_tokens)
        model(text, labels=text).loss.backward()
        optimizer.step()
        patches.restore()
    recording = simulation.recording
    recording.header["repeated"] = watch.repeated
    recording.check()
    return recording


@pytest.mark.parametrize("core_speed", [1.0, 1000.0])
def test_a_text_of_a_training_has_the_memory_and_the_time_of_all_of_its_calls(
    core_speed: float,
) -> None:
    """By launches, and (on a CPU that needs no time) by the GPU's own time."""
    whole = of_a_step_with_a_text(96, shortened=False)
    short = of_a_step_with_a_text(96, shortened=True)
    assert len(short.op_name) < len(whole.op_name) / 8
    machine = dataclasses.replace(machine_of(find_gpu("RTX 4090")), core_speed=core_speed)
    seconds = [step_time(Work.of_step(each, 0), machine).seconds for each in (whole, short)]
    assert seconds[1] == pytest.approx(seconds[0], rel=0.02)
    peaks = [replay(Stream.of(each)).peak_allocated for each in (whole, short)]
    assert peaks[1] == pytest.approx(peaks[0], rel=0.01)


def test_a_short_text_of_a_training_is_made_whole() -> None:
    assert of_a_step_with_a_text(3, shortened=True).repeated() == []
    assert len(of_a_step_with_a_text(4, shortened=True).repeated()) == 1


@pytest.mark.parametrize("call", [[0, 9, 5, 1], [0, 1, 2, -1], [0, 1, 2]])
def test_a_repeated_call_that_cannot_be_is_refused(call: list[int]) -> None:
    recording = of_a_step_with_a_text(3, shortened=True)
    header: Any = {**recording.header, "repeated": [call]}
    recording = dataclasses.replace(recording, header=header)
    with pytest.raises(ValueError, match="a repeated call is"):
        recording.check()
