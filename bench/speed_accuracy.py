"""Predicted against published step times: timm's benchmark tables.

The tables are those of timm's repository (results/benchmark-*.csv in
https://github.com/huggingface/pytorch-image-models); --data is the folder that holds them under
the names below. Every model's step is simulated as timm's script makes it, at the row's batch and
image size. Figures:

    GPU      constants fitted to half of the models, errors of the other half: first to all tables'
             steps of that half, then to this GPU's, drawn to the first
    A to B   constants fitted to all rows of A; B's own are not used

Beside it, in the same halves: a roofline of the whole model, its constant fitted.

Models that the installed timm does not have are named and left out: --timm PATH takes another
one (pip install --no-deps --target PATH timm). Steps are kept (--cache) and read again.

    python bench/speed_accuracy.py --data FOLDER [--timm PATH] [--rows N] [--json]
"""

from __future__ import annotations

import argparse
import csv
import dataclasses
import multiprocessing
import random
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import _speed_fit as fitting
import numpy as np
from _bench import ROOT, BenchFigure, finish, leave, parser, say
from _bench import table as columns
from _speed_fit import Steps, whole_model
from _timm_steps import PublishedStep, steps

from trainfit.hardware import find_gpu
from trainfit.speed.efficiency import Efficiency

CACHE = ROOT / "data" / "speed-bench"
QUICK_ROWS = 40
SEED = 6
#: A GPU's own constants lie nearer to those of all than anything is known beforehand.
NEAR = 0.5


@dataclasses.dataclass(frozen=True)
class TimmTable:
    """A file of timm's: its GPU, and what its script was run with."""

    file: str
    gpu: str
    mode: Any
    options: tuple[str, ...] = ()


#: The script's options that the tables' names do not say were told from their rows. Without
#: --fast-norm models with group normalization (efficientnet_b3_gn, resnetv2_50x1_bit) take twice
#: the time: those of the RTX 5090 do. Without --reparam models that can be re-parametrized
#: (repvgg_b1, mobileone_s4, fastvit_s12) take up to twice the time: those of the RTX 3090 do.
_INFER = ("fast_norm", "reparam")
#: PyTorch 2.4: attention that no fused kernel takes (Nest's has five dimensions) stays in halves.
_INFER_2024 = ("fast_norm", "half_math")
#: Of the tables of 2022, models whose layers are others by now.
_REPLACED = {"tresnet": "in timm 0.6 its normalization was the kernels of the package inplace_abn"}
TABLES = (
    TimmTable("timm_train_amp_nchw_pt112_cu113_rtx3090.csv", "RTX 3090", "train", ("unfused",)),
    TimmTable(
        "timm_train_amp_nhwc_pt112_cu113_rtx3090.csv", "RTX 3090", "train", ("unfused", "nhwc")
    ),
    TimmTable("timm_infer_amp_nchw_pt240_cu124_rtx3090.csv", "RTX 3090", "infer", _INFER_2024),
    TimmTable("timm_infer_amp_nchw_pt291_cu128_4090.csv", "RTX 4090", "infer", _INFER),
    TimmTable("timm_infer_amp_nchw_pt291_cu130_5090.csv", "RTX 5090", "infer", ("reparam",)),
    TimmTable(
        "timm_infer_amp_nchw_pt291_cu130_pro6000maxq.csv", "RTX PRO 6000 Max-Q", "infer", _INFER
    ),
)
#: By GPU: the goals of the median and of the 90th percentile.
OWN_MEDIAN, OWN_P90 = 7.0, 18.0
ZERO_SHOT = {
    ("RTX 3090", "RTX 4090"): 9.0,
    ("RTX 4090", "RTX 5090"): 11.0,
    ("RTX 4090", "RTX PRO 6000 Max-Q"): 15.0,
}


