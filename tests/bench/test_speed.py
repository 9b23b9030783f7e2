"""bench/speed_accuracy.py: what is fitted, what is compared, without the published tables."""

from __future__ import annotations

import csv
import importlib
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

import trainfit
from trainfit.hardware import find_gpu
from trainfit.results.runs.steps import DTYPES, KINDS
from trainfit.speed.efficiency import DEFAULT
from trainfit.speed.work import COLUMNS

WEIGHTS = "convolution_weight_gradient"
KINDS_MADE = ("matmul", "convolution", WEIGHTS)

pytestmark = pytest.mark.usefixtures("bench_scripts")


def table(seed: int) -> Any:
    """A model's kernels: some products, convolutions and elementwise operators."""
    random = np.random.default_rng(seed)
    rows = []
    for _ in range(30):
        kind = random.choice([*KINDS_MADE, "pointwise"])
        m, n, k = (int(each) * 64 for each in random.integers(4, 64, 3))
        values = {"kind": KINDS.index(kind), "dtype": DTYPES.index("float16")}
        values |= {"batches": 1, "launches": 1, "read": 64 * m * k, "written": 64 * m * n}
        if kind in KINDS_MADE:
            values |= {"flops": 2 * 16 * m * n * k, "rows": 16 * m, "columns": n, "depth": k}
        rows.append([values.get(name, 0) for name in COLUMNS])
    return np.array(rows, dtype=np.int64)


def steps_of(gpu: str, factor: float = 1.0) -> Any:
    """Forty models that take as long as the model says with other constants than its start's."""
    fitting = importlib.import_module("_speed_fit")
    tables = [table(seed) for seed in range(40)]
    found = fitting.Steps(find_gpu(gpu), [f"m{i}" for i in range(40)], np.ones(len(tables)), tables)
    truth = {
        **DEFAULT.__dict__,
        "arithmetic": {**DEFAULT.arithmetic, "convolution": 0.9, WEIGHTS: 0.35},
        "traffic": {**DEFAULT.traffic, "pointwise": 0.6},
    }
    found.measured_s = factor * found.predicted_s(type(DEFAULT)(**truth))
    return found


@pytest.mark.slow
def test_constants_are_found_again_and_hold_for_other_models() -> None:
    fitting = importlib.import_module("_speed_fit")
    steps = steps_of("RTX 3090")
    before = np.abs(np.expm1(steps.errors(DEFAULT)))
    half = np.arange(40) < 20
    fitted = fitting.fit([steps], [half])
    after = np.abs(np.expm1(steps.errors(fitted)))
    assert np.median(before) > 0.1
    assert np.median(after[~half]) < 0.03
    assert fitted.arithmetic["convolution"] > fitted.arithmetic[WEIGHTS]


def test_halves_have_no_model_in_common() -> None:
    script = importlib.import_module("speed_accuracy")
    names = [f"m{i}" for i in range(11)] * 2
    first = script.half(names)
    assert len(first) == 5 and first == script.half(sorted(names))


@pytest.mark.slow
def test_errors_are_of_models_that_nothing_was_fitted_to() -> None:
    script = importlib.import_module("speed_accuracy")
    sets = {each.file: steps_of(each.gpu) for each in script.TABLES}
    found = script.own(sets, "RTX 4090")
    assert set(found) == set(script.FITTERS)
    assert len(found["trainfit"]) == 40
    assert script.median(found["trainfit"]) < script.median(found["PyTorch's estimator"])
    shots = script.zero_shot(sets, "RTX 3090", "RTX 4090")
    # The same constants on both: what is left is how well they were found.
    assert script.median(shots["trainfit"]) < 5


def test_a_roofline_is_fitted_for_comparison() -> None:
    fitting = importlib.import_module("_speed_fit")
    steps = steps_of("RTX 3090", factor=1.3)
    found = fitting.whole_model([steps], [np.ones(40, dtype=bool)])(steps)
    assert found.shape == (40,) and (found > 0).all()
    assert abs(np.median(found / steps.measured_s) - 1) < 0.3


