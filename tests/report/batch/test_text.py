"""What is said of a measured noise scale."""

from __future__ import annotations

import dataclasses
import re

from trainfit.report.layout import LINES, plain_text
from trainfit.report.sections.batch import noise_subject
from trainfit.report.writers.terminal import screen, whole
from trainfit.results.batch import Interval, ModuleNoise, NoiseMoment, NoiseResult

NOISE = Interval(210.4, 170.0, 1260.0)
FOUND = NoiseResult(
    "accumulation", 8, 4, 1, 900, 512,
    NOISE, Interval(1.0, 0.9, 1.1), Interval(210.0, 200.0, 220.0),
    modules=tuple(ModuleNoise(f"layer{n}", 10, NOISE, n / 180) for n in range(19)),
    history=(NoiseMoment(32, Interval(5.5, 4.0, 7.0)), NoiseMoment(800, NOISE)),
    steps_left_out={"x": 3}, left_out=("a.weight: its gradient is sparse",), cost_share=0.0123,
)  # fmt: skip


def test_all_of_it_is_said() -> None:
    text = re.sub(r"\s+", " ", plain_text(whole(noise_subject(FOUND))))
    assert text.startswith("Noise scale 210 (170 to 1,260) samples, batch 32.")
    for words in (
        "8 × 4 micro-batches × 1 rank", "512 measured steps of 900", "1.2% of the time",
        "5.5 (4 to 7) around step 32", "3 steps left out: x", "its gradient is sparse",
        "layer0", "layer18", "90%",
    ):  # fmt: skip
        assert words in text


def test_modules_with_small_parts_give_way() -> None:
    lines = plain_text(screen(noise_subject(FOUND))).splitlines()
    assert len(lines) <= LINES and lines[-1].endswith(": --explain")
    assert "layer18" in "\n".join(lines) and "layer0 " not in "\n".join(lines)


def test_what_is_not_known_is_said() -> None:
    def first(result: NoiseResult) -> str:
        return " ".join(plain_text(whole(noise_subject(result))).splitlines()[:2])

    nothing = dataclasses.replace(FOUND, noise=None, modules=(), history=(), cannot_tell="train on")
    assert first(nothing).startswith("Noise scale not known: train on")
    unbounded = dataclasses.replace(
        FOUND, noise=Interval(None, 170.0, None), cannot_tell="no upper bound"
    )
    assert "at least 170 samples, batch 32: no upper bound" in first(unbounded)
