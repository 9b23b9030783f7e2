"""The processor's facts, on machines that have different things and lack different things."""

from __future__ import annotations

import os
import subprocess
import sys
from typing import Any

import psutil
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from helpers_trees import (
    CPU,
    V2_MOUNT,
    alder_lake,
    alder_lake_machine,
    cpuinfo,
    machine,
    siblings,
)
from trainfit.hardware.machine.limits import THREAD_VARIABLES, read_threads
from trainfit.hardware.machine.parsing import cpu_list, cpu_list_text, natural
from trainfit.hardware.machine.processor import read_cpu
from trainfit.hardware.machine.system import System
from trainfit.results.machine import CoreKind, IdleState

# --- Lists of CPUs ----------------------------------------------------------------------------


@given(st.sets(st.integers(0, 8191)))
def test_a_list_of_cpus_survives_being_written_and_read(cpus: set[int]) -> None:
    assert cpu_list(cpu_list_text(cpus)) == tuple(sorted(cpus))


@pytest.mark.parametrize(
    ("text", "cpus"),
    [
        ("0-3,8", (0, 1, 2, 3, 8)),
        ("0 1 2", (0, 1, 2)),
        ("", ()),
        ("5\n", (5,)),
        ("3,1-2", (1, 2, 3)),
    ],
)
def test_lists_of_cpus_as_the_kernel_writes_them(text: str, cpus: tuple[int, ...]) -> None:
    assert cpu_list(text) == cpus


@pytest.mark.parametrize("text", ["3-1", "-1", "0-", "a", "0-99999", "0x3", "1_0", "٣"])
def test_what_is_no_list_of_cpus_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="is no"):
        cpu_list(text)


@given(st.text())
def test_a_whole_number_is_its_digits_or_refused(text: str) -> None:
    try:
        number = natural(text)
    except ValueError:
        return
    assert str(number) == text.strip().lstrip("0") or number == 0


# --- Kinds of cores ---------------------------------------------------------------------------


def test_hybrid_intel_by_its_counters() -> None:
    cpu = read_cpu(alder_lake_machine())
    assert cpu.model.value == "12th Gen Intel(R) Core(TM) i9-12900K"
    assert (cpu.sockets.value, cpu.physical_cores.value, cpu.logical_cpus.value) == (1, 16, 24)
    assert cpu.core_kinds.value == (
        CoreKind("performance", tuple(range(16)), 8, 5.2e9),
        CoreKind("efficiency", tuple(range(16, 24)), 8, 3.9e9),
    )
    assert cpu.core_kinds.source == "/sys/devices/cpu_core/cpus"
    assert cpu.usable_cores.value == 24.0
    assert cpu.quota_cores.is_absent


def test_hybrid_intel_by_frequencies_where_the_kernel_has_no_counters() -> None:
    files = {path: c for path, c in alder_lake().items() if "cpu_core" not in path}
    kinds = read_cpu(machine(files)).core_kinds
    assert kinds.value is not None
    assert [(kind.kind, len(kind.logical_cpus)) for kind in kinds.value] == [
        ("performance", 16),
        ("efficiency", 8),
    ]
    assert "cpuinfo_max_freq" in kinds.source


def test_hybrid_intel_without_its_efficiency_cores_is_uniform() -> None:
    files = alder_lake() | {f"{CPU}/online": "0-15", "/sys/devices/cpu_atom/cpus": ""}
    kinds = read_cpu(machine(files)).core_kinds.value
    assert kinds == (CoreKind("uniform", tuple(range(16)), 8, 5.2e9),)


def desktop(frequencies: list[int], vendor: str = "AuthenticAMD", **files: Any) -> dict[str, Any]:
    """Cores without SMT, each of its own greatest frequency in kHz."""
    last = len(frequencies) - 1
    return {
        "/proc/cpuinfo": cpuinfo(last + 1, "A processor", vendor_id=vendor),
        f"{CPU}/online": f"0-{last}",
        f"{CPU}/cpu{{0-{last}}}/topology/core_cpus_list": siblings(0, last + 1),
        f"{CPU}/cpu{{0-{last}}}/cpufreq/cpuinfo_max_freq": [f"{khz}" for khz in frequencies],
    } | files


