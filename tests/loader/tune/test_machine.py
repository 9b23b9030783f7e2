"""What of a machine bounds a DataLoader: cores, their speeds, RAM, shared memory, files."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

import helpers_facts as facts
import helpers_machines
from trainfit.hardware.machine.recorded import RecordedSystem
from trainfit.hardware.machine.survey import survey
from trainfit.loader.measure.machine_limits import (
    available_bytes,
    loader_machine,
    model_cores,
    unknowns,
)
from trainfit.results.dataloader import LoaderMachine
from trainfit.results.machine import CoreKind

MIB = 1 << 20
GIB = 1 << 30


def recorded(name: str, ranks: int = 1) -> LoaderMachine:
    return loader_machine(survey(helpers_machines.machine(name)), ranks)


def four_cpus_under_a_quota() -> dict[str, Any]:
    """The recorded container with a quota, with 4 CPUs (two cores) and 1.5 cores of time."""
    document = helpers_machines.document("container-quota")
    document["calls"]["affinity"] = "0-1,32-33"
    quotas = [path for path in document["files"] if path.endswith("cpu.max")]
    assert quotas
    for path in quotas:
        document["files"][path] = "150000 100000\n"
    return document


def test_a_quota_bounds_the_cores_of_a_container() -> None:
    found = loader_machine(survey(RecordedSystem(four_cpus_under_a_quota())))
    assert found.usable_cores == found.quota_cores == 1.5
    assert found.affinity == (0, 1, 32, 33)
    assert found.physical_cores == 2
    assert found.core_speeds == (1.0, 1.0, 0.2, 0.2)
    cores = model_cores(found, contention=0.0)
    assert cores.quota == 1.5
    # Two workers get 1.5 cores; four would take turns on the threads of the same two cores.
    assert 2 * cores.rate(2) == pytest.approx(1.5)
    assert 4 * cores.rate(4) < 1.5


def test_docker_leaves_64_mib_of_shared_memory() -> None:
    found = recorded("container-quota")
    assert found.shm_free_bytes is not None and 60 * MIB < found.shm_free_bytes < 64 * MIB
    assert found.available_bytes == 8 * GIB  # the cgroup's limit, not the host's 458 GiB
    told = unknowns(survey(helpers_machines.machine("container-quota")))
    assert len(told) == 1 and told[0].startswith("the free part of the cgroup")


def test_efficiency_cores_are_slower_than_their_clock() -> None:
    found = recorded("cpu-laptop")
    assert found.physical_cores == 12
    assert found.core_speeds[:4] == (1.0,) * 4
    # 3.4 against 4.7 GHz, at 1 / 1.19² of the instructions per clock.
    assert found.core_speeds[4:12] == pytest.approx([3.4 / 4.7 / 1.19**2] * 8)
    assert found.core_speeds[12:] == pytest.approx([0.2] * 4)


def test_favoured_cores_are_the_fastest() -> None:
    speeds = recorded("workstation").core_speeds
    assert speeds[:2] == (1.0, 1.0)
    assert speeds[2:8] == pytest.approx([5.1 / 5.2] * 6)


def test_compact_cores_of_amd_differ_by_their_clock_only() -> None:
    kinds = (
        CoreKind("performance", (0, 1), 2, 5.1e9),
        CoreKind("efficiency", (2, 3), 2, 3.3e9),
    )
    cpu = {
        "model": "AMD Ryzen AI 9 HX 370", "affinity": (0, 1, 2, 3), "core_kinds": kinds,
        "siblings": ((0,), (1,), (2,), (3,)), "policies": None,
    }  # fmt: skip
    found = loader_machine(facts.machine(cpu=cpu))
    assert found.core_speeds == pytest.approx([1, 1, 3.3 / 5.1, 3.3 / 5.1])


def test_a_scheduler_grants_cores_of_a_node() -> None:
    found = recorded("slurm-node")
    assert found.usable_cores == 4.0
    assert found.physical_cores == 2
    assert found.core_speeds == (1.0, 1.0, 0.2, 0.2)
    assert model_cores(found, 0.1).quota is None
    assert model_cores(found, 0.1).contention == 0.1


def test_two_workers_on_one_core_run_at_six_tenths() -> None:
    cores = model_cores(recorded("t4-vm"), 0.0)  # 4 cores of two threads
    assert cores.rate(4) == 1.0
    assert cores.rate(8) == pytest.approx(0.6)


def test_ranks_share_all_but_open_files() -> None:
    alone, one = recorded("server-8gpu"), recorded("server-8gpu", ranks=8)
    assert one.usable_cores == alone.usable_cores / 8 == 16
    assert one.core_speeds == (1.0,) * 8 + (0.2,) * 8
    assert alone.available_bytes is not None and alone.shm_free_bytes is not None
    assert one.available_bytes == alone.available_bytes // 8
    assert one.shm_free_bytes == alone.shm_free_bytes // 8
    assert one.open_files == alone.open_files
    assert one.physical_cores == alone.physical_cores == 64


def test_ranks_that_do_not_divide_the_cores() -> None:
    found = recorded("cpu-only-torch", ranks=3)  # 8 cores
    assert found.usable_cores == pytest.approx(8 / 3)
    cores = model_cores(found, 0.0)
    assert len(cores.speeds) == 3
    assert 3 * cores.rate(3) == pytest.approx(8 / 3)


@pytest.mark.parametrize(
    ("memory", "expected"),
    [
        ({"available_bytes": 5 * GIB}, 5 * GIB),
        ({"limit_bytes": 8 * GIB, "limit_used_bytes": 6 * GIB}, 2 * GIB),
        ({"limit_bytes": 8 * GIB, "limit_used_bytes": 9 * GIB}, 0),
        ({"limit_bytes": 8 * GIB, "limit_used_bytes": facts.unknown()}, 8 * GIB),
        ({"available_bytes": facts.unknown()}, None),
        ({"available_bytes": facts.unknown(), "limit_bytes": GIB, "limit_used_bytes": 0}, GIB),
    ],
)
def test_the_tighter_bound_of_ram(memory: dict[str, Any], expected: int | None) -> None:
    assert available_bytes(facts.machine(memory=memory).memory) == expected


def test_what_cannot_be_told_is_said() -> None:
    dark = facts.unknown()
    machine = facts.machine(
        cpu={"affinity": dark, "quota_cores": dark, "siblings": dark, "policies": dark},
        memory={"available_bytes": dark, "shm_free_bytes": dark},
    )
    found = loader_machine(machine)
    assert found.usable_cores == 16.0
    assert found.physical_cores is None
    assert found.available_bytes is None and found.shm_free_bytes is None
    assert len(unknowns(machine)) == 5
    assert unknowns(facts.machine(cpu={"siblings": ((0, 1),)})) == ()


def test_no_cpu_and_no_rank() -> None:
    dark = facts.unknown()
    with pytest.raises(ValueError, match="number of usable CPUs"):
        loader_machine(facts.machine(cpu={"affinity": dark, "logical_cpus": dark}))
    with pytest.raises(ValueError, match="got 0"):
        loader_machine(facts.machine(), 0)


@given(st.sampled_from(helpers_machines.names()), st.integers(0, 10_000))
def test_damaged_machines_give_cores_that_can_be_simulated(name: str, seed: int) -> None:
    document = helpers_machines.mutated(helpers_machines.document(name), seed)
    machine = survey(RecordedSystem(document))
    try:
        found = loader_machine(machine, 1 + seed % 3)
    except ValueError as error:
        assert "number of usable CPUs" in str(error)
        return
    cores = model_cores(found, 0.05)
    assert 0 < found.usable_cores <= len(found.affinity)
    assert max(found.core_speeds) <= 1.0
    assert list(found.core_speeds) == sorted(found.core_speeds, reverse=True)
    assert cores.rate(1) > 0
