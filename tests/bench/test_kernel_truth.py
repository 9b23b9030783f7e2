"""Times of small programs against what the model says of their kernels."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest

BENCH = Path(__file__).resolve().parents[2] / "bench"
sys.path.insert(0, str(BENCH))

from gpu import kernel_truth, kernels  # noqa: E402

H100 = {"gpu": "NVIDIA H100 80GB HBM3", "capability": [9, 0], "memory_bytes": 85_520_809_984,
        "sm_count": 132}  # fmt: skip
CHOSEN = ("matmul bf16: 4096x4096x4096", "pointwise and sums: addition 8192x4096")
CALL = "linear module under autocast"


@pytest.fixture
def file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """As kernels.py writes it, of two programs and a call."""
    some = [each for each in kernels.programs() if each.name in CHOSEN]
    calls = [each for each in kernels.host_calls() if each[0] == CALL]
    monkeypatch.setattr(kernels, "programs", lambda: iter(some))
    monkeypatch.setattr(kernels, "host_calls", lambda: iter(calls))
    found = {"machine": H100, "operator_s": 2.8e-6, "host_s": {CALL: [30e-6, 40e-6]}}
    found["seconds"] = {CHOSEN[0]: 1.0, CHOSEN[1]: 1e-6, "of another version": 1.0}
    (tmp_path / "kernels.json").write_text(json.dumps(found))
    return tmp_path / "kernels.json"


def test_programs_and_calls_are_compared(file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert kernel_truth.main([str(file), "--json"]) == 1
    found: dict[str, Any] = json.loads(capsys.readouterr().out)
    product, addition = found["details"]["programs"]
    # 2 * 4096^3 FLOP below the peak of 989 TFLOP/s; three times 64 MiB below 3.35 TB/s.
    assert 139e-6 < product["predicted_s"] < 280e-6
    assert 60e-6 < addition["predicted_s"] < 100e-6
    [figure] = found["figures"]
    assert 100 < figure["value"] < 10_000 and not figure["holds"]
    [call] = found["details"]["calls"]
    assert 10e-6 < call["predicted_s"] < 100e-6  # of one of its 20 modules


def test_a_table_has_a_row_for_each_class(file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    kernel_truth.main([str(file), "--rows"])
    lines = capsys.readouterr().out.splitlines()
    assert [line.split("  ")[0] for line in lines[1:3]] == ["matmul bf16", "pointwise and sums"]
    assert any(line.startswith(CHOSEN[0]) for line in lines)


def test_no_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as left:
        kernel_truth.main([str(tmp_path / "none.json")])
    assert left.value.code == 2 and "none.json" in capsys.readouterr().err