def main() -> int:
    options = parse()
    sets, left_out = simulated(options)
    for name, reason in left_out.items():
        say(f"left out: {name}: {reason}")
    found = {gpu: own(sets, gpu) for gpu in dict.fromkeys(table.gpu for table in TABLES)}
    shots = {pair: zero_shot(sets, *pair) for pair in ZERO_SHOT}
    figures = []
    for gpu, result in found.items():
        name = short(gpu)
        errors = result["trainfit"]
        figures.append(BenchFigure(f"{name}_median_error", median(errors), OWN_MEDIAN, True, "%"))
        figures.append(BenchFigure(f"{name}_p90_error", p90(errors), OWN_P90, True, "%"))
    for (one, other), errors in shots.items():
        name = f"{short(one)}_to_{short(other)}_median_error"
        figures.append(
            BenchFigure(name, median(errors["trainfit"]), ZERO_SHOT[one, other], True, "%")
        )
    details = {"left_out": left_out, "own": plain(found), "zero_shot": plain(shots)}
    heads = ("steps of", "predicted by", "rows", "median", "p90", "bias")
    return finish(figures, options.json, details, [columns(heads, lines(found, shots))])


# --- Steps ----------------------------------------------------------------------------------------


def simulated(options: argparse.Namespace) -> tuple[dict[str, Steps], dict[str, str]]:
    """By table the steps that could be simulated; by model why others could not."""
    found: dict[str, Steps] = {}
    left_out: dict[str, str] = {}
    jobs: dict[TimmTable, list[PublishedStep]] = {table: [] for table in TABLES}
    for table in TABLES:
        for job in rows(options, table):
            if (reason := replaced(job)) is not None:
                left_out[f"{job.model} ({table.file})"] = reason
            else:
                jobs[table].append(job)
    # A fresh process for every few models: one keeps the geometries that it has seen.
    with multiprocessing.get_context("spawn").Pool(2, maxtasksperchild=100) as pool:
        results = {
            table: [pool.apply_async(steps, (job, options.cache, options.timm)) for job in of_table]
            for table, of_table in jobs.items()
        }
        for table, of_table in jobs.items():
            names, measured, tables = [], [], []
            for job, result in zip(of_table, results[table], strict=True):
                made = result.get()
                if "error" in made:
                    left_out[f"{job.model} ({table.file})"] = made["error"]
                    continue
                names.append(job.model)
                measured.append(job.measured_s)
                tables.append(made["table"])
            gpu = find_gpu(table.gpu)
            found[table.file] = Steps(gpu, names, np.array(measured), tables)
            say(f"{table.file}: {len(names)} steps")
    return found, left_out


def replaced(job: PublishedStep) -> str | None:
    """Why today's model of this name is not the table's, where that is known."""
    of_2022 = "unfused" in job.options
    reasons = (why for name, why in _REPLACED.items() if of_2022 and job.model.startswith(name))
    return next(reasons, None)


def rows(options: argparse.Namespace, table: TimmTable) -> list[PublishedStep]:
    """The table's rows, or some of them."""
    with (options.data / table.file).open(newline="") as file:
        read = list(csv.DictReader(file))
    mode = table.mode
    jobs = [
        PublishedStep(
            row["model"],
            mode,
            int(row[f"{mode}_img_size"]),
            int(row[f"{mode}_batch_size"]),
            table.gpu,
            float(row[f"{mode}_step_time"]) / 1e3,
            table.options,
            float(row["param_count"]) * 1e6,
        )
        for row in read
    ]
    if options.rows and options.rows < len(jobs):
        jobs = random.Random(SEED).sample(jobs, options.rows)
    return jobs


# --- Errors ---------------------------------------------------------------------------------------

Predictor = Callable[[Steps], np.ndarray]
Chosen = tuple[Sequence[Steps], Sequence[np.ndarray]]
Fitter = Callable[[Chosen, Chosen | None], Predictor]


def ours(own: Chosen, others: Chosen | None) -> Predictor:
    """By the GPU's own steps, and those of others where they may be used."""
    if others is None:
        efficiency: Efficiency = fitting.fit(*own)
    else:
        efficiency = fitting.fit(*own, fitting.fit(*others), NEAR)
    return lambda each: each.predicted_s(efficiency)


def by_own(fitter: Callable[..., Predictor]) -> Fitter:
    """One that uses the GPU's own steps alone."""
    return lambda own, _: fitter(*own)


FITTERS: dict[str, Fitter] = {"trainfit": ours, "the whole model's roofline": by_own(whole_model)}


