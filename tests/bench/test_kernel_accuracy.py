"""bench/kernel_accuracy.py: rows as the simulated GPU records them, and what counts as worse."""

from __future__ import annotations

import csv
import dataclasses
import importlib
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import trainfit
from trainfit.speed.work import Work

pytestmark = pytest.mark.usefixtures("bench_scripts")


def recorded(act: Any) -> list[list[int]]:
    with trainfit.simulate("A100 80GB SXM", limited=False) as simulation:
        act()
    return Work.of_step(simulation.recording, 0).table.tolist()  # type: ignore[no-any-return]


def captured(monkeypatch: pytest.MonkeyPatch, source: str, folder: Path) -> list[list[int]]:
    """The kernels that a source of rows costs."""
    rows = importlib.import_module("_kernel_rows")
    found: list[list[int]] = []

    def seconds(table: Any, gpu: str) -> Any:
        found.extend(table.tolist())
        return np.ones(len(table))

    monkeypatch.setattr(rows, "kernel_seconds", seconds)
    list(getattr(rows, source)(folder))
    return found


def write(path: Path, **values: Any) -> None:
    with path.open("w", newline="") as file:
        writer = csv.DictWriter(file, list(values))
        writer.writeheader()
        writer.writerow(values)


def test_a_measured_matmul_is_costed_as_the_simulation_records_it(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    write(tmp_path / "kernels_gemm_bf16.csv", gpu="H100 SXM", m=96, n=512, k=1024, ms=1)

    def linear() -> None:
        x, weight = (
            torch.empty(rows, 1024, device="cuda", dtype=torch.bfloat16) for rows in (96, 512)
        )
        torch.nn.functional.linear(x, weight)

    assert captured(monkeypatch, "products", tmp_path) == recorded(linear)


def test_measured_attention_is_costed_as_the_simulation_records_it(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    sizes = {"batch_size": 2, "sequence": 256, "num_heads": 8, "num_key_value_heads": 8}
    write(tmp_path / "kernels_attention_bf16.csv", gpu="L40S", **sizes, head_dim=64, ms=1)

    def flash() -> None:
        x = torch.empty(2, 8, 256, 64, device="cuda", dtype=torch.bfloat16)
        q, k, v = x, x.clone(), x.clone()
        torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)

    (costed,) = captured(monkeypatch, "attention", tmp_path)
    found = recorded(flash)[-1]
    # The random state that the kernel leaves for its gradient is some bytes more.
    assert np.allclose(costed, found, rtol=0.01) and costed[:2] == found[:2]


def test_a_class_that_is_worse_by_more_than_the_leeway_fails() -> None:
    script = importlib.import_module("kernel_accuracy")
    then = script.ClassErrors("A100", "attention", 9, 10.0, 20.0, 0.0)
    accepted = {then.key: then}
    for change, count in ({"median": 12.0}, 0), ({"median": 12.1}, 1), ({"p90": 22.5}, 1):
        now = dataclasses.replace(then, **change)
        assert len(list(script.worsened([now], accepted, script.LEEWAY))) == count
    other = dataclasses.replace(then, gpu="B200", median=90.0)
    assert not list(script.worsened([other], accepted, script.LEEWAY))
    figures = script.figures([then], ["attention"])
    assert figures[-1].name == "classes_worse_than_accepted" and not figures[-1].holds


def test_errors_are_of_what_was_measured() -> None:
    script = importlib.import_module("kernel_accuracy")
    rows = importlib.import_module("_kernel_rows")
    compared = rows.ComparedRows("A100", "m", np.array([1.0, 2.0, 4.0]), np.array([1.1, 1.8, 4.0]))
    line = script.ClassErrors.of(compared)
    assert (line.rows, line.median, line.p90, line.bias) == (3, 10.0, 10.0, 0.0)


def test_the_accepted_table_has_each_class_once() -> None:
    script = importlib.import_module("kernel_accuracy")
    accepted = script.read_accepted()
    for kind in script.GOALS:
        assert any(line.kind == kind for line in accepted.values())


def test_a_folder_without_the_tables_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    script = importlib.import_module("kernel_accuracy")
    with pytest.raises(SystemExit) as stopped:
        script.main(["--truth", str(tmp_path)])
    assert stopped.value.code == 2
    assert "kernels_gemm_bf16.csv: no such file" in capsys.readouterr().err
