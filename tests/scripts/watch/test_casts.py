"""What is seen of a script's autocast and of its own operators, and autocast that is forced."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

import trainfit
from trainfit.scripts.precision import AccelerateWatch, AmpWatch, AutocastSwitch
from trainfit.simgpu.patching import PatchSet


class Doubled(torch.autograd.Function):
    """Knows nothing of autocast."""

    @staticmethod
    def forward(context: Any, values: torch.Tensor) -> torch.Tensor:
        return values * 2

    @staticmethod
    def backward(context: Any, grad: torch.Tensor) -> torch.Tensor:
        return grad * 2


class Cast(Doubled):
    @staticmethod
    @torch.amp.custom_fwd(device_type="cuda")
    def forward(context: Any, values: torch.Tensor) -> torch.Tensor:
        return values * 2


def operator(name: str) -> Callable[[torch.Tensor], torch.Tensor]:
    @torch.library.custom_op(f"testcasts::{name}", mutates_args=())
    def tripled(values: torch.Tensor) -> torch.Tensor:
        return values * 3

    tripled.register_fake(torch.empty_like)
    return tripled


PLAIN, TOLD = operator("plain"), operator("told")
TOLD.register_autocast("cuda", torch.float32)  # type: ignore[attr-defined]


@pytest.fixture
def patches() -> Iterator[PatchSet]:
    with trainfit.simulate("RTX 4090"):
        patches = PatchSet()
        try:
            yield patches
        finally:
            patches.restore()


def test_operators_that_know_nothing_of_autocast_are_seen(patches: PatchSet) -> None:
    before = torch.autograd.Function.__dict__["apply"]
    watch = AmpWatch(AccelerateWatch())
    watch.install(patches)
    values = torch.ones(4, device="cuda", requires_grad=True)
    (Doubled.apply(values) * PLAIN(values.detach())).sum().backward()
    assert values.grad is not None
    assert not watch.seen().functions and not watch.seen().operators
    with torch.autocast("cuda", dtype=torch.bfloat16):
        for function in (Doubled, Cast):
            assert function.apply(values).shape == (4,)
        for each in (PLAIN, TOLD):
            assert each(values.detach()).shape == (4,)
    seen = watch.seen()
    assert [name.rpartition(".")[2] for name in seen.functions] == ["Doubled"]
    assert [*seen.operators] == ["testcasts::plain"]
    assert __file__ in seen.functions[f"{__name__}.Doubled"]
    patches.restore()
    assert torch.autograd.Function.__dict__["apply"] is before


def test_a_scaler_is_seen_when_it_is_used(patches: PatchSet) -> None:
    watch = AmpWatch(AccelerateWatch())
    watch.install(patches)
    scaler = torch.amp.GradScaler("cuda")
    assert not watch.seen().scaled
    scaler.scale(torch.ones(1, device="cuda"))
    assert watch.seen().scaled


@pytest.mark.parametrize(
    ("force", "dtype", "used"),
    [
        (None, torch.float16, "float16"),
        ("off", torch.float32, None),
        ("bfloat16", torch.bfloat16, "bfloat16"),
    ],
)
def test_autocast_is_seen_and_forced(
    patches: PatchSet, force: Any, dtype: torch.dtype, used: str | None
) -> None:
    switch = AutocastSwitch(force, torch.bfloat16)
    switch.install(patches)
    layer = torch.nn.Linear(4, 4, device="cuda")
    with torch.autocast("cuda", dtype=torch.float16):
        assert layer(torch.ones(2, 4, device="cuda")).dtype is dtype
    assert switch.made == 1 and switch.used == used
    outside = layer(torch.ones(2, 4, device="cuda")).dtype
    assert outside is (torch.bfloat16 if force == "bfloat16" else torch.float32)
