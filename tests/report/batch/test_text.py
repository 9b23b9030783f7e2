"""A measured noise scale as text."""

from __future__ import annotations

import dataclasses
import re

from trainfit.report.batch import noise_screen, noise_text
from trainfit.report.layout import plain_text
from trainfit.results.batch import Interval, ModuleNoise, Moment, NoiseResult

NOISE = Interval(210.4, 170.0, 1260.0)
FOUND = NoiseResult(
    "accumulation", 8, 4, 1, 900, 512,
    NOISE, Interval(1.0, 0.9, 1.1), Interval(210.0, 200.0, 220.0),
    modules=tuple(ModuleNoise(f"layer{n}", 10, NOISE, n / 36) for n in range(9)),
    history=(Moment(32, Interval(5.5, 4.0, 7.0)), Moment(800, NOISE)),
    steps_left_out={"x": 3}, left_out=("a.weight: its gradient is sparse",), cost_share=0.0123,
)  # fmt: skip


def test_all_of_it_is_shown() -> None:
    text = noise_text(FOUND)
    text = re.sub(r"\n {4}", " ", text)
    assert text.startswith("Noise scale 210 (170 to 1,260) samples, batch 32\n")
    for words in (
        "8 × 4 micro-batches × 1 rank", "512 measured steps of 900", "cost 1.2%",
        "5.5 (4 to 7) around step 32", "3 steps left out: x", "its gradient is sparse",
        "layer0", "layer8",
    ):  # fmt: skip
        assert words in text
    screen = plain_text(noise_screen(FOUND))
    assert "3 more modules" in screen and "layer8" in screen and "layer1 " not in screen


def test_what_is_not_known_is_said() -> None:
    nothing = dataclasses.replace(FOUND, noise=None, modules=(), history=(), cannot_tell="train on")
    assert noise_text(nothing).startswith("Noise scale not known: train on")
    unbounded = dataclasses.replace(
        FOUND, noise=Interval(None, 170.0, None), cannot_tell="no upper bound"
    )
    assert "at least 170 samples, batch 32: no upper bound" in noise_text(unbounded)
