"""The estimator in plain loops: what it measures, what it leaves alone, what it refuses."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import trainfit
from helpers_noise import Known, samples, train
from trainfit.batch import NoiseScale, norms
from trainfit.results.batch import Interval


def holds(found: Interval | None, value: float) -> bool:
    return found is not None and found.high is not None and found.low <= value <= found.high


def test_accumulation_gives_the_known_noise_scale() -> None:
    result = train(400, noise_scale=32.0).result()
    assert result.method == "accumulation" and result.accumulation == 4 and result.batch_size == 16
    assert result.steps_used == 399  # of the first step the accumulation was not known
    assert holds(result.noise, 32.0) and result.noise is not None
    assert result.noise.value == pytest.approx(32.0, rel=0.15)
    assert [each.name for each in result.modules] == ["first", "second"]
    for each in result.modules:
        assert each.trace_share == pytest.approx(0.5, abs=0.05)
        assert holds(each.noise, 32.0)
    assert not result.cannot_tell and not result.steps_left_out and len(result.history) == 6


@pytest.mark.slow
def test_steps_of_several_runs_can_be_pooled() -> None:
    runs = [train(101, noise_scale=200.0, seed=seed).steps() for seed in range(4)]
    assert all(len(square) == len(trace) == 100 for square, trace in runs)
    assert min(square.min() for square, _ in runs) < 0  # nothing is cut off
    pooled = sum(trace.sum() for _, trace in runs) / sum(square.sum() for square, _ in runs)
    assert pooled == pytest.approx(200, rel=0.3)


@pytest.mark.parametrize("set_to_none", [True, pytest.param(False, marks=pytest.mark.slow)])
def test_the_way_of_zeroing_does_not_matter(set_to_none: bool) -> None:
    result = train(200, set_to_none=set_to_none).result()
    assert result.steps_used == 199 and holds(result.noise, 32.0)


def test_what_is_done_to_gradients_before_the_step_does_not_matter() -> None:
    def clip(model: nn.Module) -> None:
        nn.utils.clip_grad_norm_(model.parameters(), 0.1)

    plain, clipped = train(100).result(), train(100, before_step=clip).result()
    assert plain.noise == clipped.noise and plain.steps_used == clipped.steps_used


def test_gradients_changed_between_passes_are_left_out() -> None:
    def clip(model: nn.Module, step: int, number: int) -> None:
        if step % 2 and number == 1:
            nn.utils.clip_grad_norm_(model.parameters(), 0.1)

    result = train(101, between=clip).result()
    assert result.steps_used == 50
    assert result.steps_left_out == {"the gradients were changed between two backward passes": 50}


def test_gradients_that_are_not_zeroed_are_left_out() -> None:
    model = Known()
    optimizer = torch.optim.Adam(model.parameters())
    noise = NoiseScale(model, 4, every=1)
    generator = torch.Generator().manual_seed(0)
    for _ in range(6):
        for _ in range(2):
            model(samples(4, 8.0, generator)).mean().backward()
        optimizer.step()
    found = noise.result()
    assert found.steps_used == 0
    assert found.steps_left_out == {"the gradients were not zeroed after the previous step": 5}


def test_steps_of_another_accumulation_are_left_out() -> None:
    model = Known()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    noise = NoiseScale(model, 4, every=1)
    generator = torch.Generator().manual_seed(0)
    for step in range(60):
        optimizer.zero_grad()
        for _ in range(2 if step % 10 == 9 else 4):  # the end of an epoch
            model(samples(4, 32.0, generator)).mean().backward()
        optimizer.step()
    result = noise.result()
    assert sum(result.steps_left_out.values()) == 11 and result.steps_used == 48
    assert result.batch_size == 16  # of what was measured, not of the last step


@pytest.mark.slow
def test_uneven_micro_batches_are_weighted() -> None:
    model = Known()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    noise = NoiseScale(model, 8, every=1)
    generator = torch.Generator().manual_seed(1)
    for _ in range(600):
        optimizer.zero_grad()
        for size in (2, 14, 8):
            noise.samples(size)
            (model(samples(size, 32.0, generator)).mean() / 3).backward()
        optimizer.step()
    assert holds(noise.result().noise, 32.0)


def test_a_loss_that_is_a_sum_is_said() -> None:
    model = Known()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    noise = NoiseScale(model, 4, loss="sum", every=1)
    generator = torch.Generator().manual_seed(1)
    for _ in range(150):
        optimizer.zero_grad()
        for _ in range(4):
            model(samples(4, 32.0, generator)).sum().backward()
        optimizer.step()
    result = noise.result()
    assert holds(result.noise, 32.0) and holds(result.gradient_square, 1.0)


class Overflowing(Known):
    calls = 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        return super().forward(x) * (float("inf") if self.calls == 83 else 1.0)


def test_not_finite_steps_are_left_out() -> None:
    result = train(60, model=Overflowing()).result()
    (reason,) = result.steps_left_out
    assert "NaN or infinity" in reason and result.steps_left_out[reason] == 1
    assert result.steps_used == 58 and result.noise is not None


def test_the_loss_scale_is_divided_out() -> None:
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0, growth_interval=7)
    model = Known()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    noise = NoiseScale(model, 4, scaler=scaler, every=1)
    generator = torch.Generator().manual_seed(0)
    for _ in range(60):
        optimizer.zero_grad()
        for _ in range(4):
            scaler.scale(model(samples(4, 32.0, generator)).mean() / 4).backward()
        scaler.unscale_(optimizer)
        scaler.step(optimizer)
        scaler.update()
    plain = train(60).result()
    found = noise.result()
    assert found.noise is not None and plain.noise is not None
    assert found.noise.value == pytest.approx(plain.noise.value, rel=1e-4)
    assert found.steps_used == plain.steps_used


def test_a_step_that_the_scaler_skips_is_not_one_more_micro_batch() -> None:
    """The optimizer does not step: only the zeroed gradients tell that a new step has begun."""

    scaler = torch.amp.GradScaler("cpu", init_scale=16.0)
    model = Overflowing()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    noise = NoiseScale(model, 4, scaler=scaler, every=1)
    generator = torch.Generator().manual_seed(0)
    for _ in range(60):
        optimizer.zero_grad()
        for _ in range(4):
            scaler.scale(model(samples(4, 32.0, generator)).mean()).backward()
        scaler.step(optimizer)
        scaler.update()
    result = noise.result()
    assert result.steps_seen == 59 and result.steps_used == 58 and not result.steps_left_out


def test_one_micro_batch_on_one_device_says_what_to_do() -> None:
    result = train(30, accumulation=1).result()
    assert result.noise is None and result.method == "none"
    assert "NoiseScale.measure" in result.cannot_tell and "accumulate" in result.cannot_tell


def test_a_measuring_pass_gives_the_known_noise_scale() -> None:
    def measure(noise: NoiseScale, model: nn.Module, batch: Tensor) -> None:
        noise.measure(lambda part: model(part["x"]).mean(), {"x": batch, "step": torch.tensor(3)})

    result = train(500, accumulation=1, micro=16, noise_scale=24.0, measured=measure).result()
    assert result.method == "parts" and result.steps_used == 500
    assert holds(result.noise, 24.0)


def test_a_measuring_pass_that_fails_is_said_and_not_repeated() -> None:
    calls = []

    def measure(noise: NoiseScale, model: nn.Module, batch: Tensor) -> None:
        def loss_of(part: Tensor) -> Tensor:
            calls.append(1)
            raise torch.OutOfMemoryError("CUDA out of memory")

        assert not noise.measure(loss_of, batch)

    result = train(20, accumulation=1, micro=16, measured=measure).result()
    assert len(calls) == 1 and "out of memory" in result.notes[0]


def test_single_samples_of_linear_modules() -> None:
    result = train(200, accumulation=1, micro=16, noise_scale=24.0, per_example=True).result()
    assert result.method == "examples" and holds(result.noise, 24.0)


class Normed(nn.Module):
    """All three kinds, on batches of (N, 4, 6)."""

    def __init__(self, more: nn.Module | None = None) -> None:
        super().__init__()
        self.group, self.layer = nn.GroupNorm(2, 4), nn.LayerNorm(6)
        self.linear = nn.Linear(24, 3)
        self.more = more or nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        x = torch.relu_(self.layer(self.group(x)))
        return self.linear(self.more(x.flatten(1))).square().sum(1)


def test_single_samples_squares_are_those_of_single_backward_passes() -> None:
    torch.manual_seed(0)
    model, x = Normed(), torch.randn(5, 4, 6)
    noise = NoiseScale(model, 5, per_example=True, every=1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    for _ in range(2):  # the accumulation is known from the second step on
        optimizer.zero_grad()
        model(x).mean().backward()
        optimizer.step()
    assert noise._records is not None
    small, big = noise._records.read()[0].sum(axis=1)
    single = [
        torch.autograd.grad(model(x[n : n + 1]).mean(), list(model.parameters())) for n in range(5)
    ]
    wanted = sum(float(sum(g.square().sum() for g in grads)) for grads in single) / 5
    assert small == pytest.approx(wanted, rel=1e-5)
    assert big == pytest.approx(
        sum(float(p.grad.square().sum()) for p in model.parameters() if p.grad is not None)
    )


def test_single_samples_are_refused_with_batch_norm() -> None:
    model = Normed(nn.BatchNorm1d(24))
    noise = NoiseScale(model, 5, per_example=True, every=1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    for _ in range(3):
        optimizer.zero_grad()
        model(torch.randn(5, 4, 6)).mean().backward()
        optimizer.step()
    assert "BatchNorm mixes" in noise.result().notes[0]


# --- Nothing is changed -----------------------------------------------------------------------
def losses(with_noise: bool, accumulation: int, **options: Any) -> tuple[list[float], list[Tensor]]:
    torch.manual_seed(3)
    model = nn.Sequential(
        nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(inplace=True), nn.Dropout(0.3),
        nn.Flatten(), nn.LazyLinear(10), nn.LayerNorm(10),
    )  # fmt: skip
    model(torch.randn(2, 3, 8, 8))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    noise = NoiseScale(model, 8, **options) if with_noise else None
    found = []
    for _ in range(12):
        optimizer.zero_grad()
        for _ in range(accumulation):
            x = torch.randn(8, 3, 8, 8)
            if noise is not None and accumulation == 1:
                noise.measure(lambda part: model(part).square().mean(), x)
            loss = model(x).square().mean()
            loss.backward()
            found.append(loss.item())
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
    if noise is not None:
        assert noise.result().steps_used > 0
    return found, [*model.parameters(), *model.buffers()]


def test_single_samples_change_nothing() -> None:
    def trained(with_noise: bool) -> list[float]:
        torch.manual_seed(3)
        model = nn.Sequential(nn.Linear(6, 8), nn.ReLU(inplace=True), nn.LayerNorm(8))
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        noise = NoiseScale(model, 4, every=1, per_example=True) if with_noise else None
        found = []
        for _ in range(30):
            optimizer.zero_grad()
            loss = model(torch.randn(4, 6)).square().sum(1).sin().mean()
            loss.backward()
            optimizer.step()
            found.append(loss.item())
        assert noise is None or noise.result().method == "examples"
        return found

    assert trained(True) == trained(False)


def test_single_samples_are_not_measured_where_micro_batches_are() -> None:
    noise = train(40, per_example=True)
    assert noise.result().method == "accumulation"
    assert noise._examples is not None and not noise._examples._squares


@pytest.mark.parametrize("accumulation", [1, 3])
def test_losses_are_the_same_to_the_last_bit(accumulation: int) -> None:
    plain, state = losses(False, accumulation)
    found, measured = losses(True, accumulation, every=1)
    assert found == plain
    assert all(torch.equal(a, b) for a, b in zip(state, measured, strict=True))


def test_a_gradient_is_not_copied() -> None:
    """Autograd moves a gradient that nobody else refers to; keeping it would cost memory."""
    model = nn.Linear(4, 4, bias=False)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    noise = NoiseScale(model, 2, every=1)
    seen = []
    model.weight.register_hook(lambda grad: seen.append(grad.data_ptr()))
    for _ in range(3):
        optimizer.zero_grad()
        model(torch.randn(2, 4)).sum().backward()
        assert model.weight.grad is not None and model.weight.grad.data_ptr() == seen[-1]
        model(torch.randn(2, 4)).sum().backward()
        optimizer.step()
    assert noise.result().steps_seen == 3


def simulated(with_noise: bool) -> tuple[int, int]:
    """Records that were made, and the loop's live memory at its end."""
    with trainfit.simulate("T4"):
        model = nn.Sequential(nn.Linear(64, 64), nn.LayerNorm(64)).cuda()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        scaler = torch.amp.GradScaler("cuda")
        noise = NoiseScale(model, 8, scaler=scaler, every=1, window=16) if with_noise else None
        for _ in range(6):
            optimizer.zero_grad()
            for _ in range(2):
                with torch.autocast("cuda", torch.float16):
                    loss = model(torch.randn(8, 64, device="cuda")).square().mean()
                scaler.scale(loss).backward()
            scaler.step(optimizer)
            scaler.update()
        if noise is None:
            return 0, torch.cuda.memory_allocated()
        assert not noise._log.fault
        noise.close()
        return noise._log.committed, torch.cuda.memory_allocated()


