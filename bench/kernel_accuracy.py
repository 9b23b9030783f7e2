"""Times of kernels against published measurements, by GPU and class; no class may become worse.

The rows are measured kernels of aiconfigurator (matmuls and attention in bfloat16 on A100, H100,
L40S, B200), modules of Liger-Kernel's benchmarks and NVIDIA's ResNet-50 (DeepLearningExamples);
--truth is the folder of their tables. Each goes through the model that a plan uses. The table
of the last accepted run is bench/kernel_accuracy.json: a median or a 90th percentile that is more
than 2 points worse fails. --accept writes this run's in its place (of all rows only).

--left-out predicts each of the four GPUs by its datasheet and the design of the architecture next
to its own, as if nothing had been measured on it; matmuls and attention only, without a goal.

    python bench/kernel_accuracy.py --truth DIR [--quick] [--json] [--accept | --left-out]

Exit status: 0 if nothing is worse and every goal holds, 1 if not, 2 for bad input.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import sys
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Final

import _kernel_rows as rows
import numpy as np
from _bench import BenchFigure, finish, leave, parser, say, table

from trainfit.speed import products

ACCEPTED = Path(__file__).with_suffix(".json")
FILES = ("kernels_gemm_bf16.csv", "kernels_attention_bf16.csv", "modules_liger.csv")
#: Points by which a figure may be worse than the accepted one.
LEEWAY = 2.0
#: With --quick one row of so many; the accepted table is of all, so figures differ by chance.
QUICK, QUICK_LEEWAY = 8, 8.0
#: Of classes: the goals of the median and of the 90th percentile.
GOALS: Final[Mapping[str, tuple[float, float | None]]] = {
    "GEMM from 10 GFLOP": (5, 15),
    "GEMM 1-10 GFLOP": (10, 20),
    "GEMM m <= 64": (15, 30),
    "attention from 2,048 tokens": (12, None),
}


@dataclasses.dataclass(frozen=True)
class ClassErrors:
    """Errors of one class on one GPU, in percent."""

    gpu: str
    kind: str
    rows: int
    median: float
    p90: float
    bias: float

    @classmethod
    def of(cls, compared: rows.ComparedRows) -> ClassErrors:
        errors = compared.errors
        size = np.abs(errors)
        return cls(
            compared.gpu, compared.kind, len(errors),
            *(round(float(each), 1)
              for each in (np.median(size), np.quantile(size, 0.9), np.median(errors))),
        )  # fmt: skip

    @property
    def key(self) -> str:
        return f"{self.gpu}, {self.kind}"


def main(argv: list[str] | None = None) -> int:
    options = parse(argv)
    if options.left_out:
        apart = [ClassErrors.of(each) for each in left_out(options.data)]
        return finish([], options.json, {}, [shown(apart, {})])
    lines = [ClassErrors.of(each) for each in compared(options.data, QUICK if options.quick else 1)]
    accepted = read_accepted()
    worse = list(worsened(lines, accepted, QUICK_LEEWAY if options.quick else LEEWAY))
    for text in worse:
        say(f"worse{', accepted' if options.accept else ''}: {text}")
    if options.accept:
        write_accepted(lines)
        worse = []
    details = {"lines": [dataclasses.asdict(line) for line in lines], "worse": worse}
    return finish(figures(lines, worse), options.json, details, [shown(lines, accepted)])


def compared(folder: Path, every: int) -> Iterable[rows.ComparedRows]:
    """All classes that have rows."""
    for source in (rows.products, rows.attention, rows.modules):
        yield from (each for each in source(folder, every) if len(each.measured_s))
    yield from rows.networks()


#: Of GPUs the architecture (compute capability) whose design stands for theirs when left out.
NEIGHBOURS: Final = {
    "A100 80GB SXM": ((8, 0), (8, 9)),
    "L40S": ((8, 9), (8, 0)),
    "H100 SXM": ((9, 0), (10, 0)),
    "B200": ((10, 0), (9, 0)),
}


def left_out(folder: Path) -> Iterable[rows.ComparedRows]:
    """Each GPU's matmuls and attention by the design of another architecture."""
    designs = dict(products.DESIGNS)
    for gpu, (own, other) in NEIGHBOURS.items():
        products.DESIGNS[own] = designs[other]
        for source in (rows.products, rows.attention):
            yield from (each for each in source(folder, 1) if each.gpu == gpu)
        products.DESIGNS[own] = designs[own]


def worsened(
    lines: Iterable[ClassErrors], accepted: Mapping[str, ClassErrors], leeway: float
) -> Iterable[str]:
    """What is worse than it was by more than ``leeway`` points."""
    for line in lines:
        before = accepted.get(line.key)
        if before is None:
            continue
        for name in ("median", "p90"):
            now, then = getattr(line, name), getattr(before, name)
            if now > then + leeway:
                yield f"{line.key}: {name} {now}%, accepted {then}%"


def figures(lines: Iterable[ClassErrors], worse: list[str]) -> list[BenchFigure]:
    found = []
    for line in lines:
        median, p90 = GOALS.get(line.kind, (None, None))
        for name, goal in (("median", median), ("p90", p90)):
            if goal is not None:
                title = f"{line.key}, {name}".lower().replace(", ", "_").replace(" ", "_")
                found.append(BenchFigure(title, getattr(line, name), goal, True, "%"))
    return [*found, BenchFigure("classes_worse_than_accepted", len(worse), 0, True)]


def shown(lines: Iterable[ClassErrors], accepted: Mapping[str, ClassErrors]) -> str:
    """The table: each class with what was accepted."""
    rows = []
    for line in lines:
        before = accepted.get(line.key)
        then = f"{before.median:.1f}% ({before.p90:.0f}%)" if before is not None else "-"
        percents = f"{line.median:.1f}%", f"{line.p90:.0f}%", f"{line.bias:+.1f}%"
        rows.append((line.gpu, line.kind, line.rows, *percents, then))
    return table(("GPU", "class", "rows", "median", "p90", "bias", "accepted"), rows)


def read_accepted() -> dict[str, ClassErrors]:
    """The table of the last accepted run; empty before there was one."""
    if not ACCEPTED.is_file():
        return {}
    lines = [ClassErrors(**each) for each in json.loads(ACCEPTED.read_text())]
    return {line.key: line for line in lines}


def write_accepted(lines: Iterable[ClassErrors]) -> None:
    texts = [json.dumps(dataclasses.asdict(line)) for line in lines]
    ACCEPTED.write_text("[\n" + ",\n".join(texts) + "\n]\n")


def parse(argv: list[str] | None) -> argparse.Namespace:
    made = parser(__doc__, quick=f"one row of {QUICK}", data="folder of the tables")
    made.add_argument("--left-out", action="store_true", help="each by another architecture")
    made.add_argument("--accept", action="store_true", help=f"write {ACCEPTED.name}")
    options = made.parse_args(argv)
    for name in FILES:
        if not (options.data / name).is_file():
            leave(f"{options.data / name}: no such file; --data takes the folder with it")
    if options.accept and options.quick:
        leave("--accept takes all rows: leave --quick out")
    return options


if __name__ == "__main__":
    sys.exit(main())
