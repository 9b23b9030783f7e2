"""Scripts with a known symptom, run on this machine under `trainfit watch`, which names it."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from helpers_symptoms import SYMPTOMS, watched
from helpers_watch import ENDS_WITH_US, finding, kinds

CPU_V1 = Path("/sys/fs/cgroup/cpu")
CPU_V2 = Path("/sys/fs/cgroup")


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=pytest.mark.slow if symptom.slow else ())
        for name, symptom in SYMPTOMS.items()
    ],
)
def test_the_symptom_is_named(name: str, tmp_path: Path) -> None:
    result = watched(tmp_path, SYMPTOMS[name].options)
    SYMPTOMS[name].check(result)
    assert result.header.ending == "finished"


@contextlib.contextmanager
def cpu_quota(cores: float) -> Iterator[Path]:
    """A cgroup with this quota; its file that takes processes."""
    name, period = f"trainfit-test-{os.getpid()}", 100_000
    is_v2 = (CPU_V2 / "cgroup.controllers").exists()
    group = (CPU_V2 if is_v2 else CPU_V1) / name
    try:
        group.mkdir()
    except OSError as error:
        pytest.skip(f"no cgroup can be made here: {error.strerror}")
    try:
        quota = int(cores * period)
        if is_v2:
            (group / "cpu.max").write_text(f"{quota} {period}")
        else:
            (group / "cpu.cfs_quota_us").write_text(str(quota))
        yield group / "cgroup.procs"
    except OSError as error:
        pytest.skip(f"no CPU quota can be set here: {error.strerror}")
    finally:
        with contextlib.suppress(OSError):
            group.rmdir()


@pytest.mark.slow
def test_a_cpu_quota_that_runs_out(tmp_path: Path) -> None:
    """In a cgroup of half a core; where none can be made, tests/watch/sampler/test_machine.py has
    recorded ones."""
    with cpu_quota(0.5) as group:
        entered = ["sh", "-c", f'echo $$ > {group} && exec "$@"', "sh"]
        result = watched(tmp_path, "--cpu=0.1 --step=0.01 --steps=50", *entered)
    found = finding(result, "cgroup_throttling")
    assert result.header.quota_cores == 0.5
    assert {each.what for each in found.evidence} >= {"throttled periods", "CPU quota"}
    assert result.limit in ("cpu", "input")


@pytest.mark.slow
def test_other_programs_that_keep_the_cores_busy(tmp_path: Path) -> None:
    program = ENDS_WITH_US + "while True: pass"
    others = [
        subprocess.Popen([sys.executable, "-c", program])
        for _ in range(len(os.sched_getaffinity(0)) + 1)
    ]
    try:
        result = watched(tmp_path, "--cpu=0.03 --step=0.005 --steps=60")
    finally:
        for each in others:
            each.kill()
            each.wait()
    assert "cpu_contention" in kinds(result)


@pytest.mark.slow
@pytest.mark.skipif(len(os.sched_getaffinity(0)) < 4, reason="one busy core must leave others idle")
def test_one_thread_that_does_everything(tmp_path: Path) -> None:
    result = watched(tmp_path, "--other=0.05 --step=0.001 --steps=80")
    assert "own code" in finding(result, "one_hot_thread").title


@pytest.mark.slow
def test_one_rank_that_is_slower(tmp_path: Path) -> None:
    """90 against 50% of two GPUs: one waits for the other."""
    torchrun = (sys.executable, "-m", "torch.distributed.run", "--nproc_per_node=2", "--standalone")
    result = watched(tmp_path, "--slow-rank=0.05 --step=0.01 --steps=60", *torchrun, "--no-python")
    assert finding(result, "straggler").rank == 1
    assert result.limit == "communication"
    assert [each.rank for each in result.ranks] == [0, 1]