def own(sets: dict[str, Steps], gpu: str) -> dict[str, np.ndarray]:
    """Errors in percent of the models that the constants were not fitted to, by who predicts."""
    mine = [sets[table.file] for table in TABLES if table.gpu == gpu]
    first = half([name for each in mine for name in each.names])
    masks = [np.array([name in first for name in each.names]) for each in mine]
    found = {}
    for who, fitter in FITTERS.items():
        parts = []
        for side in (masks, [~mask for mask in masks]):
            predictor = fitter((mine, side), without(sets, mine, side))
            parts += [
                errors(predictor(each), each)[~mask] for each, mask in zip(mine, side, strict=True)
            ]
        found[who] = np.concatenate(parts)
    return found


def without(sets: dict[str, Steps], mine: Sequence[Steps], side: Sequence[np.ndarray]) -> Chosen:
    """Steps of all tables but of the models that are to be scored."""
    scored = {
        name
        for each, mask in zip(mine, side, strict=True)
        for name, is_fitted in zip(each.names, mask, strict=True)
        if not is_fitted
    }
    every = list(sets.values())
    return every, [np.array([name not in scored for name in each.names]) for each in every]


def half(names: Sequence[str]) -> set[str]:
    """Half of the different models, the same for every table: one is never in both halves."""
    different = sorted(set(names))
    random.Random(SEED).shuffle(different)
    return set(different[: len(different) // 2])


def zero_shot(sets: dict[str, Steps], source: str, target: str) -> dict[str, np.ndarray]:
    """Errors in percent on ``target`` with constants of ``source``'s rows."""
    fitted_to = [sets[table.file] for table in TABLES if table.gpu == source]
    masks = [np.ones(len(each.names), dtype=bool) for each in fitted_to]
    scored = [sets[table.file] for table in TABLES if table.gpu == target]
    found = {}
    for who, fitter in FITTERS.items():
        predictor = fitter((fitted_to, masks), None)
        found[who] = np.concatenate([errors(predictor(each), each) for each in scored])
    return found


def errors(predicted: np.ndarray, measured: Steps) -> np.ndarray:
    """Predicted over measured less one, in percent."""
    found: np.ndarray = 100 * (predicted / measured.measured_s - 1)
    return found


def median(values: np.ndarray) -> float:
    return float(np.median(np.abs(values)))


def p90(values: np.ndarray) -> float:
    return float(np.quantile(np.abs(values), 0.9))


# --- What is printed ------------------------------------------------------------------------------


def lines(found: dict[str, Any], shots: dict[Any, Any]) -> Iterator[tuple[object, ...]]:
    """A row for each set of steps and way to predict them."""
    named = {f"{gpu}, half and half": result for gpu, result in found.items()}
    named |= {f"{other} from {one}": result for (one, other), result in shots.items()}
    for what, result in named.items():
        for who, values in result.items():
            bias = f"{float(np.median(values)):+.1f}%"
            yield what, who, len(values), f"{median(values):.1f}%", f"{p90(values):.1f}%", bias


def plain(results: dict[Any, Any]) -> dict[str, Any]:
    return {
        " to ".join(key) if isinstance(key, tuple) else key: {
            who: {
                "rows": len(values),
                "median": median(values),
                "p90": p90(values),
                "bias": float(np.median(values)),
            }
            for who, values in result.items()
        }
        for key, result in results.items()
    }


def short(gpu: str) -> str:
    return gpu.lower().replace("rtx ", "").replace(" ", "_").replace("-", "")


def parse() -> argparse.Namespace:
    made = parser(
        __doc__, quick=f"{QUICK_ROWS} rows of each table", data="folder with timm's tables"
    )
    made.add_argument("--timm", default="", help="folder of another timm than the installed")
    made.add_argument("--cache", type=Path, default=CACHE, help=f"simulated steps ({CACHE})")
    made.add_argument("--rows", type=int, help="so many of each table, by chance (all)")
    options = made.parse_args()
    options.rows = options.rows or (QUICK_ROWS if options.quick else None)
    for table in TABLES:
        if not (options.data / table.file).is_file():
            leave(f"{options.data / table.file}: no such file; timm's repository has it")
    return options


if __name__ == "__main__":
    sys.exit(main())
