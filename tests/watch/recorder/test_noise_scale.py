"""The noise scale inside a watched run: which model, which micro-batches, what is written."""

from __future__ import annotations

import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from helpers_noise import Known, samples
from trainfit.results.batch import NoiseResult
from trainfit.watch.recorder.noise_scale import WatchedNoiseScale


def run(
    noise: WatchedNoiseScale,
    model: nn.Module,
    sizes: tuple[int, ...] = (4, 4),
    steps: int = 200,
    scaler: Any = None,
) -> None:
    """A loop as the recorder sees it: the first call of the model in each step is told."""
    generator = torch.Generator().manual_seed(0)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    for step in range(steps):
        optimizer.zero_grad()
        for number, size in enumerate(sizes):
            if number == 0:
                noise.root_called(model, step)
            loss = model(samples(size, 32.0, generator)).mean() / len(sizes)
            (loss if scaler is None else loss * scaler._scale).backward()
        optimizer.step()
        with torch.no_grad():
            model(samples(3, 32.0, generator))  # an evaluation


def saved(noise: WatchedNoiseScale, folder: Path) -> NoiseResult:
    assert noise.save(folder / "noise.json") == ""
    return NoiseResult.load(folder / "noise.json")


@pytest.mark.parametrize(("sizes", "method"), [((4, 4), "accumulation"), ((8,), "examples")])
def test_the_known_noise_scale_is_found(
    sizes: tuple[int, ...], method: str, tmp_path: Path
) -> None:
    noise = WatchedNoiseScale(every=1)
    run(noise, Known(), sizes, 600)
    result = saved(noise, tmp_path)
    assert (result.method, result.batch_size) == (method, 8)
    assert result.noise is not None and result.noise.value == pytest.approx(32, rel=0.3)


def test_uneven_micro_batches_are_counted() -> None:
    noise = WatchedNoiseScale(every=1)
    run(noise, Known(), (6, 3))
    assert noise._noise is not None
    weights = noise._noise._log.weights[0]
    assert (weights.small_t, weights.big_t) == (1 / 6, 1 / 6 + 1 / 3)


def test_the_loss_scale_is_divided_out(tmp_path: Path) -> None:
    class Scaler:
        _scale = torch.tensor(1024.0)

    noise = WatchedNoiseScale(every=1)
    noise.scaler = Scaler()
    run(noise, Known(), scaler=Scaler())
    plain = WatchedNoiseScale(every=1)
    run(plain, Known())
    found, wanted = saved(noise, tmp_path).trace, saved(plain, tmp_path).trace
    assert found is not None and wanted is not None and wanted.value is not None
    assert found.value == pytest.approx(wanted.value, rel=1e-5)


def test_the_largest_model_is_measured() -> None:
    noise, small, large = WatchedNoiseScale(), nn.Linear(2, 1), Known()
    for step in range(3):
        for model in (small, large):
            noise.root_called(model, step)
    assert large._forward_pre_hooks and not small._forward_pre_hooks
    large(torch.ones(2, 40))
    noise.close()
    assert not large._forward_pre_hooks and not large.first.weight._post_accumulate_grad_hooks


def test_a_model_is_saved_as_without_us(tmp_path: Path) -> None:
    noise, model = WatchedNoiseScale(), Known()
    model.register_forward_pre_hook(_told)
    plain = pickle.dumps(model)
    noise.root_called(model, 0)
    noise.root_called(model, 1)
    model(torch.ones(2, 40))
    last = model.register_forward_hook(_told)
    last.remove()
    before = [*model._forward_pre_hooks.values()]
    assert len(before) == 2 and b"getattr" in pickle.dumps(model)
    with noise.aside():
        assert [*model._forward_pre_hooks.values()] == [_told]
        inside = pickle.dumps(model)
    assert b"getattr" not in inside and len(inside) == len(plain)
    assert [*model._forward_pre_hooks.values()] == before
    noise.close()


def _told(*_: Any) -> None:
    """A hook of the script's own."""


def test_what_cannot_be_measured_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    noise = WatchedNoiseScale()
    assert noise.save(tmp_path / "x.json") == "no training step was seen"
    model = nn.Identity()
    noise.root_called(model, 0)
    assert "first step" in noise.save(tmp_path / "x.json")
    noise.root_called(model, 1)
    model(5)
    assert "samples of a batch are not known" in noise.save(tmp_path / "x.json")
    model(torch.ones(2))
    assert noise.save(tmp_path / "x.json") == ""
    assert "requires a gradient" in NoiseResult.load(tmp_path / "x.json").cannot_tell


def test_an_error_does_not_reach_the_training(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(*_: Any, **__: Any) -> None:
        raise RuntimeError("no hooks")

    monkeypatch.setattr("trainfit.watch.recorder.noise_scale.NoiseScale", broken)
    noise = WatchedNoiseScale(every=1)
    run(noise, Known(), steps=2)
    assert noise.save(tmp_path / "x.json") == "RuntimeError: no hooks"
