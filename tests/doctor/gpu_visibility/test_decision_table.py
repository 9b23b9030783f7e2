"""The decision table: each cause is found on its recorded machine, and on no other."""

from __future__ import annotations

import dataclasses

import pytest
from hypothesis import given
from hypothesis import strategies as st

from helpers_facts import machine as healthy
from helpers_machines import document, hanging, machine, names
from trainfit.doctor.checks import ROWS, check_visibility
from trainfit.hardware.local_gpu import visible
from trainfit.hardware.machine.recorded import RecordedSystem
from trainfit.hardware.machine.survey import survey
from trainfit.results.doctor import Check
from trainfit.results.machine import (
    CudaDriver,
    Fact,
    Machine,
    TorchBuild,
    TorchProbe,
    absent,
    cannot_tell,
    known,
)

#: The rows of the table, as its identifiers have them.
CAUSES = {
    "cpu_only_torch",
    "masked",
    "no_gpu",
    "no_driver",
    "container_without_gpu",
    "container_lost_gpu",
    "version_mismatch",
    "driver_too_old",
    "fabric_manager_down",
    "no_kernel_image",
    "forked_after_cuda",
    "device_node",
    "mig_without_instances",
    "wsl_driver",
}


def check_of(name: str) -> Check:
    (check,) = check_visibility(survey(machine(name)))
    return check


@pytest.mark.parametrize("name", names())
def test_a_recorded_machine_has_the_cause_that_it_was_made_for(name: str) -> None:
    check = check_of(name)
    assert check.kind == document(name)["expected_cause"]
    assert check.verdict == ("bad" if check.kind else "good")
    assert check.evidence and check.title and "\n" not in check.title


@pytest.mark.parametrize("name", ["cpu-laptop", "this-machine"])
def test_a_build_for_the_cpu_is_right_where_there_is_no_gpu(name: str) -> None:
    check = check_of(name)
    assert check.title.startswith("no NVIDIA GPU in this machine; PyTorch 2.")
    assert (check.verdict, check.fixes) == ("good", ())


def test_every_cause_of_the_table_has_a_machine() -> None:
    assert {document(name)["expected_cause"] for name in names()} == CAUSES | {""}


@pytest.mark.parametrize("name", [n for n in names() if document(n)["expected_cause"]])
def test_a_cause_comes_with_its_fix_undo_and_cost(name: str) -> None:
    check = check_of(name)
    assert check.cause
    assert check.fixes
    for remedy in check.fixes:
        assert remedy.action and remedy.undo and remedy.cost


# --- Where causes meet ------------------------------------------------------------------------
def changed(base: Machine, **changes: object) -> Machine:
    return dataclasses.replace(base, cuda=dataclasses.replace(base.cuda, **changes))


def blind(base: Machine, **changes: object) -> Machine:
    """A machine on which PyTorch answers, and sees nothing."""
    probe = TorchProbe(False, 0, "", ("sm_90",), (), None)
    return changed(base, torch_probe=known(probe, "probe"), **changes)


def cause(facts: Machine) -> str:
    (check,) = check_visibility(facts)
    return check.kind


def test_a_healthy_machine_is_good() -> None:
    (check,) = check_visibility(healthy())
    assert check.verdict == "good", check


def test_a_fork_is_the_cause_although_a_fresh_process_sees_the_gpu() -> None:
    assert cause(changed(healthy(), bad_fork=known(True, "torch"))) == "forked_after_cuda"
    assert cause(changed(healthy(), bad_fork=known(False, "torch"))) == ""


def test_what_matches_no_row_is_not_guessed() -> None:
    (check,) = check_visibility(blind(healthy()))
    assert (check.verdict, check.kind) == ("bad", "unexplained")


def test_without_an_answer_of_pytorch_nothing_is_said() -> None:
    facts = changed(healthy(), torch_probe=cannot_tell("probe", "killed by signal 9"))
    (check,) = check_visibility(facts)
    assert check.verdict == "cannot_tell" and "signal 9" in check.cause


def test_a_driver_that_hangs_is_named() -> None:
    late: Fact[CudaDriver] = cannot_tell("probe cuda_driver", "no answer within 8 s")
    facts = blind(healthy(), cuda=late)
    assert cause(facts) == "driver_hangs"


def test_a_slow_nvidia_smi_alone_is_no_cause_where_pytorch_works() -> None:
    facts = changed(healthy(), nvidia_smi=cannot_tell("nvidia-smi -L", "no answer within 6 s"))
    assert cause(facts) == ""


