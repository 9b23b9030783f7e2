"""The checks of a machine: each verdict, each threshold from both sides, and what holds of all."""

from __future__ import annotations

import dataclasses
import re
import shlex
from pathlib import Path
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from helpers_facts import (
    GIB,
    changed,
    cores_of,
    fact,
    frequency,
    gpu,
    machine,
    unknown,
)
from trainfit.doctor import thresholds as policy
from trainfit.doctor.checks import MACHINE_CHECKS
from trainfit.doctor.limits import files_needed
from trainfit.doctor.packages import expected_torchvision
from trainfit.hardware.machine.parsing import cpu_list_text
from trainfit.results.doctor import Check
from trainfit.results.machine import (
    CudaDriver,
    Fact,
    GpuProcess,
    IdleState,
    Machine,
    NumaNode,
    PciDevice,
    ThreadSettings,
    TorchBuild,
    absent,
    cannot_tell,
    known,
)
from trainfit.results.text import byte_rate, size

CHECKS = dict(MACHINE_CHECKS)
DOCS = Path(__file__).parents[2] / "docs" / "checks.md"
LOST = cannot_tell("NVML", "NVML_ERROR_GPU_IS_LOST: the GPU has fallen off the bus")
TWO_NODES = (NumaNode(0, tuple(range(8))), NumaNode(1, tuple(range(8, 16))))
HYBRID = (
    cores_of(range(12), "performance", 5e9),
    cores_of(range(12, 16), "efficiency", 3.8e9),
)


def made(**changes: Any) -> Machine:
    return machine(**changes)


def all_checks(of: Machine) -> list[Check]:
    return [check for _, function in MACHINE_CHECKS for check in function(of)]


def the(name: str, of: Machine) -> Check:
    (check,) = CHECKS[name](of)
    return check


def silent_gpu(reason: Fact[Any] = LOST) -> Any:
    """A GPU of which the driver says nothing."""
    every = gpu()
    return dataclasses.replace(
        every,
        **{f.name: reason for f in dataclasses.fields(every) if f.name != "index"},
    )


def process(used: int | None, pid: int = 4321, **changes: Any) -> GpuProcess:
    return GpuProcess(pid, "python", used, **changes)


def generic(**changes: Any) -> Any:
    """A policy of the generic driver."""
    return frequency(
        **{"driver": "acpi-cpufreq", "governor": "schedutil", "energy_preference": None} | changes
    )


def own_choice(**changes: Any) -> Any:
    """A policy of intel_pstate with hardware that follows EPP."""
    return frequency(
        **{"governor": "powersave", "energy_preference": "balance_performance"} | changes
    )


# --- Each cause -------------------------------------------------------------------------------

QUOTA = {"quota_cores": 4.0, "usable_cores": 4.0}

BAD: list[tuple[str, str, dict[str, Any]]] = [
    ("cores", "cpu_quota_hidden", {"cpu": QUOTA}),
    ("cores", "bound_to_one_cpu", {"cpu": {"affinity": (3,), "usable_cores": 1.0}}),
    (
        "cores",
        "efficiency_cores_only",
        {"cpu": {"core_kinds": HYBRID, "affinity": (12, 13), "usable_cores": 2.0}},
    ),
    ("cores", "few_cores_per_gpu", {"cpu": {"usable_cores": 2.0, "affinity": (0, 1)}}),
    ("threads", "threads_exceed_cores", {"threads": {"OMP_NUM_THREADS": "64"}}),
    ("threads", "threads_exceed_quota", {"cpu": QUOTA}),
    ("threads", "thread_setting_invalid", {"threads": {"OMP_NUM_THREADS": "all"}}),
    ("frequency", "governor_pins_minimum", {"cpu": {"policies": (generic(governor="powersave"),)}}),
    ("frequency", "clock_limited", {"cpu": {"policies": (frequency(limit_hz=2e9),)}}),
    ("frequency", "turbo_off", {"cpu": {"turbo": False}}),
    (
        "frequency",
        "energy_preference_power",
        {"cpu": {"policies": (own_choice(energy_preference="power"),)}},
    ),
    ("memory", "memory_nearly_full", {"memory": {"available_bytes": GIB}}),
    (
        "memory",
        "memory_limit_near",
        {"memory": {"limit_bytes": 8 * GIB, "limit_used_bytes": 8 * GIB - 1}},
    ),
    (
        "memory",
        "swap_in_use",
        {
            "memory": {
                "swap_total_bytes": 16 * GIB,
                "swap_used_bytes": 12 * GIB,
                "available_bytes": 8 * GIB,
            }
        },
    ),
    ("shm", "shm_small", {"memory": {"shm_total_bytes": 64 << 20}}),
    ("shm", "shm_full", {"memory": {"shm_free_bytes": 64 << 20}}),
    ("shm", "shm_missing", {"memory": {"shm_total_bytes": None}}),
    ("disk", "disk_full", {"storage": {"free_bytes": GIB}}),
    ("disk", "disk_slow", {"storage": {"read_bytes_per_s": 40e6}}),
    ("disk", "disk_rotates", {"storage": {"kind": "hdd", "read_bytes_per_s": None}}),
    ("files", "open_files_limit_low", {"limits": {"open_files": 256}}),
    ("processes", "process_limit_low", {"limits": {"processes": 512}}),
    (
        "numa",
        "numa_far_from_gpu",
        {
            "cpu": {"numa_nodes": TWO_NODES, "affinity": tuple(range(8))},
            "gpus": [gpu(numa_node=1)],
        },
    ),
    ("pcie", "pcie_width_reduced", {"gpus": [gpu(pcie_width=8)]}),
    (
        "pcie",
        "pcie_slot_narrow",
        {"gpus": [gpu(pcie_width=4, pcie_width_max=4)]},
    ),
    ("pcie", "pcie_generation_reduced", {"gpus": [gpu(pcie_generation=1)]}),
    ("gpu-state", "gpu_lost", {"gpus": [silent_gpu()]}),
    (
        "gpu-state",
        "gpu_reset_required",
        {"gpus": [silent_gpu(cannot_tell("NVML", "NVML_ERROR_RESET_REQUIRED"))]},
    ),
    ("gpu-clocks", "gpu_thermal_slowdown", {"gpus": [gpu(clock_reasons=("sw_thermal_slowdown",))]}),
    ("gpu-clocks", "gpu_power_brake", {"gpus": [gpu(clock_reasons=("hw_power_brake_slowdown",))]}),
    ("gpu-clocks", "gpu_hardware_slowdown", {"gpus": [gpu(clock_reasons=("hw_slowdown",))]}),
    (
        "gpu-clocks",
        "gpu_clocks_lowered",
        {"gpus": [gpu(clock_reasons=("applications_clocks_setting",), sm_hz=1e9)]},
    ),
    ("gpu-temperature", "gpu_hot", {"gpus": [gpu(temperature_c=91.0)]}),
    ("gpu-power", "gpu_power_limited", {"gpus": [gpu(power_limit_w=40.0)]}),
    ("ecc", "ecc_errors", {"gpus": [gpu(ecc_errors=3)]}),
    ("persistence", "persistence_off", {"gpus": [gpu(persistence=False)]}),
    ("mig", "mig_empty", {"gpus": [gpu(mig=True, mig_instances=())]}),
    ("compute-mode", "compute_prohibited", {"gpus": [gpu(compute_mode="prohibited")]}),
    (
        "compute-mode",
        "compute_exclusive_taken",
        {"gpus": [gpu(compute_mode="exclusive_process", processes=(process(GIB),))]},
    ),
    ("gpu-processes", "gpu_shared", {"gpus": [gpu(processes=(process(8 * GIB),))]}),
    ("gpu-memory", "gpu_memory_unseen", {"gpus": [gpu(used_bytes=9 * GIB)]}),
    (
        "torchvision",
        "torchvision_version",
        {"cuda": {"torchvision": TorchBuild("0.21.0+cu126", (12, 6), None, "/site")}},
    ),
    (
        "torchvision",
        "torchvision_build",
        {"cuda": {"torchvision": TorchBuild("0.23.0+cpu", None, None, "/site")}},
    ),
    (
        "cuda-compat",
        "forward_compat_unsupported",
        {"cuda": {"cuda": CudaDriver("libcuda.so.1", 804, "compat not supported", None, None)}},
    ),
    (
        "scheduler",
        "scheduler_grants_one_cpu",
        {
            "cpu": {"affinity": (0,), "usable_cores": 1.0},
            "surroundings": {"scheduler": "slurm", "scheduler_grant": {"SLURM_CPUS_ON_NODE": "1"}},
        },
    ),
    (
        "scheduler",
        "scheduler_grants_fewer",
        {
            "surroundings": {
                "scheduler": "slurm",
                "scheduler_grant": {"SLURM_CPUS_PER_TASK": "4"},
            }
        },
    ),
]
IDS = [cause for _, cause, _ in BAD]


