"""Predicted against published GPU memory: timm models and VGG16 on an A100 40 GB, float32.

The timm truth is GPUMemNet's measurement table (model, batch_size, device_mib; nvidia-smi
MiB), published at https://github.com/itu-rad/GPUMemNet; give its path with --data. Its runs
were timm's own training script with its defaults (the repository says: TIMM models with lines
added to estimate with FakeTensor), in a version of August 2024: timm 1.0.9 has the same models.
So the loop here is that script's: images prefetched on a side stream, SGD with Nesterov
momentum, label smoothing, torch.backends.cudnn.benchmark. The VGG16 truth is three rows of
nvidia-smi from another script (torchvision VGG16, Adam, 224x224, cudnn.benchmark off).

One constant is a property of the measuring machine, not of a model: its CUDA context with the
libraries' kernels, 1,700 MiB, which the smallest jobs of the table show. It is the same for
every row. Each model is simulated at two batch sizes; all rows follow from those two.

Left out are rows of which the table itself says that the run cannot have finished: the line
through the two next smaller batch sizes of the model leaves the GPU.

    python bench/memory_accuracy.py --data gpumemnet_timm_a100_fp32.csv [--limit N] [--json]
"""

from __future__ import annotations

import csv
import dataclasses
import functools
import multiprocessing
import statistics
import sys
import typing
from collections import defaultdict
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from _bench import BenchFigure, finish, leave, parser, say, table

GPU = "A100-SXM4-40GB"
CONTEXT_MIB = 1700
CAPACITY_MIB = 40536
BATCHES = (8, 16)
STEPS = 3
QUICK_MODELS = 16
VGG16_MIB = {32: 8222, 64: 13642, 128: 24408}


@dataclasses.dataclass(frozen=True)
class MemoryRow:
    """One measurement and what was predicted for it, in MiB of device memory."""

    model: str
    batch: int
    measured: int
    allocated: float
    reserved: float
    low: float
    high: float

    @property
    def predicted(self) -> float:
        return self.reserved + CONTEXT_MIB

    @property
    def error_percent(self) -> float:
        return 100 * (self.predicted - self.measured) / self.measured


def main() -> int:
    options = parse()
    truth = read_truth(options.data)
    names = chosen(truth, QUICK_MODELS if options.quick else options.limit)
    rows: list[MemoryRow] = []
    with multiprocessing.get_context("spawn").Pool(2) as pool:
        vgg16 = pool.apply_async(predict_vgg16)
        jobs = [pool.apply_async(predict_timm, (name, truth[name])) for name in names]
        for name, job in zip(names, jobs, strict=True):
            found = job.get()
            if isinstance(found, str):
                say(f"{name}: not simulated: {found}")
                continue
            rows += found
        vgg16_rows = vgg16.get()
    details = {"rows": [dataclasses.asdict(row) for row in rows + vgg16_rows]}
    heads = ("model", "batch", "measured, MiB", "low", "predicted", "high", "error")
    tables = [table(heads, map(cells, rows + vgg16_rows))]
    return finish(figures(rows, vgg16_rows, len(names)), options.json, details, tables)


def figures(rows: list[MemoryRow], vgg16_rows: list[MemoryRow], models: int) -> list[BenchFigure]:
    errors = [row.error_percent for row in rows]
    sizes = sorted(map(abs, errors))
    inside = [row.low <= row.measured <= row.high for row in rows]
    above = [row.measured > row.high for row in rows]
    worst = max(abs(row.error_percent) for row in vgg16_rows)
    return [
        BenchFigure("device_median_error", statistics.median(sizes), 2.0, True, "%"),
        BenchFigure("device_p90_error", sizes[int(0.9 * len(sizes))], 6.0, True, "%"),
        BenchFigure("under_by_2_percent", share(error < -2 for error in errors), 1.0, True, "%"),
        BenchFigure("inside_interval", share(inside), 90.0, False, "%"),
        BenchFigure("above_interval", share(above), 5.0, True, "%"),
        BenchFigure("timm_models_simulated", len({row.model for row in rows}), models, False),
        BenchFigure("vgg16_worst_error", worst, 4.0, True, "%"),
    ]


def share(flags: Iterable[bool]) -> float:
    """Per cent of ``flags`` that are true."""
    return 100 * statistics.fmean(flags)


def parse() -> Any:
    made = parser(__doc__, quick=f"{QUICK_MODELS} models", data="GPUMemNet's table (CSV)")
    made.add_argument("--limit", type=int, help="number of timm models (default: all)")
    options = made.parse_args()
    if not options.data.is_file():
        leave(f"{options.data}: no such file; it is published with GPUMemNet (see --help)")
    return options


def read_truth(path: Path) -> dict[str, dict[int, int]]:
    """Measured MiB by model and batch size, of the runs that can have finished."""
    truth: dict[str, dict[int, int]] = defaultdict(dict)
    with path.open() as stream:
        for row in csv.DictReader(stream):
            truth[row["model"]][int(row["batch_size"])] = int(row["device_mib"])
    return {name: {b: of[b] for b in of if not outgrown(of, b)} for name, of in truth.items()}


def outgrown(measured: dict[int, int], batch: int) -> bool:
    """Does the line through the two next smaller batch sizes leave the GPU at ``batch``?

    Such a run ended out of memory, and its figure is how far it came.
    """
    smaller = sorted(other for other in measured if other < batch)[-2:]
    if len(smaller) < 2:
        return False
    one, two = smaller
    slope = (measured[two] - measured[one]) / (two - one)
    return measured[two] + slope * (batch - two) > CAPACITY_MIB


