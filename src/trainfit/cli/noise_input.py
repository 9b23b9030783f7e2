"""Option values about learning: noise scales, learning rates, decay rates."""

from __future__ import annotations

import argparse
import math
import re
from pathlib import Path

from trainfit.cli.common import UsageError
from trainfit.results.batch.noise import MOST_SAMPLES, Interval, NoiseResult, samples_text

_RANGE = re.compile(r"(?P<value>[^:]+?)(?::(?P<low>[^:]*):(?P<high>[^:]*))?")


def noise_scale(text: str) -> Interval | Path:
    """An argparse type: ``200``, ``200:150:280`` (with its interval), or a result's file."""
    try:
        value, low, high = _numbers(text)
    except ValueError:
        return Path(text)
    if not 0 < low <= value <= high <= MOST_SAMPLES:
        raise argparse.ArgumentTypeError(
            f"expected a noise scale in samples such as 200 or 200:150:280, got {text!r}"
        )
    return Interval(value, low, high)


def _numbers(text: str) -> tuple[float, float, float]:
    found = _RANGE.fullmatch(text.strip())
    if found is None:
        raise ValueError(text)
    value = float(found["value"])
    return value, float(found["low"] or value), float(found["high"] or value)


def rate(text: str) -> float:
    """An argparse type: a positive number, such as a learning rate."""
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not 0 < value < math.inf:
        raise argparse.ArgumentTypeError(f"expected a positive number, got {text!r}")
    return value


def decay(text: str) -> float:
    """An argparse type: a number between 0 and 1, such as beta2."""
    value = rate(text)
    if value >= 1:
        raise argparse.ArgumentTypeError(f"expected a number between 0 and 1, got {text!r}")
    return value


def read_noise(given: Interval | Path | None) -> tuple[Interval | None, str, NoiseResult | None]:
    """The noise scale, where it is from, and the result that it is of.

    Raises ``ResultFileError`` and :class:`UsageError`: a result without a noise scale.
    """
    if given is None:
        return None, "", None
    if isinstance(given, Interval):
        return given, "given", None
    result = NoiseResult.load(given)
    if result.noise is None:
        raise UsageError(
            f"{str(given)!r} has no noise scale: {result.cannot_tell}; measure more, or give "
            "--noise-scale"
        )
    average = samples_text(result.batch_size)
    source = f"{given.name}: {result.steps_used} measured steps at batch {average}"
    return result.noise, source, result