@pytest.mark.parametrize(
    ("branch", "cuda", "expected"),
    [
        ("525.60.13", (12, 4), "unexplained"),
        ("520.61.05", (12, 4), "driver_too_old"),
        ("450.36.06", (11, 8), "unexplained"),
        ("449.99", (11, 8), "driver_too_old"),
        ("580.65.06", (13, 0), "unexplained"),
        ("575.57.08", (13, 0), "driver_too_old"),
    ],
)
def test_the_least_driver_by_major_version_of_cuda(
    branch: str, cuda: tuple[int, int], expected: str
) -> None:
    libraries = {"libcuda": branch, "libnvidia-ml": branch}
    facts = blind(
        healthy(),
        kernel_driver=known(branch, "/proc/driver/nvidia/version"),
        nvml=known(branch, "NVML"),
        library_versions=libraries,
        torch=known(TorchBuild("2.9.0", cuda, None, "/venv/torch"), "version.py"),
    )
    assert cause(facts) == expected


def test_forward_compatibility_is_no_mismatch() -> None:
    facts = healthy()
    newer = {**facts.cuda.library_versions, "libcuda": "580.95.05"}
    compat = {**facts.cuda.library_places, "libcuda": "/usr/local/cuda/compat/libcuda.so.580.95.05"}
    refuses = known(CudaDriver("libcuda.so.1", 3, "NOT_INITIALIZED", None, None), "cuInit")
    mixed = blind(facts, library_versions=newer, cuda=refuses)
    assert cause(mixed) == "version_mismatch"
    assert cause(changed(mixed, library_places=compat)) == "unexplained"


def test_masked_wins_over_what_lies_deeper_and_not_over_the_build() -> None:
    hidden = blind(healthy(), visible_devices=known("-1", "environment"))
    assert cause(hidden) == "masked"
    assert cause(changed(hidden, bad_fork=known(False, "t"))) == "masked"
    cpu = TorchBuild("2.13.0+cpu", None, None, "/venv/torch")
    assert cause(changed(hidden, torch=known(cpu, "version.py"))) == "cpu_only_torch"


def test_no_torch_is_a_cause_of_its_own() -> None:
    none: Fact[TorchBuild] = absent("sys.path", "it is not installed")
    facts = changed(healthy(), torch=none, torch_probe=absent("probe", "no PyTorch"))
    assert cause(facts) == "no_torch"


def test_rocm_is_not_judged_without_a_gpu_of_nvidia_s() -> None:
    build = TorchBuild("2.9.0+rocm6.4", None, "6.4", "/venv/torch")
    none: Fact[str] = absent("/proc/driver/nvidia/version", "there is no such file")
    facts = blind(healthy(), torch=known(build, "version.py"), kernel_driver=none, nvml=none)
    facts = changed(facts, pci_devices=known((), "PCI"))
    (check,) = check_visibility(dataclasses.replace(facts, gpus=known((), "NVML")))
    assert check.verdict == "cannot_tell"


# --- CUDA_VISIBLE_DEVICES ---------------------------------------------------------------------
@pytest.mark.parametrize(
    ("value", "taken", "unknown"),
    [
        ("", [], ""),
        ("-1", [], "-1"),
        ("0", ["0"], None),
        ("1,0", ["1", "0"], None),
        ("0,7,1", ["0"], "7"),
        ("7", [], "7"),
        ("NoDevFiles", [], "NoDevFiles"),
        ("GPU-aa", ["GPU-aa"], None),
        ("GPU-bb", [], "GPU-bb"),
        ("MIG-1", ["MIG-1"], None),
        (" 1 , 0", ["1", "0"], None),
        ("0,0", [], "0"),
        ("MIG-GPU-aaaa/1/0", ["MIG-GPU-aaaa/1/0"], None),
        ("MIG-GPU-bbbb/1/0", [], "MIG-GPU-bbbb/1/0"),
    ],
)
def test_a_mask_by_cudas_rules(value: str, taken: list[str], unknown: str | None) -> None:
    assert visible(value, 2, ["GPU-aaaa", "GPU-cccc"]) == (taken, unknown)


@given(st.text(max_size=20), st.integers(0, 8))
def test_a_mask_never_leaves_more_than_it_names(value: str, count: int) -> None:
    taken, unknown = visible(value, count, [])
    assert len(taken) <= value.count(",") + 1
    assert (unknown is None) == (len(taken) == value.count(",") + 1)


def test_every_row_is_asked_in_one_place() -> None:
    assert len({row.__name__ + row.__module__ for row in ROWS}) == len(ROWS)


@pytest.mark.parametrize("name", ["workstation", "server-8gpu", "version-mismatch"])
def test_a_driver_that_answers_nothing_is_named(name: str) -> None:
    (check,) = check_visibility(survey(RecordedSystem(hanging(document(name)))))
    assert check.kind == "driver_hangs"
