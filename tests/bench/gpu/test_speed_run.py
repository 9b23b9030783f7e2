"""The schedule of a machine's times: what comes when, without a GPU."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

BENCH = Path(__file__).resolve().parents[3] / "bench"
sys.path.insert(0, str(BENCH))

from gpu import cases, speed_run, step_times  # noqa: E402

#: Each part writes down when it came past its gate; the calibration, that it simulates.
STAND_IN = """
import pathlib, sys, time
name, gate, order = sys.argv[1:]
if name == "calibrate":
    print("trainfit: simulating the same programs ...", flush=True)
while gate and not pathlib.Path(gate).exists():
    time.sleep(0.01)
with open(order, "a") as file:
    file.write(name + "\\n")
time.sleep(0.2)
"""


def test_every_timed_job_has_its_place() -> None:
    names = speed_run.ordered()
    assert sorted(names) == sorted(each.name for each in cases.timed_cases())
    assert names[0] == "steps-gpt2-bf16"


def test_jobs_come_in_the_order_of_the_patterns() -> None:
    found = step_times._in_order(["steps-gpt2-bf1[6]", "*lstm*", "gpt2-bf16"])
    names = [each.name for each in found]
    assert names == ["steps-gpt2-bf16", "steps-lstm-fp32-adam", "steps-hf-gpt2-bf16-dropout",
                     "steps-gpt2-bf16-fused"]  # fmt: skip


def test_one_part_after_the_other(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def start(
        self: speed_run.PartProcesses, name: str, words: list[str], **_: str
    ) -> subprocess.Popen[bytes]:
        gate = words[words.index("--gate") + 1] if "--gate" in words else ""
        with (tmp_path / f"{name}.log").open("wb") as log:
            command = [sys.executable, "-c", STAND_IN, name, gate, str(tmp_path / "order")]
            process = subprocess.Popen(command, stdout=log)
        self._started.append(process)
        return process

    monkeypatch.setattr(speed_run.PartProcesses, "_start", start)
    assert speed_run.main(["--out", str(tmp_path), "--limit", "30"]) == 0
    assert (tmp_path / "order").read_text().split() == ["calibrate", "steps", "kernels"]
    assert "0 of 30 jobs timed" in capsys.readouterr().out


def test_what_takes_too_long_is_ended(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def start(self: speed_run.PartProcesses, name: str, *_: object, **__: str) -> object:
        (tmp_path / f"{name}.log").touch()
        process = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
        self._started.append(process)
        return process

    monkeypatch.setattr(speed_run.PartProcesses, "_start", start)
    schedule = speed_run.PartProcesses(tmp_path, 1.0, 1)
    assert schedule.run() == 1
    assert all(each.poll() is not None for each in schedule._started)