@pytest.mark.parametrize(("name", "cause", "changes"), BAD, ids=IDS)
def test_each_cause_is_found_and_has_a_fix(name: str, cause: str, changes: dict[str, Any]) -> None:
    check = the(name, made(**changes))
    assert (check.verdict, check.kind) == ("bad", cause)
    assert check.cause and check.evidence and check.fixes


@pytest.mark.parametrize(("name", "cause", "changes"), BAD, ids=IDS)
def test_a_cause_is_not_found_on_a_healthy_machine(
    name: str, cause: str, changes: dict[str, Any]
) -> None:
    assert cause not in {check.kind for check in all_checks(made())}


def test_a_healthy_machine_is_good_throughout() -> None:
    found = all_checks(made())
    assert {check.verdict for check in found} == {"good"}
    assert len(found) >= 20


def test_a_machine_without_gpu_is_healthy_too() -> None:
    found = all_checks(made(gpus=None, cuda={"torch": None, "torchvision": None}))
    assert {check.verdict for check in found} == {"good"}
    per_gpu = {"gpu-clocks", "gpu-power", "pcie", "persistence", "ecc", "mig", "torchvision"}
    assert not per_gpu & {check.name for check in found}


def test_every_cause_of_the_sources_is_tried_and_belongs_to_one_check() -> None:
    folder = Path(policy.__file__).parent
    written = set()
    for file in folder.rglob("*.py"):
        # The decision table's causes have machines of their own (test_doctor_gpu).
        if file.name.startswith("causes_") or file.name in ("checks.py", "findings.py"):
            continue
        text = file.read_text()
        written |= set(re.findall(r'\bbad\(\s*[^,]+,\s*"([a-z_]+)"', text))
        for pair in re.findall(r'"([a-z_]+)" if lost else "([a-z_]+)"', text):
            written |= {word for word in pair if word.startswith("gpu_")}
    assert written == set(IDS)
    assert len(IDS) == len(set(IDS))


def test_the_table_of_the_docs_names_every_check_and_every_cause() -> None:
    text = DOCS.read_text()
    for name, _ in MACHINE_CHECKS:
        assert f"`{name}`" in text
    for cause in IDS:
        assert f"`{cause}`" in text


# --- What holds of every check ----------------------------------------------------------------


