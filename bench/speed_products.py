"""Large matmuls next to what PyTorch reached on many GPUs: the model's peaks.

Steps of models say little of GPUs that nobody published steps of; products of 8192 x 8192 matrices
were measured on most. The table is from https://github.com/zzc0721/torch-performance-test-data
(database.md and the issues that are named; PyTorch 2.2 to 2.9), in TFLOP/s: float32 without TF32,
and float16 or bfloat16 on Tensor cores (the mean of both where both were measured). The shares of
the peaks in `speed/kernel_times` are from it (docs/decisions/0040), so that this shows how much of
so many GPUs so few constants explain; it is no test on GPUs that were held out.

    python bench/speed_products.py [--quick] [--json]
"""

from __future__ import annotations

import statistics
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Final

from _bench import Figure, finish, quick_options

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "src"))

from trainfit.hardware import find_gpu
from trainfit.plan.sizing.costing import machine_of
from trainfit.speed.measured import product_flops

#: TFLOP/s in float32 and in half precision, ``None`` where the GPU has no Tensor cores, and where
#: it was published ("db": database.md).
PUBLISHED: Final[Mapping[str, tuple[float, float | None, str]]] = {
    "P100 PCIe": (8.63, None, "issue 177"),
    "P100 SXM": (9.50, None, "issue 180"),
    "V100 16GB SXM": (14.4, 97.4, "issue 140"),
    "T4": (4.17, 41.9, "db"),
    "A100 40GB PCIe": (17.6, 206.0, "issue 108"),
    "A100 80GB SXM": (19.2, 262.0, "db"),
    "RTX 3080 10GB": (21.0, 63.8, "issue 114"),
    "RTX 3090": (24.5, 76.0, "db"),
    "RTX A4000": (11.9, 58.5, "issue 97"),
    "A40": (23.7, 110.0, "issue 185"),
    "L4": (10.7, 56.6, "issue 120"),
    "RTX 4090": (54.7, 164.0, "db"),
    "H100 PCIe": (37.0, 465.0, "issue 95"),
    "H100 SXM": (51.8, 767.0, "issue 79"),
    "B200": (66.2, 1662.0, "db"),
    "RTX 5080": (33.1, 102.6, "issue 104"),
    "RTX 5090": (66.3, 230.0, "pull 15"),
}
SIDE = 8192


def main() -> int:
    options = quick_options(__doc__)
    rows = compared()
    if not options.json:
        print(f"{'GPU':<16}{'float32':>9}{'published':>11}{'':>6}{'half':>9}{'published':>11}")
        for name, pairs in rows.items():
            line = f"{name:<16}"
            for predicted, published in pairs:
                line += f"{predicted:>9.4g}{published:>11.4g}{predicted / published - 1:>+6.0%}"
            print(line)
        print()
    figures = [
        Figure(f"{name}_product_median_error", 100 * median(rows, place), 10, True, "%")
        for place, name in enumerate(("float32", "half_precision"))
    ]
    return finish(figures, options.json, {"tflops_predicted_and_published": rows})


def compared() -> dict[str, list[tuple[float, float]]]:
    """For each GPU TFLOP/s predicted and published, in float32 and (if it can) in float16."""
    rows = {}
    for name, (float32, half, _) in PUBLISHED.items():
        machine = machine_of(find_gpu(name))
        rows[name] = [(product_flops(machine, "float32", SIDE) / 1e12, float32)]
        if half is not None:
            rows[name].append((product_flops(machine, "float16", SIDE) / 1e12, half))
    return rows


def median(rows: Mapping[str, list[tuple[float, float]]], place: int) -> float:
    """Of the errors in one column."""
    pairs = [each[place] for each in rows.values() if len(each) > place]
    return statistics.median(abs(predicted / published - 1) for predicted, published in pairs)


if __name__ == "__main__":
    sys.exit(main())
