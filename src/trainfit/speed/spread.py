"""The prediction interval of a step, from how well the kernels are known that it consists of.

Each class of kernels has an error of its own, by measured kernels (``bench/kernel_accuracy.py``,
``bench/speed_accuracy.py``). Within a step it is taken to be alike for a class's kernels, and
independent between classes: a step's interval is wide where much of its time lies in kernels
that are little known, and these are named.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from typing import Final

import numpy as np

from trainfit.results.runs.steps import DTYPES, KINDS
from trainfit.speed.work import Floats, Work

#: By class: nine of ten steps' sums of its kernels lie within this of what is predicted
#: (logarithm).
_SPREADS: Final = {
    "large matmuls": 0.10,
    "matmuls of 1 to 10 GFLOP": 0.13,
    "small matmuls": 0.20,
    "attention": 0.15,
    "short attention": 0.30,
    "convolutions": 0.22,
    "grouped and depthwise convolutions": 0.30,
    "recurrent layers": 0.40,
    "memory-bound kernels": 0.17,
    "look-ups, resampling and pooling": 0.30,
    "sorts": 0.40,
    "operators without a FLOP rule": 1.0,
    "launches by the CPU": 0.50,
    "copies from the host": 0.35,
    "collectives": 0.40,
}
CLASSES: Final = tuple(_SPREADS)
#: Classes whose kernels are alike in every dtype, but for its size.
_OF_ANY_DTYPE: Final = ("memory-bound kernels", "look-ups, resampling and pooling", "sorts")
_HALVES: Final = ("float16", "bfloat16")
#: What all kernels have in common: the card's clocks, its cooling, the library's version.
_COMMON: Final = 0.07
#: The same where a calibration profile measured the card.
_CALIBRATED: Final = 0.05
#: Where a core's speed was measured, launches are known so far (the medians of three jobs at two
#: batch sizes each, all of them launches, are up to 30% apart on one machine); copies where they
#: were measured (most jobs' are larger than the caches, and less even).
_MEASURED_CORE: Final = 0.25
_MEASURED_COPIES: Final = 0.20
#: A class is named that has so much of the variance that is not common to all, if the interval is
#: wider than this.
_NAMED_SHARE: Final = 0.25
_NARROW: Final = 0.13
_LARGE, _MEDIUM = 1e10, 1e9
_SHORT: Final = 2048


@dataclasses.dataclass(frozen=True)
class StepSpread:
    """How wide a step's time is: factors on it between which nine of ten lie, and which classes of
    kernels make it wide, the widest first."""

    low: float
    high: float
    wide_for: tuple[str, ...] = ()


@dataclasses.dataclass(frozen=True)
class ClassCost:
    """What a class of kernels takes on a GPU where some of it was measured.

    Attributes:
        factor: measured time, as a multiple of the model's.
        spread: how far single programs of the class lie from that (logarithm); ``None`` where too
            few were measured to say.
    """

    factor: float
    spread: float | None = None


def factors_of(work: Work, measured: Mapping[str, ClassCost]) -> Floats:
    """The factor of each kernel by its class; 1 where nothing was measured. What computes was
    measured in half precision, and libraries have other kernels for others."""
    by_class = np.array([measured[name].factor if name in measured else 1.0 for name in CLASSES])
    return np.where(_told(work), by_class[classes_of(work)], 1.0)


def _told(work: Work) -> np.ndarray[tuple[int], np.dtype[np.bool_]]:
    """Which kernels programs in half precision tell of."""
    halves = np.isin(work.column("dtype"), [DTYPES.index(name) for name in _HALVES])
    found: np.ndarray[tuple[int], np.dtype[np.bool_]] = halves | np.isin(
        classes_of(work), [CLASSES.index(name) for name in _OF_ANY_DTYPE]
    )
    return found


def spread_of(
    work: Work,
    seconds: Floats,
    step_s: float,
    *,
    core_measured: bool,
    calibrated: bool,
    host_s: float = 0.0,
    launching_s: float = 0.0,
    copies_s: float = 0.0,
    exposed_s: float = 0.0,
    measured: Mapping[str, ClassCost] | None = None,
) -> StepSpread:
    """The spread of a step of ``step_s`` whose kernels take ``seconds`` each and copies from the
    host ``copies_s``, which the CPU takes ``host_s`` to launch and which goes at its pace for
    ``launching_s``, and which collectives make ``exposed_s`` longer; ``measured`` are classes that
    were measured on the GPU."""
    classes = classes_of(work)
    totals, told = (
        np.bincount(classes, weights=each, minlength=len(CLASSES)).astype(np.float64)
        for each in (seconds, seconds * _told(work))
    )
    told /= np.maximum(totals, 1e-12)
    totals[CLASSES.index("copies from the host")] = copies_s
    # While the CPU is the limit, it does not matter how long kernels take.
    left = max(0.0, step_s - exposed_s - launching_s)
    totals *= left / max(float(totals.sum()), 1e-12)
    totals[CLASSES.index("launches by the CPU")] = launching_s
    totals[CLASSES.index("collectives")] = exposed_s
    spreads = dict(_SPREADS)
    if core_measured:
        spreads["launches by the CPU"] = _MEASURED_CORE
    if calibrated:
        spreads["copies from the host"] = _MEASURED_COPIES
    for name, cost in (measured or {}).items():
        if cost.spread is not None:
            share = float(told[CLASSES.index(name)])
            spreads[name] = share * cost.spread + (1 - share) * spreads[name]
    shares = totals / max(float(totals.sum()), 1e-12)
    parts = (shares * np.array(list(spreads.values()))) ** 2
    common = _CALIBRATED if calibrated else _COMMON
    width = math.sqrt(common**2 + float(parts.sum()))
    named: list[str] = []
    if width > _NARROW:
        order = np.argsort(-parts)
        named = [CLASSES[each] for each in order if parts[each] > _NAMED_SHARE * parts.sum()]
    # A CPU that is as slow as it may be can be the limit where it is none.
    slow = host_s * math.exp(spreads["launches by the CPU"]) / max(step_s, 1e-12)
    return StepSpread(math.exp(-width), max(math.exp(width), slow), tuple(named))


def classes_of(work: Work) -> np.ndarray[tuple[int], np.dtype[np.int64]]:
    """The class of each kernel, as an index of all."""
    classes = _OF_KINDS[work.column("kind")].copy()
    flops = work.column("flops")
    products = work.is_kind("matmul")
    classes[products & (flops < _LARGE)] = CLASSES.index("matmuls of 1 to 10 GFLOP")
    classes[products & (flops < _MEDIUM)] = CLASSES.index("small matmuls")
    fused = work.is_kind("attention", "attention_gradient")
    classes[fused & (work.column("rows") < _SHORT)] = CLASSES.index("short attention")
    return classes


def _class_of_kind(name: str) -> int:
    by_start = {
        "matmul": "large matmuls",
        "attention": "attention",
        "convolution": "convolutions",
        "grouped": "grouped and depthwise convolutions",
        "depthwise": "grouped and depthwise convolutions",
        "recurrent": "recurrent layers",
        "indexing": "look-ups, resampling and pooling",
        "resampling": "look-ups, resampling and pooling",
        "pooling": "look-ups, resampling and pooling",
        "sorting": "sorts",
        "unknown": "operators without a FLOP rule",
    }
    found = (named for start, named in by_start.items() if name.startswith(start))
    return CLASSES.index(next(found, "memory-bound kernels"))


_OF_KINDS: Final = np.array([_class_of_kind(name) for name in KINDS], dtype=np.int64)
