"""Loops of calls that are fed by what they gave: their calls are counted once memory repeats."""

from __future__ import annotations

import copy
import io
import warnings
from collections.abc import Callable, Iterator
from types import SimpleNamespace

import pytest
import torch

from trainfit.memory.growth import step_pattern
from trainfit.scripts.generation import GenerationWatch
from trainfit.scripts.phases.sampling import SampledLoop
from trainfit.simgpu.patching import PatchSet
from trainfit.simgpu.session import Simulation


class Denoiser(torch.nn.Module):
    """Counts the calls that are made."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(64, 64, device="cuda")
        self.made = 0

    def forward(self, x: torch.Tensor, at: torch.Tensor | None = None) -> dict[str, torch.Tensor]:
        self.made += 1
        return {"noise": self.layer(x).relu() * 2}


@pytest.fixture
def watched() -> Iterator[tuple[Simulation, SampledLoop, Denoiser]]:
    with Simulation("RTX 4090") as simulation:
        loop = SampledLoop(simulation, lambda: False, is_inference=True)
        patches = PatchSet()
        loop.install(patches)
        yield simulation, loop, Denoiser()
        patches.restore()


Watched = tuple[Simulation, SampledLoop, Denoiser]


def sampled(model: Denoiser, steps: int, rows: int = 8) -> torch.Tensor:
    x = torch.randn(rows, 64, device="cuda")
    for _ in range(steps):
        x = x - model(x)["noise"]
    return x


@torch.no_grad()
def test_calls_that_are_alike_are_not_made(watched: Watched) -> None:
    simulation, loop, model = watched
    sampled(model, 1000)
    assert model.made < 10 and loop.leaves_out and loop.was_left_out
    before = simulation.allocator.requested_bytes
    found = model(torch.randn(8, 64, device="cuda"))["noise"]
    assert (found.shape, found.device.type) == ((8, 64), "cuda")
    assert simulation.allocator.requested_bytes == before + found.nbytes
    # Given something else it is called, and what was sampled is what the next model gets.
    made = model.made
    assert model(torch.randn(9, 64, device="cuda"))["noise"].shape == (9, 64)
    assert model.made == made + 1 and not loop.was_left_out
    over: list[int] = []
    loop.is_over = lambda: over.append(1)
    sampled(model, 2)
    assert over == [1]


@torch.no_grad()
def test_a_text_that_grows_past_what_the_model_is_given_is_alike(watched: Watched) -> None:
    """A loop that gives its model the last positions of a text: a token more uses no new block."""
    _, loop, model = watched
    text = torch.zeros(1, 70, device="cuda", dtype=torch.long)
    for _ in range(40):
        rows = torch.nn.functional.one_hot(text[:, -64:] % 64, 64).float()[0]
        found = model(rows)["noise"][-1:].argmax(-1, keepdim=True)
        text = torch.cat((text, found), 1)
    assert loop.leaves_out and model.made < 20


def keeping(model: Denoiser) -> None:
    kept, x = [], torch.randn(8, 64, device="cuda")
    for _ in range(30):
        x = x - model(x)["noise"]
        kept.append(x)


def benchmarking(model: Denoiser) -> None:
    x = torch.randn(8, 64, device="cuda")
    for _ in range(30):
        model(x)


def fed(model: Denoiser) -> None:
    for _ in range(30):
        model(torch.randn(64, 64).to("cuda"))


def training(model: Denoiser) -> None:
    with torch.enable_grad():
        sampled(model, 30)


@torch.no_grad()
@pytest.mark.parametrize("use", [keeping, benchmarking, fed, training])
def test_others_are(watched: Watched, use: Callable[[Denoiser], None]) -> None:
    """Calls that leave more behind each time, that are given the same or the host's, or train."""
    _, loop, model = watched
    use(model)
    assert model.made == 30 and not loop.leaves_out


@torch.no_grad()
def test_batches_that_a_training_draws_by_itself_are_alike() -> None:
    """An evaluation by a function that draws its batches, before the first step or after some."""
    with Simulation("RTX 4090") as simulation:
        loop, model = SampledLoop(simulation, lambda: False, is_inference=False), Denoiser()
        patches = PatchSet()
        loop.install(patches)
        for use in (benchmarking, keeping):
            use(model)
            assert not loop.leaves_out
        model.made = 0
        fed(model)
        assert model.made < 10 and loop.leaves_out
        # The best model so far is kept, or saved as a whole: nothing of the loop is in it.
        saved = io.BytesIO()
        torch.save(model, saved)
        saved.seek(0)
        with torch.serialization.safe_globals([Denoiser, torch.nn.Linear]):
            loaded = torch.load(saved)
        for copied in (copy.deepcopy(model), loaded):
            made = copied.made
            fed(copied)
            assert copied is not model and copied.made > made
            assert copied.forward.__self__ is copied
        patches.restore()
        assert "forward" not in vars(model)


def test_a_model_is_trained_after_it(watched: Watched) -> None:
    _, loop, model = watched
    with torch.no_grad():
        sampled(model, 30)
    made = model.made
    assert made < 30 and loop.leaves_out
    model(torch.randn(8, 64, device="cuda"))["noise"].sum().backward()
    assert model.made == made + 1 and model.layer.weight.grad is not None
    assert "forward" not in vars(model)


@torch.no_grad()
def test_two_calls_take_turns(watched: Watched) -> None:
    _, loop, model = watched
    x, at = torch.randn(8, 64, device="cuda"), torch.zeros(8, device="cuda")
    for _ in range(100):
        with_text = model(x, at=at)["noise"]
        x = x - with_text - model(x)["noise"]
    assert loop.leaves_out and model.made < 20


def test_what_comes_after_a_loop_leaves_its_course() -> None:
    with Simulation("RTX 4090") as simulation, torch.no_grad():
        model = Denoiser()
        for _ in range(7):
            sampled(model, 1)
            simulation.end_step()
        sampled(model, 1, rows=4096)
        simulation.end_step()
        found = step_pattern(simulation.recording, reserved_bytes=0)
    assert (found.course, found.steps) == ("settled", 8)
    assert found.peak_bytes[-1] > found.peak_bytes[-2]


@torch.no_grad()
def test_a_call_that_fails_and_is_caught_leaves_nothing(watched: Watched) -> None:
    """PyTorch gives a hook of all modules no ``kwargs`` where the call failed."""
    _, loop, model = watched
    decoding = GenerationWatch(SimpleNamespace())  # type: ignore[arg-type]
    patches = PatchSet()
    decoding.install(patches)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            with pytest.raises(RuntimeError):
                model(torch.randn(8, 63, device="cuda"))
        assert decoding._inner == 0
    finally:
        patches.restore()
    sampled(model, 1000)
    assert model.made < 11 and loop.was_left_out
