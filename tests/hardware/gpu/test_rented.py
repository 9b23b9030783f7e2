"""Rented machines by name: their GPU, and what a job on it has of CPU and RAM."""

from __future__ import annotations

from pathlib import Path

import pytest

from helpers_cli import SCRIPTS, json_of, trainfit
from trainfit.cli.values import rented_cpu
from trainfit.hardware import GpuNameError, catalogue, find_gpu
from trainfit.hardware.gpu_lookup import RENTED, find_rented
from trainfit.hardware.machine.processor import find_cpu_kind

GIB = 1 << 30


@pytest.mark.parametrize(
    ("name", "gpu", "cores", "threads"),
    [
        ("Colab T4", "T4", 1, 1),
        ("kaggle 2xT4", "T4", 2, 2),
        ("Kaggle T4 x2", "T4", 2, 2),
        ("g4dn.xlarge", "T4", 2, 2),
        ("G5.XLARGE", "A10G", 2, 2),
        ("p4d.24xlarge", "A100 40GB SXM", 6, 6),
        ("a2-highgpu-1g", "A100 40GB SXM", 6, 6),
        ("g2-standard-4", "L4", 2, 2),
        ("Standard_NC4as_T4_v3", "T4", 4, 0),
        ("nc24ads a100 v4", "A100 80GB PCIe", 24, 0),
    ],
)
def test_a_machine_by_any_spelling(name: str, gpu: str, cores: float, threads: float) -> None:
    machine = find_rented(name)
    assert machine is not None
    assert (machine.cores, machine.second_threads) == (cores, threads)
    spec = find_gpu(name)
    assert spec.key == gpu
    assert spec.sources["key"] == f"assumed: {machine.words}"


def test_every_machine_is_one_that_can_be_planned() -> None:
    names = [each.name for each in RENTED]
    assert len(names) == len(set(names))
    for machine in RENTED:
        assert find_rented(machine.name) is machine
        assert find_gpu(machine.gpu).memory_bytes > 0
        find_cpu_kind(machine.kind)
        assert 1e9 < machine.hz[0] < machine.hz[1] < 6e9
        assert machine.vcpus % machine.threads == 0
        cpu = rented_cpu(machine)
        assert cpu.ram_bytes is not None and 1 <= cpu.ram_bytes / GIB <= machine.ram_bytes / GIB


def test_no_gpu_has_a_machines_name() -> None:
    assert [gpu.key for gpu in catalogue() if find_rented(gpu.key) is not None] == []


def test_shares_are_said() -> None:
    kaggle, p4d = find_rented("Kaggle 2xT4"), find_rented("p4d.24xlarge")
    assert kaggle is not None and p4d is not None
    assert "one of its 2 GPUs is planned, with all of its CPU and RAM" in kaggle.words
    assert "one of its 8 GPUs is planned, with 1/8 of CPU and RAM" in p4d.words
    assert rented_cpu(p4d).ram_bytes == 144 * GIB


def test_a_slip_in_a_machines_name() -> None:
    with pytest.raises(GpuNameError, match=r"try one of: .*Colab T4"):
        find_gpu("Colab T5")


@pytest.mark.slow
def test_a_plan_for_a_rented_machine_has_its_processor(tmp_path: Path) -> None:
    command = ("python", str(SCRIPTS / "train.py"), "--batch_size={batch_size:4}")
    words = ("--no-remedies", "--json", "--", *command)
    plan = json_of(trainfit("plan", "--gpu=Kaggle 2xT4", *words, cwd=tmp_path))
    assert plan["gpu"] == "T4"
    assert plan["cpu"]["name"] == "Kaggle 2xT4" and plan["cpu"]["kind"] == "Skylake"
    assert plan["cpu"]["cores"] == 2 and plan["cpu"]["core_hz"] == 2.7e9
    assert any("one of its 2 GPUs is planned" in note for note in plan["notes"])
    assert "assumed CPU: 2.7 GHz" in plan["speed"]["constants"]
    said = ("--gpu=Kaggle 2xT4", "--cpu=cores=8,ghz=3.5,kind=12th gen")
    plan = json_of(trainfit("plan", *said, *words, cwd=tmp_path))
    assert plan["cpu"]["name"] == "" and plan["cpu"]["kind"] == "Alder Lake"
    assert any(note.endswith("--cpu gives the processor") for note in plan["notes"])