def test_on_the_simulated_gpu_a_loop_goes_the_same_way() -> None:
    committed, live = simulated(True)
    assert committed == 5
    assert live - simulated(False)[1] < 64 << 10  # the records and no gradient


# --- What cannot be measured --------------------------------------------------------------------
def test_sparse_gradients_and_parameters_without_are_named() -> None:
    class Words(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.words = nn.Embedding(9, 4, sparse=True)
            self.linear, self.unused = nn.Linear(4, 1), nn.Linear(4, 1)

        def forward(self, x: Tensor) -> Tensor:
            return self.linear(self.words(x)).square()

    model = Words()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    noise = NoiseScale(model, 4, every=1)
    for _ in range(20):
        optimizer.zero_grad()
        for _ in range(2):
            model(torch.randint(9, (4,))).mean().backward()
        optimizer.step()
    result = noise.result()
    assert result.left_out == ("words.weight: its gradient is sparse",)
    assert "2 parameters had no gradient" in result.notes[0] and "unused" in result.notes[0]
    assert result.noise is not None
    assert [each.name for each in result.modules] == ["linear"]


def test_reentrant_checkpointing_is_refused() -> None:
    from torch.utils.checkpoint import checkpoint

    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    for reentrant in (True, False):
        noise = NoiseScale(model, 2, every=1)
        for _ in range(20):
            optimizer.zero_grad()
            for _ in range(2):
                x = torch.randn(2, 4, requires_grad=True)
                for layer in model:
                    x = checkpoint(layer, x, use_reentrant=reentrant)
                x.sum().backward()
            optimizer.step()
        result = noise.result()
        assert ("use_reentrant=False" in result.cannot_tell) is reentrant
        assert (result.steps_used > 0) is not reentrant


def test_shards_are_refused() -> None:
    class DTensor(nn.Parameter):
        pass

    model = nn.Linear(2, 2)
    model.weight = DTensor(torch.zeros(2, 2))
    assert "FSDP shards" in NoiseScale(model, 2, every=1).result().cannot_tell


def test_a_model_without_gradients_and_another_models_optimizer() -> None:
    model = nn.Linear(2, 2).requires_grad_(False)
    assert "requires a gradient" in NoiseScale(model, 2, every=1).result().cannot_tell
    mine, other = nn.Linear(2, 2), nn.Linear(2, 2)
    noise = NoiseScale(mine, 2)
    optimizer = torch.optim.SGD(other.parameters(), lr=0.0)
    other(torch.ones(2, 2)).sum().backward()
    optimizer.step()
    result = noise.result()
    assert result.steps_seen == 0 and "torch.optim optimizer" in result.cannot_tell


def test_a_failing_hook_does_not_reach_the_training(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: Any, **__: Any) -> None:
        raise RuntimeError("no kernel")

    monkeypatch.setattr(norms, "foreach_norms", broken)
    result = train(5).result()
    assert result.cannot_tell == "RuntimeError: no kernel"


@pytest.mark.parametrize("bad", [{"batch_size": 0}, {"window": 0}, {"every": 0}, {"loss": "max"}])
def test_bad_arguments(bad: dict[str, Any]) -> None:
    with pytest.raises(ValueError):
        NoiseScale(nn.Linear(2, 2), **{"batch_size": 2, **bad})


def test_closing_removes_the_hooks() -> None:
    model = Known()
    before = copy.copy(model.first.weight._post_accumulate_grad_hooks)
    noise = NoiseScale(model, 2, every=1)
    noise.close()
    assert not before and not model.first.weight._post_accumulate_grad_hooks


def test_a_line_says_it() -> None:
    line = str(train(100))
    assert line.startswith("noise scale ") and "batch 16" in line
    assert "not known" in str(train(3))