@pytest.mark.parametrize(
    "frequencies",
    [
        [4800000, 4600000, 4600000, 4800000],  # Turbo Boost Max 3.0
        # Preferred cores: small steps over a wide range.
        [5881000, 5733000, 5586000, 5439000, 5291000, 5144000, 4996000, 4849000],
        [5250000] * 4 + [5700000] * 4,  # one die of two has the stacked cache
    ],
)
def test_favoured_cores_are_no_other_kind(frequencies: list[int]) -> None:
    kinds = read_cpu(machine(desktop(frequencies))).core_kinds.value
    assert kinds is not None
    assert [kind.kind for kind in kinds] == ["uniform"]
    assert kinds[0].max_hz == max(frequencies) * 1e3


def test_ranks_of_amds_preferred_cores_are_no_kinds() -> None:
    ranks = [str(rank) for rank in (236, 231, 186, 166)]
    files = desktop([5000000] * 4) | {f"{CPU}/cpu{{0-3}}/acpi_cppc/highest_perf": ranks}
    kinds = read_cpu(machine(files)).core_kinds.value
    assert kinds is not None and kinds[0].kind == "uniform"


def test_arm_cores_by_capacity() -> None:
    capacities = ["718"] * 2 + ["1024"] * 2
    files = {
        "/proc/cpuinfo": arm_cpuinfo(4, "0xd85"),
        f"{CPU}/online": "0-3",
        f"{CPU}/cpu{{0-3}}/topology/core_cpus_list": siblings(0, 4),
        f"{CPU}/cpu{{0-3}}/cpu_capacity": capacities,
    }
    cpu = read_cpu(machine(files))
    assert cpu.core_kinds.value == (
        CoreKind("performance", (2, 3), 2, None),
        CoreKind("efficiency", (0, 1), 2, None),
    )


def test_a_virtual_machine_that_shows_nothing_does_not_say_its_kinds() -> None:
    cpu = read_cpu(machine(cloud_vm()))
    assert cpu.core_kinds.state == "cannot_tell"
    assert "hypervisor" in cpu.core_kinds.reason


# --- Sockets, cores, models -------------------------------------------------------------------


def arm_cpuinfo(count: int, part: str) -> str:
    block = "processor\t: {}\nBogoMIPS\t: 243.75\nCPU implementer\t: 0x41\nCPU part\t: {}\n"
    return "\n".join(block.format(cpu, part) for cpu in range(count))


def cloud_vm() -> dict[str, Any]:
    """n1-standard-4: 2 cores with SMT, no cpufreq, no cpuidle, no counters."""
    return {
        "/proc/cpuinfo": cpuinfo(4, "Intel(R) Xeon(R) CPU @ 2.00GHz", "fpu hypervisor"),
        f"{CPU}/online": "0-3",
        f"{CPU}/cpu{{0-3}}/topology/thread_siblings_list": siblings(2),
        f"{CPU}/cpu{{0-3}}/topology/physical_package_id": "0",
    }