def test_a_job_is_kept_under_all_that_it_depends_on(tmp_path: Path) -> None:
    made = importlib.import_module("_timm_steps")
    job = made.PublishedStep("resnet18", "infer", 224, 8, "RTX 3090", 0.1)
    other = made.PublishedStep("resnet18", "infer", 224, 8, "RTX 3090", 0.2)
    assert job.file(tmp_path, "1") == other.file(tmp_path, "1")
    assert len({
        job.file(tmp_path, "1"),
        job.file(tmp_path, "2"),
        made.PublishedStep("resnet18", "train", 224, 8, "RTX 3090", 0.1).file(tmp_path, "1"),
        made.PublishedStep("resnet18", "infer", 224, 8, "RTX 3090", 0.1, ("nhwc",)).file(
            tmp_path, "1"
        ),
    }) == 4  # fmt: skip


def test_absent_tables_are_named(tmp_path: Path, capsys: Any, monkeypatch: Any) -> None:
    script = importlib.import_module("speed_accuracy")
    monkeypatch.setattr(sys, "argv", ["speed_accuracy.py", "--data", str(tmp_path)])
    with pytest.raises(SystemExit) as caught:
        script.parse()
    assert caught.value.code == 2
    assert "timm_train_amp_nchw_pt112_cu113_rtx3090.csv: no such file" in capsys.readouterr().err


def test_rows_are_read_with_their_units(tmp_path: Path) -> None:
    script = importlib.import_module("speed_accuracy")
    of = script.TABLES[0]
    with (tmp_path / of.file).open("w", newline="") as file:
        writer = csv.writer(file)
        columns = ["model", "train_step_time", "train_batch_size", "train_img_size", "param_count"]
        writer.writerow(columns)
        writer.writerows([[f"m{i}", 87.5, 512, 224, 25.6] for i in range(9)])
    options = type("Options", (), {"data": tmp_path, "rows": None})()
    (first, *others) = script.rows(options, of)
    assert (first.measured_s, first.batch, first.size) == (0.0875, 512, 224) and len(others) == 8
    assert first.parameters == pytest.approx(25.6e6)
    options.rows = 4
    assert len(script.rows(options, of)) == 4


def test_models_of_2022_whose_layers_were_others_are_left_out() -> None:
    script = importlib.import_module("speed_accuracy")
    then, now = script.TABLES[0], script.TABLES[3]

    def reason(model: str, table: Any) -> str | None:
        job = script.PublishedStep(model, table.mode, 224, 8, table.gpu, 0.1, table.options)
        found: str | None = script.replaced(job)
        return found

    assert "inplace_abn" in str(reason("tresnet_m_448", then))
    assert reason("tresnet_m_448", now) is None and reason("resnet50", then) is None


def test_a_model_too_large_for_the_machine_is_left_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nothing of it is made: it would take all memory, and end the process."""
    made = importlib.import_module("_timm_steps")
    monkeypatch.setattr(made, "_prepared", lambda _: type("timm", (), {"__version__": "1"}))
    monkeypatch.setattr(made, "_simulated", lambda *_: pytest.fail("it was made"))
    job = made.PublishedStep("vit_7b", "infer", 224, 8, "RTX 3090", 0.1, (), 1e12)
    assert made.steps(job, tmp_path, "") == {"error": "its weights take 4000 GB of this machine's"}


def test_another_model_of_the_same_name_is_left_out() -> None:
    """As ecaresnext50t_32x4d, which had two blocks a stage when it was measured."""
    made = importlib.import_module("_timm_steps")
    timm = SimpleNamespace(create_model=lambda name, pretrained: torch.nn.Linear(100, 100))
    here = 10_100
    for table in (here, here * 1.009 + 4e3):
        job = made.PublishedStep("net", "infer", 8, 2, "RTX 3090", 0.1, (), table)
        with trainfit.simulate("RTX 3090", limited=False):
            assert made._made(job, timm, torch)[0].weight.is_cuda
    job = made.PublishedStep("net", "infer", 8, 2, "RTX 3090", 0.1, (), 25.05e6)
    with pytest.raises(ValueError, match=r"another model: 0\.01 million"):
        made._made(job, timm, torch)
