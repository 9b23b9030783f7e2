"""Predicted against published GPU memory: timm models and VGG16 on an A100 40 GB, float32.

The timm truth is GPUMemNet's measurement table (model, batch_size, device_mib; nvidia-smi
MiB), published at https://github.com/itu-rad/GPUMemNet; give its path with --data. The
VGG16 truth is three rows of nvidia-smi (torchvision VGG16, Adam, 224x224, batch 32/64/128).

One constant is a property of the measuring machine, not of a model: its CUDA context with
eagerly loaded kernels, 1,750 MiB, which the smallest jobs of the table show. It is the same
for every row. Each model is simulated at two batch sizes; all rows follow from those two.

    python bench/memory_accuracy.py --data gpumemnet_timm_a100_fp32.csv [--limit N] [--json]
"""

from __future__ import annotations

import argparse
import csv
import dataclasses
import multiprocessing
import statistics
import sys
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import Any

from _bench import Figure, finish

GPU = "A100-SXM4-40GB"
CONTEXT_MIB = 1750
BATCHES = (8, 16)
MODELS = 25
QUICK_MODELS = 8
GOAL_PERCENT = 5.0
VGG16_MIB = {32: 8222, 64: 13642, 128: 24408}


@dataclasses.dataclass(frozen=True)
class Row:
    """One measurement and what was predicted for it, in MiB of device memory."""

    model: str
    batch: int
    measured: int
    allocated: float
    reserved: float
    predicted: float

    @property
    def error_percent(self) -> float:
        return 100 * (self.predicted - self.measured) / self.measured


def main() -> int:
    options = parse()
    truth = read_truth(options.data)
    names = chosen(truth, QUICK_MODELS if options.quick else options.limit)
    rows: list[Row] = []
    with multiprocessing.get_context("spawn").Pool(2) as pool:
        vgg16 = pool.apply_async(predict_vgg16)
        jobs = [pool.apply_async(predict_timm, (name, truth[name])) for name in names]
        for name, job in zip(names, jobs, strict=True):
            found = job.get()
            if isinstance(found, str):
                print(f"{name}: not simulated: {found}", file=sys.stderr)
                continue
            rows += found
        vgg16_rows = vgg16.get()
    if not options.json:
        print_table(rows + vgg16_rows)
    errors = [abs(row.error_percent) for row in rows]
    worst = max(abs(row.error_percent) for row in vgg16_rows)
    figures = [
        Figure("timm_device_median_error", statistics.median(errors), GOAL_PERCENT, True, "%"),
        Figure("timm_models_simulated", len({row.model for row in rows}), len(names), False),
        Figure("vgg16_device_worst_error", worst, GOAL_PERCENT, True, "%"),
    ]
    details = {"rows": [dataclasses.asdict(row) for row in rows + vgg16_rows]}
    return finish(figures, options.json, details)


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=_Plain)
    parser.add_argument("--data", type=Path, required=True, help="GPUMemNet's table (CSV)")
    parser.add_argument("--limit", type=int, default=MODELS, help="number of timm models")
    parser.add_argument("--quick", action="store_true", help=f"{QUICK_MODELS} models")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    if not options.data.is_file():
        parser.error(f"{options.data}: no such file; it is published with GPUMemNet (see --help)")
    return options


class _Plain(argparse.RawDescriptionHelpFormatter):
    pass


def read_truth(path: Path) -> dict[str, dict[int, int]]:
    """Measured MiB by model and batch size, for batches 8 to 128."""
    truth: dict[str, dict[int, int]] = defaultdict(dict)
    with path.open() as stream:
        for row in csv.DictReader(stream):
            batch = int(row["batch_size"])
            if 8 <= batch <= 128:
                truth[row["model"]][batch] = int(row["device_mib"])
    return truth


def chosen(truth: dict[str, dict[int, int]], count: int) -> list[str]:
    """Models at equal distances in the sorted list: a choice that sees no error."""
    import_timm()
    import timm

    known = [name for name in sorted(truth) if timm.is_model(name)]
    step = max(len(known) / count, 1)
    return [known[int(index * step)] for index in range(min(count, len(known)))]


def import_timm() -> None:
    """timm imports torchvision, which needs help beside a CPU build of PyTorch."""
    from trainfit.simgpu.torchvision_shim import define_torchvision_operators

    define_torchvision_operators()


def predict_timm(name: str, truth: dict[int, int]) -> list[Row] | str:
    import_timm()
    import timm
    import torch

    def build() -> tuple[Any, Any, tuple[int, ...]]:
        model = timm.create_model(name)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        return model, optimizer, model.default_cfg["input_size"]

    try:
        return predict(name, build, truth)
    except Exception as error:
        return f"{type(error).__name__}: {str(error)[:120]}"


def predict_vgg16() -> list[Row]:
    import_timm()
    import torch
    import torchvision

    def build() -> tuple[Any, Any, tuple[int, ...]]:
        model = torchvision.models.vgg16()
        return model, torch.optim.Adam(model.parameters()), (3, 224, 224)

    return predict("vgg16 (Adam)", build, VGG16_MIB)


def predict(name: str, build: Callable[[], Any], truth: dict[int, int]) -> list[Row]:
    """Two simulations, then every batch size of ``truth`` by replay."""
    from trainfit.memory.affine import AffineStream
    from trainfit.memory.replay import replay
    from trainfit.simgpu.session import Simulation

    first, second = (record(Simulation(GPU, limited=False), build, batch) for batch in BATCHES)
    law = AffineStream.between(first, BATCHES[0], second, BATCHES[1])
    mib = 1 << 20
    rows = []
    for batch, measured in sorted(truth.items()):
        outcome = replay(
            law.at(batch),
            capacity_bytes=Simulation(GPU).gpu.memory_bytes,
            context_bytes=CONTEXT_MIB * mib,
        )
        reserved = outcome.peak_reserved / mib
        rows.append(
            Row(name, batch, measured, outcome.peak_allocated / mib, reserved,
                reserved + CONTEXT_MIB)
        )  # fmt: skip
    return rows


def record(simulation: Any, build: Callable[[], Any], batch: int) -> Any:
    """Three training steps; parameters are made on the device, where filling them is free."""
    import torch
    from torch.nn import functional

    torch.set_num_threads(1)
    with simulation:
        with torch.device("cuda"):
            model, optimizer, shape = build()
        for _ in range(3):
            images = torch.empty(batch, *shape).cuda()
            labels = torch.zeros(batch, dtype=torch.long).cuda()
            loss = functional.cross_entropy(model(images), labels)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
    return simulation.recording


def print_table(rows: list[Row]) -> None:
    print(f"{'model':<36}{'batch':>6}{'measured':>10}{'reserved':>10}{'predicted':>10}{'error':>8}")
    for row in rows:
        print(
            f"{row.model:<36}{row.batch:>6}{row.measured:>10}{row.reserved:>10.0f}"
            f"{row.predicted:>10.0f}{row.error_percent:>+7.1f}%"
        )


if __name__ == "__main__":
    sys.exit(main())