def test_a_server_of_two_sockets() -> None:
    """2 × 32 cores; SMT siblings are 64 apart; one NUMA node each, and one of memory only."""
    first, second = "0-31,64-95", "32-63,96-127"
    files = {
        "/proc/cpuinfo": cpuinfo(128, "AMD EPYC 7543", vendor_id="AuthenticAMD"),
        f"{CPU}/online": "0-127",
        f"{CPU}/cpu{{0-127}}/topology/core_cpus_list": siblings(64, pair_next=False),
        f"{CPU}/cpu{{0-127}}/topology/physical_package_id": [
            str(cpu % 64 // 32) for cpu in range(128)
        ],
        "/sys/devices/cpu": {"folder": True},
        "/sys/devices/system/node/node{0-2}/cpulist": [first, second, ""],
        "/sys/devices/system/node/node{0-1}/meminfo": [
            f"Node {n} MemTotal:       263857724 kB" for n in range(2)
        ],
    }
    cpu = read_cpu(machine(files, affinity="0-127"))
    assert (cpu.sockets.value, cpu.physical_cores.value, cpu.logical_cpus.value) == (2, 64, 128)
    assert cpu.numa_nodes.value is not None
    assert [node.node for node in cpu.numa_nodes.value] == [0, 1, 2]
    assert cpu.numa_nodes.value[1].cpus == cpu_list(second)
    assert cpu.numa_nodes.value[1].memory_bytes == 263857724 * 1024
    assert cpu.numa_nodes.value[2].cpus == ()
    assert cpu.numa_nodes.value[2].memory_bytes is None
    assert cpu.core_kinds.value == (CoreKind("uniform", tuple(range(128)), 64, None),)


def test_cores_by_cpuinfo_where_sysfs_is_hidden() -> None:
    ids = [(0, 0), (0, 0), (0, 1), (1, 0)]  # core ids restart in each package
    blocks = [
        f"processor: {cpu}\nphysical id: {package}\ncore id: {core}\n"
        for cpu, (package, core) in enumerate(ids)
    ]
    cpu = read_cpu(machine({"/proc/cpuinfo": "\n".join(blocks)}))
    assert (cpu.sockets.value, cpu.physical_cores.value, cpu.logical_cpus.value) == (2, 3, 4)
    assert cpu.policies.state == "cannot_tell"


def test_cpus_that_are_switched_off_do_not_count() -> None:
    files = cloud_vm() | {f"{CPU}/online": "0,2"}
    cpu = read_cpu(machine(files, affinity="0,2"))
    assert (cpu.logical_cpus.value, cpu.physical_cores.value) == (2, 2)


def test_siblings_that_contradict_each_other_are_not_believed() -> None:
    files = cloud_vm() | {f"{CPU}/cpu3/topology/thread_siblings_list": "0,3"}
    assert read_cpu(machine(files)).physical_cores.state == "cannot_tell"


def test_arm_servers_have_no_model_name() -> None:
    """Graviton 3: Neoverse V1 is part 0xd40."""
    files = {"/proc/cpuinfo": arm_cpuinfo(4, "0xd40"), "/sys/devices/system/cpu/online": "0-3"}
    cpu = read_cpu(machine(files))
    assert cpu.model.value == "Arm implementer 0x41, part 0xd40"
    assert cpu.current_hz.is_absent


@pytest.mark.parametrize(("release", "sockets"), [("5.10.104-tegra", None), ("6.8.0", 3)])
def test_a_jetson_is_named_by_its_board(release: str, sockets: int | None) -> None:
    """Orin: three clusters of four; old kernels number them as packages."""
    blocks = [f"processor: {cpu}\nmodel name: ARMv8 Processor rev 1 (v8l)\n" for cpu in range(12)]
    files = {
        "/proc/cpuinfo": "\n".join(blocks),
        "/proc/device-tree/model": "NVIDIA Jetson AGX Orin Developer Kit\0",
        f"{CPU}/online": "0-11",
        f"{CPU}/cpu{{0-11}}/topology/physical_package_id": [str(cpu // 4) for cpu in range(12)],
    }
    cpu = read_cpu(machine(files, uname={"release": release}))
    assert cpu.model.value == "NVIDIA Jetson AGX Orin Developer Kit"
    assert cpu.sockets.value == sockets


# --- Clocks and idle states -------------------------------------------------------------------


def test_policies_in_hertz() -> None:
    cpu = read_cpu(alder_lake_machine())
    assert cpu.policies.value is not None and len(cpu.policies.value) == 24
    policy = cpu.policies.value[23]
    assert (policy.cpus, policy.driver, policy.governor) == ((23,), "intel_pstate", "powersave")
    assert policy.available_governors == ("performance", "powersave")
    assert policy.energy_preference == "balance_performance"
    assert (policy.current_hz, policy.limit_hz, policy.hardware_hz) == (1.7e9, 3.9e9, 3.9e9)
    assert (cpu.scaling_mode.value, cpu.turbo.value) == ("active", True)
    assert cpu.current_hz.value is not None
    assert cpu.current_hz.value[:2] == (1.7e9, 1.701e9)


def test_policies_that_share_a_clock_and_those_of_old_kernels() -> None:
    files = cloud_vm() | {
        f"{CPU}/cpu{{0-3}}/cpufreq/affected_cpus": ["0 1", "0 1", "2 3", "2 3"],
        f"{CPU}/cpu{{0-3}}/cpufreq/scaling_cur_freq": "<unknown>",
        f"{CPU}/cpufreq/boost": "0",
    }
    cpu = read_cpu(machine(files))
    assert cpu.policies.value is not None
    assert [policy.cpus for policy in cpu.policies.value] == [(0, 1), (2, 3)]
    assert cpu.policies.value[0].current_hz is None
    assert cpu.turbo.value is False


@pytest.mark.parametrize(
    ("files", "mode"),
    [
        ({"amd_pstate/status": "active"}, "active"),
        ({"amd_pstate/status": "disable"}, "off"),
        ({"amd_pstate/status": "guided"}, "guided"),
        ({"intel_pstate/status": "passive"}, "passive"),
        ({"intel_pstate/status": "\x7fELF"}, None),
    ],
)
def test_modes_of_the_drivers(files: dict[str, str], mode: str | None) -> None:
    tree = cloud_vm() | {f"{CPU}/{name}": text for name, text in files.items()}
    fact = read_cpu(machine(tree)).scaling_mode
    assert (fact.value, fact.state) == (mode, "known" if mode else "cannot_tell")


def test_a_virtual_machine_has_no_cpufreq_and_says_why() -> None:
    cpu = read_cpu(machine(cloud_vm()))
    for fact in (cpu.policies, cpu.turbo, cpu.idle_states):
        assert fact.is_absent and "virtual machine" in fact.reason
    # Its "cpu MHz" never changes: it is no measurement.
    assert cpu.current_hz.state == "cannot_tell"
    assert "1700 MHz is the nominal clock" in cpu.current_hz.reason


def test_a_policy_whose_cpus_are_unreadable_leaves_the_policies_open() -> None:
    files = alder_lake() | {f"{CPU}/cpufreq/policy3/affected_cpus": {"error": "EACCES"}}
    policies = read_cpu(machine(files)).policies
    assert policies.state == "cannot_tell"


def test_idle_states_in_seconds() -> None:
    assert read_cpu(alder_lake_machine()).idle_states.value == (
        IdleState("POLL", 0.0, False, 0.0),
        IdleState("C1E", 2e-6, False, 4e-6),
        IdleState("C10", 230e-6, True, 700e-6),
    )


# --- Quotas -----------------------------------------------------------------------------------

V1_MOUNT = "33 25 0:28 {root} /sys/fs/cgroup/cpu,cpuacct rw - cgroup cgroup rw,cpu,cpuacct"


def quota(files: dict[str, Any], **calls: Any) -> Any:
    return read_cpu(machine(files, **calls))


def test_a_container_sees_its_own_quota_at_the_mount_point() -> None:
    files = {
        "/proc/self/cgroup": "0::/\n",
        "/proc/self/mountinfo": V2_MOUNT,
        "/sys/fs/cgroup/cpu.max": "150000 100000\n",
    }
    cpu = quota(files)
    assert (cpu.quota_cores.value, cpu.usable_cores.value) == (1.5, 1.5)
    assert cpu.quota_cores.source == "/sys/fs/cgroup/cpu.max"


@given(st.lists(st.one_of(st.none(), st.integers(1, 10**7)), min_size=1, max_size=6))
@settings(deadline=None, max_examples=40)
def test_the_tightest_quota_from_the_own_cgroup_to_the_root(quotas: list[int | None]) -> None:
    """One for each level, ``None`` without; the top one is the root, which has no file."""
    names = [f"level{depth}" for depth in range(len(quotas))]
    files: dict[str, Any] = {
        "/proc/self/cgroup": "0::/" + "/".join(names),
        "/proc/self/mountinfo": V2_MOUNT,
    }
    for depth, number in enumerate(quotas):
        text = f"{'max' if number is None else number} 100000\n"
        files["/sys/fs/cgroup/" + "/".join(names[: depth + 1]) + "/cpu.max"] = text
    cpu = quota(files)
    limits = [number / 100000 for number in quotas if number is not None]
    assert cpu.quota_cores.value == (min(limits) if limits else None)
    assert cpu.quota_cores.is_absent == (not limits)
    assert cpu.usable_cores.value == min([4.0, *limits])


@pytest.mark.parametrize("root", ["/", "/docker/abc"])
def test_version_1_with_and_without_a_mount_of_its_own_cgroup(root: str) -> None:
    """Docker mounts the container's cgroup at the mount point, and shows the host's path."""
    own = "/sys/fs/cgroup/cpu,cpuacct" + ("/docker/abc" if root == "/" else "")
    files = {
        "/proc/self/cgroup": "5:cpu,cpuacct:/docker/abc\n2:memory:/docker/abc\n0::/\n",
        "/proc/self/mountinfo": V1_MOUNT.format(root=root),
        f"{own}/cpu.cfs_quota_us": "200000\n",
        f"{own}/cpu.cfs_period_us": "50000\n",
        "/sys/fs/cgroup/cpu,cpuacct/cpu.cfs_period_us": "50000\n",
    }
    if root == "/":
        files["/sys/fs/cgroup/cpu,cpuacct/cpu.cfs_quota_us"] = "-1\n"
    assert quota(files, affinity="0-7").usable_cores.value == 4.0


@pytest.mark.parametrize(
    "changed",
    [
        {"/sys/fs/cgroup/a/cpu.max": "plenty"},
        {"/sys/fs/cgroup/a/cpu.max": {"error": "EACCES"}},
        {"/sys/fs/cgroup/a/cpu.max": "0 0"},
        {"/proc/self/cgroup": "0::/../../elsewhere"},
        {"/proc/self/mountinfo": "garbage"},
        {"/proc/self/cgroup": "0::/not/there"},
    ],
)
def test_where_a_quota_cannot_be_read_the_usable_cores_are_open(changed: dict[str, Any]) -> None:
    files = {
        "/proc/self/cgroup": "0::/a\n",
        "/proc/self/mountinfo": V2_MOUNT,
        "/sys/fs/cgroup/a/cpu.max": "max 100000\n",
    }
    assert quota(files).usable_cores.value == 4.0
    cpu = quota(files | changed)
    assert cpu.quota_cores.state == "cannot_tell"
    assert cpu.usable_cores.state == "cannot_tell"
    assert cpu.usable_cores.reason.startswith("at most 4 by the affinity")


def test_without_the_call_the_affinity_is_in_the_process_status() -> None:
    files = {"/proc/self/status": "Name:\tpython\nCpus_allowed:\tf0\nCpus_allowed_list:\t4-7\n"}
    assert read_cpu(machine(files, affinity="")).affinity.value == (4, 5, 6, 7)


def test_without_call_and_status_the_affinity_is_the_cpuset() -> None:
    files = {
        "/proc/self/cgroup": "0::/a\n",
        "/proc/self/mountinfo": V2_MOUNT,
        "/sys/fs/cgroup/a/cpuset.cpus.effective": "2-3\n",
    }
    assert read_cpu(machine(files, affinity="")).affinity.value == (2, 3)


# --- Threads ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("environment", "threads"),
    [
        ({}, 16),
        ({"OMP_NUM_THREADS": "4"}, 4),
        ({"OMP_NUM_THREADS": "4,2"}, 4),
        ({"OMP_NUM_THREADS": "many"}, 16),
        ({"OMP_NUM_THREADS": "0"}, 16),
        ({"OMP_NUM_THREADS": "100"}, 16),  # MKL_DYNAMIC
        ({"OMP_NUM_THREADS": "100", "MKL_DYNAMIC": "false"}, 100),
        ({"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "2"}, 2),
        ({"MKL_NUM_THREADS": "many"}, 1),
    ],
)
def test_threads_that_torch_takes(environment: dict[str, str], threads: int | None) -> None:
    system = machine(alder_lake(), environment, affinity="0-23")
    assert read_threads(system).torch_default.value == threads
    assert read_threads(system).variables == environment


def test_threads_that_torch_takes_of_an_affinity() -> None:
    """Both siblings of CPU 0's core, one of CPU 2's, two efficiency cores."""
    system = machine(alder_lake(), affinity="0-2,16,17")
    assert read_threads(system).torch_default.value == 4
    assert read_threads(system).opencv_default.value == 5
    arm = {"release": "6.8.0", "machine": "aarch64"}
    system = machine(alder_lake(), affinity="0-2", uname=arm)
    assert read_threads(system).torch_default.value == 16


@pytest.mark.slow
@pytest.mark.parametrize(
    "environment",
    [
        {},
        {"OMP_NUM_THREADS": "1"},
        {"OMP_NUM_THREADS": "300"},
        {"OMP_NUM_THREADS": "7,2", "MKL_DYNAMIC": "FALSE"},
        {"OMP_NUM_THREADS": "5", "MKL_NUM_THREADS": "3", "MKL_DYNAMIC": "FALSE"},
        {"OMP_NUM_THREADS": "none"},
    ],
)
def test_torch_itself_takes_these_threads(environment: dict[str, str]) -> None:
    inherited = {n: value for n, value in os.environ.items() if n not in THREAD_VARIABLES}
    ask = "import torch; print(torch.get_num_threads())"
    done = subprocess.run(
        [sys.executable, "-c", ask],
        env=inherited | environment,
        capture_output=True,
        text=True,
        check=True,
    )
    system = System(environment=environment)
    assert read_threads(system).torch_default.value == int(done.stdout)


@pytest.mark.parametrize(
    ("files", "environment", "threads"),
    [
        ({}, {}, 24),
        ({"/sys/fs/cgroup/cpu.max": "250000 100000"}, {}, 2),
        ({"/sys/fs/cgroup/cpu.max": "max 100000"}, {}, 24),
        ({"/sys/fs/cgroup/cpu/cpu.cfs_quota_us": "50000"}, {}, 24),  # no period
        ({"/sys/fs/cgroup/cpuset/cpuset.cpus": "0-6"}, {}, 7),
        ({"/sys/fs/cgroup/cpu.max": ""}, {"OPENCV_FOR_THREADS_NUM": "3"}, 3),
    ],
)
def test_threads_that_opencv_takes(
    files: dict[str, str], environment: dict[str, str], threads: int
) -> None:
    system = machine(alder_lake() | files, environment, affinity="0-23")
    assert read_threads(system).opencv_default.value == threads


# --- This machine -----------------------------------------------------------------------------


def test_this_machines_processor_as_it_is() -> None:
    cpu = read_cpu(System())
    assert cpu.logical_cpus.value == os.cpu_count()
    assert cpu.physical_cores.value == psutil.cpu_count(logical=False)
    assert cpu.affinity.value == tuple(sorted(os.sched_getaffinity(0)))
    assert cpu.usable_cores.value is None or 0 < cpu.usable_cores.value <= len(cpu.affinity.value)
    if cpu.core_kinds.value is not None:
        assert sum(kind.physical_cores for kind in cpu.core_kinds.value) == cpu.physical_cores.value