def chosen(truth: dict[str, dict[int, int]], count: int | None) -> list[str]:
    """Models at equal distances in the sorted list: a choice that sees no error."""
    import_timm()
    import timm

    known = [name for name in sorted(truth) if timm.is_model(name)]
    step = max(len(known) / (count or len(known)), 1)
    return [known[int(index * step)] for index in range(min(count or len(known), len(known)))]


def import_timm() -> None:
    """timm imports torchvision, which needs help next to a CPU build of PyTorch."""
    from trainfit.simgpu.operators.torchvision_operators import define_torchvision_operators

    define_torchvision_operators()


class SimulatedTraining(typing.NamedTuple):
    """A model on the simulated GPU, its optimizer, the shape of an image, and its loop."""

    model: Any
    optimizer: Any
    shape: tuple[int, ...]
    train: Callable[[SimulatedTraining, int], None]


def predict_timm(name: str, truth: dict[int, int]) -> list[MemoryRow] | str:
    """Rows, or why there are none. A model that cannot be made on the GPU is moved there."""
    import_timm()
    import timm
    import torch
    from timm.optim import create_optimizer_v2

    def build(where: str) -> SimulatedTraining:
        with torch.device(where):
            model = timm.create_model(name)
        model.cuda()
        optimizer = create_optimizer_v2(model, opt="sgd", lr=0.05, momentum=0.9, weight_decay=2e-5)
        return SimulatedTraining(model, optimizer, model.default_cfg["input_size"], train_as_timm)

    problem = ""
    for where in ("cuda", "cpu"):
        try:
            return predict(name, functools.partial(build, where), truth)
        except Exception as error:
            problem = f"{type(error).__name__}: {str(error)[:120]}"
    return problem


def predict_vgg16() -> list[MemoryRow]:
    import_timm()
    import torch
    import torchvision

    def build() -> SimulatedTraining:
        with torch.device("cuda"):
            model = torchvision.models.vgg16()
        return SimulatedTraining(
            model, torch.optim.Adam(model.parameters()), (3, 224, 224), train_plainly
        )

    return predict("vgg16 (Adam)", build, VGG16_MIB)


def predict(
    name: str, build: Callable[[], SimulatedTraining], truth: dict[int, int]
) -> list[MemoryRow]:
    """Two simulations, then every batch size of ``truth`` by replay."""
    from trainfit.memory.affine import AffineStream
    from trainfit.memory.capacity import bounds_of
    from trainfit.memory.replay import replay
    from trainfit.simgpu.session import Simulation

    first, second = (record(Simulation(GPU, limited=False), build, batch) for batch in BATCHES)
    law = AffineStream.between(first, BATCHES[0], second, BATCHES[1])
    capacity = Simulation(GPU).gpu.memory_bytes
    mib = 1 << 20
    rows = []
    for batch, measured in sorted(truth.items()):
        stream = law.at(batch)
        outcome = replay(stream, capacity_bytes=capacity, context_bytes=CONTEXT_MIB * mib)
        _, bounds = bounds_of(outcome)
        rows.append(
            MemoryRow(
                name,
                batch,
                measured,
                outcome.peak_allocated / mib,
                outcome.peak_reserved / mib,
                bounds.low / mib + CONTEXT_MIB,
                bounds.high / mib + CONTEXT_MIB,
            )
        )
    return rows


def record(simulation: Any, build: Callable[[], SimulatedTraining], batch: int) -> Any:
    """Three training steps; parameters are made on the device, where filling them is free."""
    import torch

    torch.set_num_threads(1)
    with simulation:
        job = build()
        job.train(job, batch)
    return simulation.recording


def train_as_timm(job: SimulatedTraining, batch: int) -> None:
    """The loop of timm's train.py with its defaults."""
    import torch
    from timm.data.loader import PrefetchLoader
    from timm.loss import LabelSmoothingCrossEntropy

    images = torch.zeros(batch, *job.shape, dtype=torch.uint8)
    labels = torch.zeros(batch, dtype=torch.long)
    batches = [(images, labels)] * (STEPS + 1)
    criterion = LabelSmoothingCrossEntropy(0.1).cuda()
    torch.backends.cudnn.benchmark = True
    try:
        loader = PrefetchLoader(batches, channels=job.shape[0], device=torch.device("cuda"))
        for step, (images, labels) in enumerate(loader):
            loss = forward(job.model, images, labels, criterion)
            loss.backward()
            job.optimizer.step()
            job.optimizer.zero_grad()
            if step == STEPS - 1:
                break
    finally:
        torch.backends.cudnn.benchmark = False


def forward(model: Any, images: Any, labels: Any, criterion: Any) -> Any:
    """As in train.py, a function of its own: the output is gone when it returns."""
    output = model(images)
    return criterion(output, labels)


def train_plainly(job: SimulatedTraining, batch: int) -> None:
    import torch
    from torch.nn import functional

    for _ in range(STEPS):
        images = torch.empty(batch, *job.shape).cuda()
        labels = torch.zeros(batch, dtype=torch.long).cuda()
        loss = functional.cross_entropy(job.model(images), labels)
        job.optimizer.zero_grad()
        loss.backward()
        job.optimizer.step()


def cells(row: MemoryRow) -> tuple[object, ...]:
    sizes = (f"{each:.0f}" for each in (row.low, row.predicted, row.high))
    return (row.model, row.batch, row.measured, *sizes, f"{row.error_percent:+.1f}%")


if __name__ == "__main__":
    sys.exit(main())