def facts_of(thing: Any, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    """The places of all facts within a machine, those of its GPUs included."""
    found: list[tuple[Any, ...]] = []
    for field in dataclasses.fields(thing):
        value = getattr(thing, field.name)
        if isinstance(value, Fact):
            found.append((*path, field.name))
            if field.name == "gpus":
                for number, each in enumerate(value.value or ()):
                    found += facts_of(each, (*path, "gpus", number))
        elif dataclasses.is_dataclass(value):
            found += facts_of(value, (*path, field.name))
    return found


def without(of: Machine, path: tuple[Any, ...], replacement: Fact[Any]) -> Machine:
    if path[0] == "gpus" and len(path) > 1:
        if of.gpus.value is None:
            return of
        gpus = list(of.gpus.value)
        gpus[path[1]] = dataclasses.replace(gpus[path[1]], **{path[2]: replacement})
        return dataclasses.replace(of, gpus=known(tuple(gpus), "NVML"))
    if len(path) == 1:
        return dataclasses.replace(of, **{path[0]: replacement})
    part = dataclasses.replace(getattr(of, path[0]), **{path[1]: replacement})
    return dataclasses.replace(of, **{path[0]: part})


def sound(check: Check) -> None:
    """What holds of every check."""
    assert check.name in CHECKS
    assert check.verdict in ("good", "bad", "cannot_tell")
    assert 0 < len(check.title) < 100, check.title
    assert check.title.isprintable(), "one line, without escapes"
    assert (check.verdict == "bad") == bool(check.kind)
    if check.verdict == "bad":
        assert check.cause and check.fixes
    if check.verdict == "cannot_tell":
        assert check.cause, "it says what would be needed"
    if check.verdict == "good":
        assert not check.fixes
    for remedy in check.fixes:
        assert remedy.action and remedy.undo and remedy.cost
        assert "None" not in remedy.action + remedy.undo
    for each in check.evidence:
        assert each.what and each.value and each.source


BASES = [made(), made(gpus=[gpu(), gpu(1)]), *(made(**changes) for _, _, changes in BAD)]


@settings(max_examples=3 * settings.default.max_examples)
@given(st.data())
def test_no_check_raises_whatever_is_absent_or_cannot_be_told(data: st.DataObject) -> None:
    base = data.draw(st.sampled_from(BASES))
    lost = st.sampled_from(
        [
            absent("x", "not there"),
            cannot_tell("y", "no answer"),
            absent("z", ""),
            cannot_tell("z", ""),
        ]
    )
    chosen = data.draw(st.lists(st.tuples(st.sampled_from(facts_of(base)), lost), max_size=60))
    for path, replacement in chosen:
        base = without(base, path, replacement)
    for check in all_checks(base):
        sound(check)


@pytest.mark.parametrize("state", ["absent", "cannot_tell"])
def test_where_nothing_is_known_nothing_is_called_bad_but_what_must_be_there(state: Any) -> None:
    base = made(gpus=[gpu()])
    for path in facts_of(base):
        if path != ("gpus",):
            base = without(base, path, Fact(state, None, "x", "no answer"))
    found = all_checks(base)
    for check in found:
        sound(check)
    if state == "cannot_tell":
        assert {check.verdict for check in found} == {"cannot_tell"}
    else:  # unlimited and not there are good answers, except for the directory that must be there
        assert {check.kind for check in found if check.verdict == "bad"} == {"shm_missing"}


JUNK = st.text(min_size=1, max_size=300)
NUMBERS = st.one_of(st.integers(0, 1 << 63), st.sampled_from([0, 1, 2, 1 << 40]))


@settings(max_examples=3 * settings.default.max_examples)
@given(st.data())
def test_no_check_raises_whatever_the_values_are(data: st.DataObject) -> None:
    base = data.draw(st.sampled_from(BASES))
    for path in data.draw(st.lists(st.sampled_from(facts_of(base)), max_size=30)):
        there: Any = base
        for step in path:
            there = there.value[step] if isinstance(step, int) else getattr(there, step)
        value = there.value
        if isinstance(value, bool):
            value = data.draw(st.booleans())
        elif isinstance(value, str):
            value = data.draw(JUNK)
        elif isinstance(value, int):
            value = data.draw(NUMBERS)
        elif isinstance(value, float):
            value = data.draw(st.floats(0.01, 1e18))
        else:
            continue
        base = without(base, path, known(value, "NVML"))
    word = data.draw(JUNK)
    policies = (frequency(driver=word, governor=word, energy_preference=word),)
    if data.draw(st.booleans()):
        base = without(base, ("cpu", "policies"), known(policies, "x"))
    for check in all_checks(base):
        sound(check)


def test_a_machines_own_words_are_quoted_where_a_shell_reads_them() -> None:
    evil = generic(governor="powersave;reboot", limit_hz=None)
    check = the("frequency", made(cpu={"policies": (evil,)}))
    for remedy in check.fixes:
        assert "powersave;reboot" in shlex.split(remedy.undo)


def test_figures_are_written_for_people() -> None:
    assert [size(n) for n in (5, 64 << 20, 3 << 29, 24 * GIB)] == [
        "5 B",
        "64 MiB",
        "1.50 GiB",
        "24.00 GiB",
    ]
    assert [byte_rate(n) for n in (40e6, 2.5e9)] == ["40 MB/s", "2.5 GB/s"]
    assert cpu_list_text([3, 0, 1, 2, 8, 10, 11]) == "0-3,8,10-11"


# --- Cores and threads ------------------------------------------------------------------------


def test_who_sized_threads_for_a_quota_knows_of_it() -> None:
    check = the("cores", made(cpu=QUOTA, threads={"OMP_NUM_THREADS": "4"}))
    assert check.verdict == "good"
    assert the("cores", made(cpu=QUOTA, threads={"OMP_NUM_THREADS": "5"})).kind


@given(st.integers(1, 64), st.floats(0.1, 64))
@example(20, 19.0)
@example(1, 1.0)
def test_a_quota_is_hidden_below_the_visible_cpus(cpus: int, quota: float) -> None:
    usable = min(float(cpus), quota)
    changes = {"affinity": tuple(range(cpus)), "logical_cpus": cpus, "quota_cores": quota}
    check = the("cores", made(cpu=changes | {"usable_cores": usable}, gpus=None))
    assert (check.kind == "cpu_quota_hidden") == (quota < policy.QUOTA_SHARE * cpus)


def test_the_fixes_of_a_quota_name_this_machines_values() -> None:
    docker = the("cores", made(cpu=QUOTA, surroundings={"container": "docker"}))
    assert docker.fixes[0].action.startswith("export OMP_NUM_THREADS=4 ")
    assert docker.fixes[1].action == "docker update --cpus=16 CONTAINER"
    assert docker.fixes[1].undo == "docker update --cpus=4 CONTAINER"
    assert "host" in docker.fixes[1].cost
    pod = the("cores", made(cpu=QUOTA, surroundings={"container": "kubernetes"}))
    assert pod.fixes[1].undo == "in the pod's spec: resources.limits.cpu: 4"
    bare = the("cores", made(cpu=QUOTA))
    assert bare.fixes[1].undo.endswith("user-$(id -u).slice CPUQuota=400%")


@given(st.integers(1, 12), st.integers(1, 64))
def test_cpus_for_each_gpu(gpus: int, cpus: int) -> None:
    changes = {"affinity": tuple(range(cpus)), "logical_cpus": cpus, "usable_cores": float(cpus)}
    check = the("cores", made(cpu=changes, gpus=[gpu(n) for n in range(gpus)]))
    assert (check.kind == "few_cores_per_gpu") == (cpus < policy.LEAST_CPUS_PER_GPU * gpus)


def test_a_hybrid_processor_is_good_and_its_fast_cores_are_named() -> None:
    check = the("cores", made(cpu={"core_kinds": HYBRID}))
    assert check.verdict == "good"
    assert "6 performance + 2 efficiency" in check.title
    assert "taskset -c 0-11" in check.cause


def test_a_deliberate_affinity_is_no_fault() -> None:
    check = the("cores", made(cpu={"affinity": (0, 1, 2, 3), "usable_cores": 4.0}))
    assert (check.verdict, check.title[:25]) == ("good", "usable: 4 of 16 logical C")


def test_one_cpu_in_a_job_of_slurm_is_the_schedulers_matter() -> None:
    of = made(
        cpu={"affinity": (5,), "usable_cores": 1.0}, surroundings={"scheduler": "slurm"}, gpus=None
    )
    assert the("cores", of).verdict == "good"
    assert the("scheduler", of).kind == "scheduler_grants_one_cpu"


@given(st.integers(1, 200), st.floats(0.5, 128))
def test_threads_against_usable_cores(threads: int, usable: float) -> None:
    of = made(cpu={"usable_cores": usable}, threads={"OMP_NUM_THREADS": str(threads)})
    check = the("threads", of)
    assert (check.kind == "threads_exceed_cores") == (threads > max(1, -(-usable // 1)))


@pytest.mark.parametrize("text", ["x", "0", "-1", "1.5", "4,x", "²", "9" * 30])
def test_a_setting_that_is_no_number_is_said(text: str) -> None:
    check = the("threads", made(threads={"OMP_NUM_THREADS": text}))
    assert check.kind == "thread_setting_invalid"
    assert check.fixes[0].undo == f"export OMP_NUM_THREADS={shlex.quote(text)}"


@pytest.mark.parametrize(
    "variables",
    [
        {"OMP_NUM_THREADS": "4,2"},
        {"OMP_NUM_THREADS": ""},
        {"OPENCV_FOR_THREADS_NUM": "0"},
        {"KMP_AFFINITY": "granularity=fine", "OMP_PROC_BIND": "true"},
    ],
)
def test_settings_that_are_fine(variables: dict[str, str]) -> None:
    assert the("threads", made(threads=variables)).verdict == "good"


def test_the_undo_of_a_thread_setting_is_what_was_there() -> None:
    check = the("threads", made(threads={"MKL_NUM_THREADS": "99"}))
    (remedy,) = check.fixes
    assert (remedy.action, remedy.undo) == (
        "export MKL_NUM_THREADS=16",
        "export MKL_NUM_THREADS=99",
    )


def test_one_thread_is_good_and_what_it_means_is_said() -> None:
    check = the("threads", made(threads={"OMP_NUM_THREADS": "1"}))
    assert check.verdict == "good"
    assert "torch.set_num_threads" in check.cause


def test_threads_of_opencv_in_workers_are_counted() -> None:
    assert "8 workers that use OpenCV would run 128 threads" in the("threads", made()).cause
    few = made(cpu={"usable_cores": 4.0}, threads=ThreadSettings({}, fact(4), fact(4)))
    assert "would run" not in the("threads", few).cause


# --- Clocks -----------------------------------------------------------------------------------


def test_the_same_governors_name_is_judged_by_its_driver() -> None:
    def verdict(driver: str, epp: str | None) -> tuple[str, str]:
        policies = (frequency(driver=driver, governor="powersave", energy_preference=epp),)
        check = the("frequency", made(cpu={"policies": policies}))
        return check.verdict, check.kind

    assert verdict("acpi-cpufreq", None) == ("bad", "governor_pins_minimum")
    assert verdict("intel_cpufreq", None) == ("bad", "governor_pins_minimum")
    assert verdict("intel_cpufreq", "performance") == ("bad", "governor_pins_minimum")
    assert verdict("intel_pstate", None) == ("cannot_tell", "")
    assert verdict("intel_pstate", "balance_performance") == ("cannot_tell", "")
    assert verdict("intel_pstate", "performance") == ("good", "")
    assert verdict("amd-pstate-epp", "performance") == ("good", "")
    assert verdict("amd-pstate-epp", "power") == ("bad", "energy_preference_power")


@pytest.mark.parametrize("governor", ["schedutil", "ondemand", "conservative", "userspace"])
def test_clocks_that_follow_the_load_want_a_measurement(governor: str) -> None:
    check = the("frequency", made(cpu={"policies": (generic(governor=governor),)}))
    assert check.verdict == "cannot_tell"
    assert check.fixes[-1].action == "sudo cpupower frequency-set -g performance"
    assert check.fixes[-1].undo == f"sudo cpupower frequency-set -g {governor}"


@given(st.integers(0, 255))
def test_epp_as_a_number(epp: int) -> None:
    check = the("frequency", made(cpu={"policies": (own_choice(energy_preference=str(epp)),)}))
    expected = "good" if epp == 0 else "bad" if epp > policy.EPP_POWER else "cannot_tell"
    assert check.verdict == expected


def test_the_undo_of_clocks_restores_each_core_as_it_was() -> None:
    fast = own_choice(cpus=tuple(range(8)))
    slow = own_choice(cpus=(8,), energy_preference="balance_power", limit_hz=3e9, hardware_hz=3e9)
    check = the("frequency", made(cpu={"policies": (fast, slow)}))
    lesser, governor = check.fixes
    assert lesser.action.startswith("echo performance | sudo tee ")
    place = "/sys/devices/system/cpu/cpu{}/cpufreq/energy_performance_preference"
    assert lesser.undo == (
        f"echo balance_performance | sudo tee {place.format('{0..7}')} && "
        f"echo balance_power | sudo tee {place.format('8')}"
    )
    assert governor.undo.startswith("sudo cpupower frequency-set -g powersave && ")
    assert lesser.undo in governor.undo


def test_different_governors_are_restored_core_by_core() -> None:
    policies = (generic(cpus=(0, 1)), generic(cpus=(2,), governor="powersave"))
    check = the("frequency", made(cpu={"policies": policies}))
    assert check.fixes[0].undo == (
        "sudo cpupower -c 0-1 frequency-set -g schedutil && "
        "sudo cpupower -c 2 frequency-set -g powersave"
    )


def test_a_governor_that_is_not_offered_is_not_proposed() -> None:
    policies = (generic(governor="powersave", available_governors=("powersave", "schedutil")),)
    check = the("frequency", made(cpu={"policies": policies}))
    assert check.fixes[0].action == "sudo cpupower frequency-set -g schedutil"
    policies = (generic(governor="powersave", available_governors=("powersave",)),)
    check = the("frequency", made(cpu={"policies": policies}))
    assert check.fixes[0].action.startswith("sudo modprobe cpufreq_performance && ")


@given(st.floats(0.3, 1.0))
@example(0.95)
def test_the_limit_of_the_clock(share: float) -> None:
    check = the("frequency", made(cpu={"policies": (frequency(limit_hz=share * 5e9),)}))
    assert (check.kind == "clock_limited") == (share * 5e9 < policy.CLOCK_LIMIT_SHARE * 5e9)


def test_the_limit_of_acpi_cpufreq_leaves_out_the_boost() -> None:
    epyc = generic(governor="performance", limit_hz=2.8e9, hardware_hz=3.7e9)
    assert the("frequency", made(cpu={"policies": (epyc,)})).verdict == "good"


def test_the_fix_of_a_limited_clock_names_both_limits() -> None:
    slow = frequency(cpus=(8, 9), limit_hz=2e9)
    check = the("frequency", made(cpu={"policies": (frequency(cpus=tuple(range(8))), slow)}))
    (remedy,) = check.fixes
    assert remedy.action == "sudo cpupower -c 8-9 frequency-set -u 5000000kHz"
    assert remedy.undo == "sudo cpupower -c 8-9 frequency-set -u 2000000kHz"


def test_turbo_is_switched_on_by_the_file_that_was_read() -> None:
    folder = "/sys/devices/system/cpu"
    intel = the("frequency", made(cpu={"turbo": known(False, f"{folder}/intel_pstate/no_turbo")}))
    other = the("frequency", made(cpu={"turbo": known(False, f"{folder}/cpufreq/boost")}))
    assert intel.fixes[0].action == f"echo 0 | sudo tee {folder}/intel_pstate/no_turbo"
    assert intel.fixes[0].undo == f"echo 1 | sudo tee {folder}/intel_pstate/no_turbo"
    assert other.fixes[0].action == f"echo 1 | sudo tee {folder}/cpufreq/boost"


def test_clocks_that_are_not_visible_cannot_be_told() -> None:
    of = made(cpu={"policies": None, "turbo": None, "idle_states": None})
    for name in ("frequency", "idle"):
        check = the(name, of)
        assert check.verdict == "cannot_tell"
        assert check.cause


def test_a_low_clock_at_rest_is_no_fault() -> None:
    policies = (frequency(current_hz=0.8e9),)
    check = the("frequency", made(cpu={"policies": policies, "current_hz": (0.8e9,) * 16}))
    assert check.verdict == "good"
    assert any("0.8 GHz" in each.value for each in check.evidence)


def test_only_cores_that_a_job_may_use_are_judged() -> None:
    policies = (frequency(cpus=(0, 1)), generic(cpus=(2, 3), governor="powersave"))
    assert the("frequency", made(cpu={"policies": policies, "affinity": (0, 1)})).verdict == "good"
    assert the("frequency", made(cpu={"policies": policies, "affinity": (0, 3)})).verdict == "bad"


@given(st.floats(0, 5e-3), st.booleans())
@example(1e-3, False)
def test_idle_states_by_the_deepest_that_is_enabled(latency: float, disabled: bool) -> None:
    states = (IdleState("C1", 1e-6, False), IdleState("C10", latency, disabled))
    check = the("idle", made(cpu={"idle_states": states}))
    slow = not disabled and latency >= policy.IDLE_LATENCY_S
    assert check.verdict == ("cannot_tell" if slow else "good")
    assert bool(check.fixes) == slow


def test_idle_states_that_were_off_stay_off_after_the_undo() -> None:
    states = (
        IdleState("C1", 1e-6, False),
        IdleState("C6", 1e-4, True),
        IdleState("C10", 2e-3, False),
    )
    remedy = the("idle", made(cpu={"idle_states": states})).fixes[1]
    assert remedy.undo == "sudo cpupower idle-set -E && sudo cpupower idle-set -d 1"
    off = (IdleState("C1", 1e-6, True),)
    assert the("idle", made(cpu={"idle_states": off})).verdict == "good"


# --- Memory, storage, limits ------------------------------------------------------------------


@given(st.integers(1, 64 * GIB))
@example(64 * GIB // 20)
@example(64 * GIB // 20 + 1)
def test_available_memory(available: int) -> None:
    check = the("memory", made(memory={"available_bytes": available}))
    least = max(policy.LEAST_AVAILABLE_BYTES, policy.LEAST_AVAILABLE_SHARE * 64 * GIB)
    assert (check.kind == "memory_nearly_full") == (available < least)


def test_a_small_machine_is_not_full_by_being_small() -> None:
    check = the("memory", made(memory={"total_bytes": GIB, "available_bytes": 600 << 20}))
    assert check.verdict == "good"


@given(st.integers(0, 8 * GIB))
@example(8 * GIB * 95 // 100)
@example(8 * GIB * 95 // 100 + 1)
def test_the_cgroups_limit(used: int) -> None:
    check = the("memory", made(memory={"limit_bytes": 8 * GIB, "limit_used_bytes": used}))
    assert (check.kind == "memory_limit_near") == (used >= policy.LIMIT_USED_SHARE * 8 * GIB)


def test_a_limit_above_the_ram_is_none() -> None:
    changes = {"limit_bytes": 64 * GIB, "limit_used_bytes": 63 * GIB}
    assert the("memory", made(memory=changes)).verdict == "good"


@given(st.integers(0, 16 * GIB), st.integers(4 * GIB, 64 * GIB))
@example(64 * GIB // 10 + 1, 16 * GIB)
@example(64 * GIB // 10 + 1, 16 * GIB - 1)
@example(64 * GIB // 10, 16 * GIB - 1)
def test_swap_counts_under_pressure_only(used: int, available: int) -> None:
    changes = {"swap_total_bytes": 16 * GIB, "swap_used_bytes": used, "available_bytes": available}
    much = used >= policy.SWAP_USED_SHARE * 64 * GIB
    pressed = available < policy.SWAP_PRESSURE_SHARE * 64 * GIB
    check = the("memory", made(memory=changes))
    assert (check.kind == "swap_in_use") == (bool(used) and much and pressed)


def test_no_swap_is_fine() -> None:
    changes = {"swap_total_bytes": None, "swap_used_bytes": None}
    assert the("memory", made(memory=changes)).verdict == "good"


def test_less_ram_than_a_gpu_has_is_said() -> None:
    check = the("memory", made(gpus=[gpu(memory_bytes=80 * GIB)]))
    assert check.verdict == "good"
    assert "mmap=True" in check.cause


@given(st.integers(0, 40 * GIB))
@example(GIB)
@example(GIB - 1)
def test_shm_by_its_size(total: int) -> None:
    check = the("shm", made(memory={"shm_total_bytes": total, "shm_free_bytes": total}))
    assert (check.kind == "shm_small") == (total < policy.LEAST_SHM_BYTES)


def test_shm_of_a_small_machine_is_half_its_ram_and_good() -> None:
    small = {"total_bytes": GIB, "shm_total_bytes": GIB // 2, "shm_free_bytes": GIB // 2}
    assert the("shm", made(memory=small)).verdict == "good"


@pytest.mark.parametrize(
    ("container", "start"),
    [
        ("docker", "docker run --shm-size=8g"),
        ("kubernetes", "add to the pod: volumes: [{name: shm, emptyDir: {medium: Memory"),
        (None, "sudo mount -o remount,size=8g /dev/shm"),
    ],
)
def test_the_fix_of_a_small_shm_is_where_it_was_made(container: Any, start: str) -> None:
    of = made(memory={"shm_total_bytes": 64 << 20}, surroundings={"container": container})
    check = the("shm", of)
    assert check.fixes[0].action.startswith(start)
    assert "bus error" in check.title


@given(st.integers(0, 20 * GIB), st.floats(1e6, 1e9))
@example(5 * GIB, 100e6)
@example(5 * GIB - 1, 100e6)
def test_disk_by_room_and_rate(free: int, measured: float) -> None:
    check = the("disk", made(storage={"free_bytes": free, "read_bytes_per_s": measured}))
    full, slow = free < policy.LEAST_FREE_BYTES, measured < policy.LEAST_READ_RATE
    assert check.kind == ("disk_full" if full else "disk_slow" if slow else "")


@pytest.mark.parametrize(
    ("kind", "measured", "verdict"),
    [
        ("nvme", None, "good"),
        ("hdd", None, "bad"),
        ("hdd", 180e6, "good"),
        ("network", None, "cannot_tell"),
        ("network", 30e6, "bad"),
        ("network", 900e6, "good"),
        ("overlay", None, "cannot_tell"),
        (None, None, "cannot_tell"),
    ],
)
def test_disk_by_kind_where_no_rate_was_measured(kind: Any, measured: Any, verdict: str) -> None:
    check = the("disk", made(storage={"kind": kind, "read_bytes_per_s": measured}))
    assert check.verdict == verdict
    if verdict == "cannot_tell":
        assert "--data" in check.cause


@given(st.integers(1, 4096), st.integers(1, 256))
def test_open_files_against_the_workers_of_this_machine(soft: int, cores: int) -> None:
    of = made(limits={"open_files": soft}, cpu={"usable_cores": float(cores)})
    check = the("files", of)
    assert (check.verdict == "bad") == (soft < files_needed(max(1, -(-cores // 2))))


def test_the_usual_1024_files_are_enough_for_a_workstation_and_not_for_a_big_server() -> None:
    assert the("files", made(limits={"open_files": 1024})).verdict == "good"
    big = made(limits={"open_files": 1024}, cpu={"usable_cores": 128.0})
    check = the("files", big)
    assert check.kind == "open_files_limit_low"
    assert (check.fixes[0].action, check.fixes[0].undo) == (
        "ulimit -n 65536",
        "ulimit -n 1024",
    )
    eight = made(
        limits={"open_files": 1024},
        cpu={"usable_cores": 128.0},
        gpus=[gpu(n) for n in range(8)],
    )
    assert the("files", eight).verdict == "good", (
        "each of the eight processes has a limit of its own"
    )


def test_open_files_are_not_raised_above_the_hard_limit() -> None:
    check = the("files", made(limits={"open_files": 100, "open_files_hard": 4096}))
    assert check.fixes[0].action == "ulimit -n 4096"
    check = the("files", made(limits={"open_files": 100, "open_files_hard": 100}))
    assert "limits.d" in check.fixes[0].action


def test_what_is_unlimited_is_good() -> None:
    of = made(limits={"open_files": None, "processes": None})
    assert the("files", of).verdict == the("processes", of).verdict == "good"


@given(st.integers(1, 4096))
@example(1024)
@example(1023)
def test_processes(limit: int) -> None:
    check = the("processes", made(limits={"processes": limit}))
    assert (check.verdict == "bad") == (limit < policy.LEAST_PROCESSES)


# --- NUMA and PCIe ----------------------------------------------------------------------------


def test_numa_of_a_server_depends_on_how_a_job_is_started() -> None:
    gpus = [gpu(n, numa_node=n // 2) for n in range(4)]
    torch = TorchBuild("2.9.1+cu128", (12, 8), None, "/site")
    of = made(cpu={"numa_nodes": TWO_NODES}, gpus=gpus, cuda={"torch": torch})
    check = the("numa", of)
    assert check.verdict == "cannot_tell"
    assert check.fixes[0].action == "torchrun --numa-binding=node --nproc-per-node=4 train.py"
    assert check.fixes[1].action.startswith("numactl --cpunodebind=0 --membind=0 ")
    older = the("numa", made(cpu={"numa_nodes": TWO_NODES}, gpus=gpus))
    assert [r.action.split()[0] for r in older.fixes] == ["numactl"]


def test_numa_where_the_process_is_bound() -> None:
    bound = {"numa_nodes": TWO_NODES, "affinity": tuple(range(8, 16))}
    near = the("numa", made(cpu=bound, gpus=[gpu(numa_node=1)]))
    assert (near.verdict, near.title) == (
        "good",
        "this process is bound to node 1, that of GPU 0",
    )
    far = the("numa", made(cpu=bound, gpus=[gpu(numa_node=0)]))
    assert far.fixes[0].action == "numactl --cpunodebind=0 --membind=0 python train.py"
    assert far.fixes[0].undo == "taskset -c 8-15 python train.py"


def test_numa_where_the_firmware_says_nothing() -> None:
    check = the("numa", made(cpu={"numa_nodes": TWO_NODES}, gpus=[gpu(numa_node=None)]))
    assert check.verdict == "cannot_tell"
    assert the("numa", made(cpu={"numa_nodes": TWO_NODES}, gpus=None)).verdict == "good"


@given(st.sampled_from([1, 2, 4, 8, 16]), st.sampled_from([1, 2, 4, 8, 16]))
def test_lanes(width: int, most: int) -> None:
    of = made(gpus=[gpu(pcie_width=width, pcie_width_max=most)])
    cause = the("pcie", of).kind
    if width < most:
        assert cause == "pcie_width_reduced"
    else:  # the GPU itself has 16: a slot of 8 is common and good enough
        assert cause == ("pcie_slot_narrow" if width < 8 else "")


def test_lanes_by_the_buss_files_are_the_gpus_own() -> None:
    half = gpu(pcie_width=8, performance_state=unknown())
    half = dataclasses.replace(half, pcie_width_max=known(16, "/sys/bus/pci/devices/x"))
    assert the("pcie", made(gpus=[half])).verdict == "good"


@given(st.integers(0, 15), st.integers(1, 5))
def test_a_low_generation_is_bad_at_work_only(state: int, generation: int) -> None:
    of = made(
        gpus=[gpu(performance_state=state, pcie_generation=generation, pcie_generation_max=4)]
    )
    check = the("pcie", of)
    if generation >= 4:
        assert check.verdict == "good"
    else:
        assert check.verdict == ("bad" if state <= policy.ACTIVE_STATE else "cannot_tell")


def test_a_gpu_of_which_the_p_state_is_unknown_is_not_blamed() -> None:
    of = made(gpus=[gpu(performance_state=unknown(), pcie_generation=1)])
    assert the("pcie", of).verdict == "cannot_tell"
    assert CHECKS["pcie"](made(gpus=[gpu(pcie_width=None, pcie_generation=None)])) == ()


def test_a_pci_address_is_the_same_in_both_writings() -> None:
    device = PciDevice("0000:02:00.0", "0x1", "0x030000", "nvidia", link_width_max=4)
    of = made(gpus=[gpu(1, pcie_width=4, pcie_width_max=4)], cuda={"pci_devices": (device,)})
    assert the("pcie", of).verdict == "good", "this GPU has four lanes only"


# --- GPUs -------------------------------------------------------------------------------------


def test_each_gpu_has_its_own_check() -> None:
    found = CHECKS["gpu-temperature"](made(gpus=[gpu(0), gpu(3, temperature_c=95.0)]))
    assert [check.verdict for check in found] == ["good", "bad"]
    assert [check.subject for check in found] == ["GPU 0", "GPU 3 (NVIDIA L4)"]


def test_gpus_that_do_not_answer_are_left_to_the_check_of_the_gpu() -> None:
    blind = cannot_tell("NVML", "NVML_ERROR_LIB_RM_VERSION_MISMATCH: of another version")
    of = made(gpus=[silent_gpu(blind)])
    for name, function in MACHINE_CHECKS:
        if name.startswith("gpu-") or name in ("ecc", "persistence", "mig", "compute-mode"):
            assert function(of) == (), name


@pytest.mark.parametrize(
    "reasons",
    [
        (),
        ("gpu_idle",),
        ("sw_power_cap",),
        ("sync_boost", "display_clock_setting"),
        ("gpu_idle", "applications_clocks_setting"),
    ],
)
def test_clock_reasons_that_are_normal(reasons: tuple[str, ...]) -> None:
    of = made(gpus=[gpu(clock_reasons=reasons, sm_hz=0.3e9)])
    assert the("gpu-clocks", of).verdict == "good"


def test_a_slowdown_that_is_shown_while_idle_cannot_be_told() -> None:
    of = made(gpus=[gpu(clock_reasons=("gpu_idle", "hw_slowdown"))])
    assert the("gpu-clocks", of).verdict == "cannot_tell"


def test_the_undo_of_application_clocks_is_their_former_setting() -> None:
    of = made(
        gpus=[
            gpu(
                clock_reasons=("applications_clocks_setting",),
                sm_hz=0.585e9,
                application_sm_hz=0.585e9,
                memory_hz=5.001e9,
            )
        ]
    )
    assert the("gpu-clocks", of).fixes[0].undo == "sudo nvidia-smi -i 0 -ac 5001,585"


@given(st.floats(20, 120))
@example(87.0)
@example(86.9)
def test_temperature(celsius: float) -> None:
    check = the("gpu-temperature", made(gpus=[gpu(temperature_c=celsius)]))
    assert (check.verdict == "bad") == (celsius >= 92.0 - policy.TEMPERATURE_MARGIN_C)


def test_temperature_without_a_known_limit() -> None:
    of = made(gpus=[gpu(slowdown_c=unknown())])
    assert the("gpu-temperature", of).verdict == "cannot_tell"
    assert CHECKS["gpu-temperature"](made(gpus=[gpu(temperature_c=None)])) == ()


@given(st.floats(10, 100))
@example(policy.POWER_SHARE * 72.0)
def test_power_limit(watts: float) -> None:
    check = the("gpu-power", made(gpus=[gpu(power_limit_w=watts)]))
    assert (check.verdict == "bad") == (watts < policy.POWER_SHARE * 72.0)
    if check.fixes:
        assert check.fixes[0].undo == f"sudo nvidia-smi -i 0 -pl {watts:.0f}"


def test_a_laptop_without_power_limits_is_not_judged() -> None:
    assert CHECKS["gpu-power"](made(gpus=[gpu(power_limit_w=None)])) == ()


def test_ecc() -> None:
    assert CHECKS["ecc"](made(gpus=[gpu(ecc=None, ecc_errors=None)])) == ()
    assert the("ecc", made(gpus=[gpu(ecc=False, ecc_errors=None)])).verdict == "good"
    assert the("ecc", made(gpus=[gpu(ecc=True, ecc_errors=unknown())])).verdict == "cannot_tell"


def test_persistence_of_a_workstation_is_off_by_default() -> None:
    plain = [gpu(n, persistence=False, ecc=None, ecc_errors=None) for n in range(4)]
    assert the("persistence", made(gpus=plain[:1])).verdict == "good"
    server = CHECKS["persistence"](made(gpus=plain))
    assert {check.kind for check in server} == {"persistence_off"}


def test_what_containers_and_wsl_do_not_show_is_not_taken_for_nothing() -> None:
    used = [gpu(used_bytes=9 * GIB)]
    wsl = made(gpus=used, surroundings={"wsl": 2})
    assert the("gpu-processes", wsl).verdict == the("gpu-memory", wsl).verdict == "cannot_tell"
    inside = made(gpus=used, surroundings={"container": "docker"})
    assert the("gpu-processes", inside).verdict == "cannot_tell"
    assert the("gpu-memory", inside).verdict == "bad"
    free = made(surroundings={"wsl": 2})
    assert the("gpu-processes", free).verdict == the("gpu-memory", free).verdict == "good"


def test_persistence_matters_where_nothing_else_holds_the_gpu() -> None:
    off = gpu(persistence=False)
    desktop = gpu(persistence=False, processes=(process(GIB // 4, graphics=True),))
    hidden = gpu(persistence=False, processes=unknown())
    assert the("persistence", made(gpus=[off])).verdict == "bad"
    assert the("persistence", made(gpus=[desktop])).verdict == "good"
    assert the("persistence", made(gpus=[hidden])).verdict == "cannot_tell"
    assert CHECKS["persistence"](made(gpus=[off], surroundings={"wsl": 2})) == ()


def test_mig_says_what_a_job_gets() -> None:
    assert CHECKS["mig"](made(gpus=[gpu(mig=False, mig_instances=())])) == ()
    check = the("mig", made(gpus=[gpu(mig=True, mig_instances=("MIG-a", "MIG-b"))]))
    assert (check.verdict, check.title) == (
        "good",
        "split by MIG; a job can use one of 2 instances",
    )
    assert "CUDA_VISIBLE_DEVICES=MIG-a" in check.cause


def test_an_exclusive_gpu_is_good_while_it_is_free() -> None:
    exclusive = gpu(compute_mode="exclusive_process")
    assert the("compute-mode", made(gpus=[exclusive])).verdict == "good"
    own = gpu(compute_mode="exclusive_process", processes=(process(GIB, own=True),))
    assert the("compute-mode", made(gpus=[own])).verdict == "good"


@given(st.integers(0, 24 * GIB))
@example(int(policy.OTHERS_SHARE * 24 * GIB))
@example(int(policy.OTHERS_SHARE * 24 * GIB) + 1)
def test_memory_of_others(held: int) -> None:
    check = the("gpu-processes", made(gpus=[gpu(processes=(process(held),), used_bytes=held)]))
    assert (check.verdict == "bad") == (held >= policy.OTHERS_SHARE * 24 * GIB)


def test_other_processes_by_kind() -> None:
    own = gpu(processes=(process(9 * GIB, own=True),), used_bytes=9 * GIB)
    desktop = gpu(processes=(process(2 * GIB, graphics=True),), used_bytes=2 * GIB)
    nameless = gpu(processes=(GpuProcess(7, "", None),))
    assert the("gpu-processes", made(gpus=[own])).verdict == "good"
    assert "desktop (2.00 GiB)" in the("gpu-processes", made(gpus=[desktop])).title
    check = the("gpu-processes", made(gpus=[nameless]))
    assert (check.kind, check.fixes[0].action) == ("gpu_shared", "kill 7")
    assert the("gpu-processes", made(gpus=[gpu(processes=unknown())])).verdict == "cannot_tell"


def test_the_free_gpu_is_named_by_its_uuid() -> None:
    busy = gpu(0, processes=(process(8 * GIB),), used_bytes=8 * GIB)
    fuller, free = gpu(1, used_bytes=2 * GIB), gpu(2)
    # Of those that a mask leaves to the job, and of no others.
    for mask, wanted in (("0,1,2", free), ("0,1", fuller)):
        of = made(gpus=[busy, fuller, free], cuda={"visible_devices": mask})
        remedy = CHECKS["gpu-processes"](of)[0].fixes[0]
        assert remedy.action.startswith(f"export CUDA_VISIBLE_DEVICES={wanted.uuid.value}  #")
        assert remedy.undo == f"export CUDA_VISIBLE_DEVICES={mask}"
    alike = CHECKS["gpu-processes"](made(gpus=[busy, gpu(1, uuid=unknown())]))[0].fixes[0]
    assert alike.action.startswith("export CUDA_DEVICE_ORDER=PCI_BUS_ID CUDA_VISIBLE_DEVICES=1  #")
    assert alike.undo == "unset CUDA_VISIBLE_DEVICES CUDA_DEVICE_ORDER"


@given(st.integers(0, 24 * GIB), st.integers(0, 24 * GIB))
@example(int(policy.OTHERS_SHARE * 24 * GIB), 0)
@example(int(policy.OTHERS_SHARE * 24 * GIB) + 1, 0)
def test_memory_that_nobody_holds(used: int, held: int) -> None:
    of = made(gpus=[gpu(used_bytes=used, processes=(process(held),))])
    check = the("gpu-memory", of)
    least = max(policy.UNSEEN_BYTES, policy.OTHERS_SHARE * 24 * GIB)
    assert (check.kind == "gpu_memory_unseen") == (used - held > least)


def test_memory_whose_holders_are_not_told() -> None:
    full = gpu(used_bytes=20 * GIB, processes=unknown())
    assert the("gpu-memory", made(gpus=[full])).verdict == "cannot_tell"
    partly = gpu(used_bytes=20 * GIB, processes=(process(None),))
    assert the("gpu-memory", made(gpus=[partly])).verdict == "cannot_tell"
    assert the("gpu-memory", made(gpus=[gpu(processes=unknown())])).verdict == "good"
    assert CHECKS["gpu-memory"](made(gpus=[gpu(used_bytes=None)])) == ()
    inside = made(gpus=[gpu(used_bytes=20 * GIB)], surroundings={"container": "docker"})
    assert "outside this container" in the("gpu-memory", inside).cause.lower()


# --- Packages ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("torch", "vision"),
    [
        ("1.3.1", None),
        ("1.4.0", (0, 5)),
        ("1.13.1+cu117", (0, 14)),
        ("2.0.0", (0, 15)),
        ("2.6.0+cu124", (0, 21)),
        ("2.13.0+cpu", (0, 28)),
        ("3.0.0", None),
        ("nightly", None),
    ],
)
def test_the_torchvision_of_a_torch(torch: str, vision: tuple[int, int] | None) -> None:
    assert expected_torchvision(torch) == vision


def test_the_fix_of_a_mismatch_takes_the_wheels_of_this_torch() -> None:
    torch = TorchBuild("2.13.0+cpu", None, None, "/site")
    vision = TorchBuild("0.28.0+cu130", (13, 0), None, "/site")
    check = the("torchvision", made(cuda={"torch": torch, "torchvision": vision}))
    assert check.kind == "torchvision_build"
    (remedy,) = check.fixes
    index = "--index-url https://download.pytorch.org/whl"
    assert remedy.action.endswith(f"'torchvision==0.28.*' {index}/cpu")
    assert remedy.undo.endswith(f"torchvision==0.28.0+cu130 {index}/cu130")


def test_a_minor_version_of_cuda_apart_is_fine_and_torchvision_may_be_missing() -> None:
    vision = TorchBuild("0.23.0+cu129", (12, 9), None, "/site")
    assert the("torchvision", made(cuda={"torchvision": vision})).verdict == "good"
    assert CHECKS["torchvision"](made(cuda={"torchvision": None})) == ()
    unread = made(cuda={"torchvision": unknown()})
    assert the("torchvision", unread).verdict == "cannot_tell"


def test_an_older_driver_of_the_same_cuda_works_and_is_said() -> None:
    check = the("cuda-compat", made(cuda={"nvml_cuda": (12, 2)}))
    assert (check.verdict, check.title) == (
        "good",
        "PyTorch for CUDA 12.6 on a driver for CUDA 12.2: compatible",
    )
    assert CHECKS["cuda-compat"](made(cuda={"nvml_cuda": (11, 8)})) == ()
    assert CHECKS["cuda-compat"](made(cuda={"nvml_cuda": (13, 0)})) == ()


# --- Surroundings -----------------------------------------------------------------------------


def test_a_container_says_its_limits() -> None:
    of = made(cpu=QUOTA, memory={"limit_bytes": 8 * GIB}, surroundings={"container": "docker"})
    assert the("container", of).title == "in docker: 4 cores, 8.00 GiB RAM, 32.00 GiB /dev/shm"
    assert CHECKS["container"](made()) == ()


@pytest.mark.parametrize(
    ("grant", "cause"),
    [
        ({"SLURM_CPUS_PER_TASK": "16"}, ""),
        ({"SLURM_CPUS_PER_TASK": "8"}, "scheduler_grants_fewer"),
        ({"SLURM_JOB_CPUS_PER_NODE": "8(x2)"}, "scheduler_grants_fewer"),
        ({"SLURM_JOB_CPUS_PER_NODE": "32,16"}, ""),
        ({"SLURM_CPUS_PER_TASK": "lots"}, ""),
        ({}, ""),
    ],
)
def test_a_grant_of_slurm(grant: dict[str, str], cause: str) -> None:
    check = the("scheduler", made(surroundings={"scheduler": "slurm", "scheduler_grant": grant}))
    assert check.kind == cause


def test_other_schedulers_are_asked_in_their_own_words() -> None:
    of = made(surroundings={"scheduler": "sge", "scheduler_grant": {"NSLOTS": "4"}})
    check = the("scheduler", of)
    assert check.fixes[1].action == "#$ -pe smp 16"
    assert check.fixes[1].undo == "#$ -pe smp 4"
    assert CHECKS["scheduler"](made()) == ()


def test_changes_of_the_helpers_are_taken_as_facts() -> None:
    memory = changed(made().memory, {"total_bytes": 5, "limit_bytes": None})
    assert memory.total_bytes.value == 5
    assert memory.limit_bytes.is_absent


# --- Exactly at the thresholds ----------------------------------------------------------------


def test_what_is_exactly_enough_is_good() -> None:
    setting = gpu(clock_reasons=("applications_clocks_setting",), sm_hz=0.95e9, sm_max_hz=1e9)
    assert the("gpu-clocks", made(gpus=[setting])).verdict == "good"
    assert the("shm", made(memory={"shm_free_bytes": GIB})).verdict == "good"
    just = {"quota_cores": 8.0, "usable_cores": 8.0}
    assert the("threads", made(cpu=just)).verdict == "good", "8 threads on 8 cores"
    assert the("memory", made(gpus=[gpu(memory_bytes=64 * GIB)])).cause == ""
    full = gpu(memory_bytes=20 * GIB, used_bytes=2 * GIB, processes=(process(GIB),))
    assert the("gpu-processes", made(gpus=[full])).verdict == "bad", "5% of the memory"
    swapped = {"total_bytes": 40 * GIB, "available_bytes": 9 * GIB, "swap_total_bytes": 8 * GIB}
    assert the("memory", made(memory=swapped | {"swap_used_bytes": 4 * GIB})).verdict == "bad"
    four = made(cpu={"usable_cores": 4.0}, threads={"OMP_NUM_THREADS": "1"})
    assert "torch.set_num_threads" in the("threads", four).cause


def test_a_container_with_a_free_gpu_has_no_hidden_process() -> None:
    unread = made(gpus=[gpu(used_bytes=unknown())])
    assert the("gpu-processes", unread).verdict == "good", "outside containers NVML shows all"
    inside = made(gpus=[gpu(used_bytes=unknown())], surroundings={"container": "docker"})
    assert the("gpu-processes", inside).verdict == "cannot_tell"


@pytest.mark.parametrize("version", ["2", "", "nightly", "2.x", "2.8.0"])
def test_numa_binding_is_proposed_only_where_torchrun_has_it(version: str) -> None:
    gpus = [gpu(n, numa_node=n) for n in range(2)]
    torch = TorchBuild(version, (12, 6), None, "/site")
    check = the("numa", made(cpu={"numa_nodes": TWO_NODES}, gpus=gpus, cuda={"torch": torch}))
    assert [remedy.action.split()[0] for remedy in check.fixes] == ["numactl"]


def test_pairs_that_are_not_known_are_not_judged() -> None:
    for torch, vision in (("3.0.0+cu126", "0.23.0+cu126"), ("2.8.0+cu126", "main+cu126")):
        builds = [TorchBuild(version, (12, 6), None, "/site") for version in (torch, vision)]
        of = made(cuda={"torch": builds[0], "torchvision": builds[1]})
        assert the("torchvision", of).verdict == "cannot_tell"


def test_epp_is_proposed_only_where_the_hardware_follows_it() -> None:
    for driver, epp in (("intel_cpufreq", "balance_performance"), ("intel_pstate", None)):
        policies = (frequency(driver=driver, governor="schedutil", energy_preference=epp),)
        check = the("frequency", made(cpu={"policies": policies}))
        assert len(check.fixes) == 1
        assert "cpupower frequency-set" in check.fixes[0].action
