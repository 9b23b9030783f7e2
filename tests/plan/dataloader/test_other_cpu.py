"""What a loader that was measured here gives on another machine's cores."""

from __future__ import annotations

import argparse
import dataclasses
import math
import shlex
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

import helpers_machines
from helpers_loader import MIB, probe, result
from helpers_report import plan_text
from tests.report.plan.test_text import PLAN
from trainfit.cli.values import processor, rented_cpu
from trainfit.hardware.gpu_lookup import RENTED, find_rented
from trainfit.hardware.machine.processor import KINDS, find_cpu_kind
from trainfit.plan.command.parsing import parse_command
from trainfit.plan.dataloader import other_cpu
from trainfit.plan.dataloader.other_cpu import CoreHere, core_factor, other_input
from trainfit.plan.dataloader.section import with_loading
from trainfit.plan.launch import with_launch
from trainfit.results.dataloader import LoaderSettings
from trainfit.results.loader import CoreAdvice, LoaderResult
from trainfit.results.plan import HostCpu, PlanResult

ZEN4 = find_cpu_kind("zen 4")
HERE = CoreHere(4.0e9, True, ZEN4)
#: What a batch takes a worker here (helpers_loader).
CPU_S = 0.114


def said(text: str) -> HostCpu:
    found = processor(text)
    assert found is not None
    return found


# -- what --cpu says ---------------------------------------------------------------------------


def test_the_words_of_a_processor() -> None:
    assert processor("here") is None
    assert said("cores=8,ghz=3.4,kind=12th gen") == HostCpu(8.0, 3.4e9, kind="Alder Lake")
    assert said(" ghz = 2.2 ") == HostCpu(None, 2.2e9)
    assert said("vcpus=8,kind=cascade lake") == HostCpu(
        4.0, None, kind="Skylake", second_threads=4.0
    )
    assert said("vcpus=1") == HostCpu(1.0, None)


@pytest.mark.parametrize(
    ("text", "told"),
    [
        (
            "there",
            "expected cores=2,ghz=2.2,kind=skylake, some of its fields, or here, got 'there'",
        ),
        ("", "some of its fields, or here, got ''"),
        ("cores=", "got 'cores='"),
        ("cores=0", "cores=0: expected a number above 0, at most 4096"),
        ("cores=nan", "expected a number"),
        ("cores=2,ghz=3400", "ghz=3400: expected a number above 0, at most 20"),
        ("cores=2,cores=3", "cores= is given twice"),
        ("cores=2,vcpus=4", "leave one out"),
        ("kind=pentium", "unknown CPU type 'pentium'; available: Haswell"),
    ],
)
def test_what_is_no_processor(text: str, told: str) -> None:
    with pytest.raises(argparse.ArgumentTypeError) as caught:
        processor(text)
    assert told in str(caught.value) and "\n" not in str(caught.value)


# -- the scale ---------------------------------------------------------------------------------


def test_a_known_kind_scales_by_clock_and_work_per_clock() -> None:
    found = other_input(result(), said("cores=2,ghz=2.0,kind=skylake"), HERE)
    assert found is not None
    assert found.batches_per_s == pytest.approx(2 / CPU_S * (2.0 / 4.0) / ZEN4.per_clock)
    low, high = (end / found.batches_per_s for end in found.range)
    # The measured clock is good to 8%, a kind's work per clock to 15%.
    assert low == pytest.approx(math.exp(-math.hypot(math.log(0.92), math.log(1.15))), rel=0.01)
    assert high == pytest.approx(math.exp(math.hypot(math.log(1.08), math.log(1.15))), rel=0.01)
    assert "this core at 4 GHz (measured by MD5, ±8%)" in found.basis
    assert any("Skylake 1, here Zen 4 1.4" in each for each in found.basis)


def test_without_a_kind_work_per_clock_is_alike_within_all_kinds() -> None:
    factor = core_factor(said("cores=2,ghz=2.0"), HERE)
    assert factor is not None and factor.value == pytest.approx(0.5)
    per_clock = [kind.per_clock / ZEN4.per_clock for kind in KINDS]
    assert factor.low < 0.5 * min(per_clock) and factor.high > 0.5 * max(per_clock)
    assert "the same work per clock as this core (Zen 4)" in factor.basis[-1]


def test_a_core_of_no_known_kind_may_be_any() -> None:
    here = CoreHere(4.0e9, True, None)
    without = core_factor(said("ghz=4"), here)
    known = core_factor(said("ghz=4,kind=zen 5"), here)
    assert without is not None and without.value == 1.0
    assert known is not None and known.low < 1.05 and known.high > 1.5


def test_a_clock_that_was_only_told_widens_the_range() -> None:
    cpu = said("cores=2,ghz=2,kind=zen 4")
    measured = core_factor(cpu, HERE)
    told = core_factor(cpu, dataclasses.replace(HERE, is_measured=False))
    assert measured is not None and told is not None
    assert told.low < measured.low < measured.value == told.value < measured.high < told.high
    assert "not measured" in " ".join(told.basis)


def test_cores_alone_are_as_fast_as_here() -> None:
    found = other_input(result(), said("cores=2"), CoreHere(None))
    assert found is not None
    assert found.batches_per_s == pytest.approx(2 / CPU_S)
    assert found.range == (found.batches_per_s, found.batches_per_s)
    assert found.basis == ("every core is assumed as fast as this machine's",)
    kind = other_input(result(), said("cores=2,kind=skylake"), HERE)
    assert kind is not None
    assert kind.batches_per_s == pytest.approx(2 / CPU_S / ZEN4.per_clock)
    assert any("ghz= is not given" in each for each in kind.basis)


def test_this_machines_own_cores_need_no_scale() -> None:
    found = other_input(result(), HostCpu(2.0, None, 1.1), CoreHere(None))
    assert found is not None
    assert found.batches_per_s == pytest.approx(2 / CPU_S) and not found.basis


@pytest.mark.parametrize(
    ("cpu", "here", "changes"),
    [
        (None, HERE, {}),
        (HostCpu(None, 2.2e9), HERE, {}),
        (HostCpu(2.0, 2.2e9), CoreHere(None), {}),
        (HostCpu(2.0, 2.2e9), HERE, {"probe": probe(fetch_cpu_s=None)}),
    ],
)
def test_what_cannot_be_told(cpu: HostCpu | None, here: CoreHere, changes: dict[str, Any]) -> None:
    assert other_input(result(**changes), cpu, here) is None


@given(
    machine=st.sampled_from(RENTED),
    hz=st.floats(1e9, 6e9),
    kind=st.sampled_from([*KINDS, None]),
    measured=st.booleans(),
)
def test_a_rented_machines_input_lies_in_its_range(
    machine: Any, hz: float, kind: Any, measured: bool
) -> None:
    found = other_input(result(), rented_cpu(machine), CoreHere(hz, measured, kind))
    assert found is not None
    low, high = found.range
    assert 0 < low < found.batches_per_s < high
    assert 1 <= found.num_workers <= machine.share * machine.vcpus
    assert found.basis


def test_second_threads_add_a_fifth() -> None:
    one = other_input(result(), said("cores=4,ghz=3,kind=rome"), HERE)
    two = other_input(result(), said("vcpus=8,ghz=3,kind=rome"), HERE)
    assert one is not None and two is not None
    assert two.batches_per_s == pytest.approx(1.2 * one.batches_per_s)


# -- workers there -----------------------------------------------------------------------------


def test_as_many_workers_as_the_gpu_takes() -> None:
    """A step of 40 ms takes 25 batches/s, of 114 ms of CPU and 6 ms of waiting each."""
    here = CoreHere(4.0e9, True, find_cpu_kind("skylake"))
    same = other_input(result(), said("cores=16,ghz=4,kind=skylake"), here)
    assert same is not None and same.num_workers == 3
    half = other_input(result(), said("cores=16,ghz=2,kind=skylake"), here)
    assert half is not None and half.num_workers == math.ceil(25 * (2 * 0.114 + 0.006))
    few = other_input(result(), said("vcpus=4,ghz=2,kind=skylake"), here)
    assert few is not None and few.num_workers == 4
    idle = other_input(result(step_s=0.0), said("cores=16,ghz=4,kind=skylake"), here)
    assert idle is not None and idle.num_workers == 16


def test_workers_have_room_in_the_other_machines_ram() -> None:
    cpu = dataclasses.replace(said("cores=16,ghz=1"), ram_bytes=4 * 180 * MIB)
    found = other_input(result(), cpu, HERE)
    assert found is not None and found.num_workers == 2


def test_a_loader_whose_workers_fail_has_none_there() -> None:
    found = other_input(result(limit="main_process"), said("cores=8"), HERE)
    assert found is not None and found.num_workers == 0
    assert found.batches_per_s == pytest.approx(1 / CPU_S)
    assert "batches can only be loaded in the main process" in found.basis


# -- in a plan ---------------------------------------------------------------------------------


def planned(found: LoaderResult, cpu: HostCpu | None, here: CoreHere | None = HERE) -> PlanResult:
    line = "python train.py --batch_size={batch_size:8} --j={num_workers:1}"
    plan = dataclasses.replace(PLAN, cpu=cpu)
    command = parse_command(shlex.split(line))
    return with_launch(with_loading(plan, command, lambda _: found, here=here), command)


@pytest.mark.usefixtures("script")
def test_a_plan_for_another_processor_launches_with_its_workers() -> None:
    found = result(cores=CoreAdvice("taskset -c 0-7", tuple(range(8)), "", ""))
    plan = planned(found, said("cores=2,ghz=2,kind=skylake"))
    assert plan.loading is not None
    assert plan.loading.input_workers == 2
    assert plan.launch.endswith("--j=2") and "taskset" not in plan.launch
    part = next(part for part in plan.launch_parts if part.name == "num_workers")
    assert part.evidence == "predicted" and part.reason.endswith("this machine needs 4")
    here = planned(found, HostCpu(2.0, None, 1.0))
    assert here.launch.endswith("--j=4") and "taskset -c 0-7" in here.launch


@pytest.mark.usefixtures("script")
def test_a_loader_without_workers_here_keeps_those_that_it_starts_there() -> None:
    found = result(recommended=LoaderSettings(0))
    there = other_input(found, said("cores=2,ghz=2,kind=skylake"), HERE)
    assert there is not None
    settings = other_cpu.settings_there(found, there)
    assert (settings.num_workers, settings.persistent_workers) == (2, True)


@pytest.mark.usefixtures("script")
def test_the_words_of_another_processors_input() -> None:
    text = plan_text(planned(result(), said("cores=2,ghz=2,kind=skylake")))
    flat = " ".join(text.split())
    assert "2 cores at 2 GHz (Skylake): at most 6.21 batches/s (5.28 to 7.29)" in flat
    assert "with num_workers=2; the DataLoader is the limit there by up to 4.02×" in flat
    assert "assumed: this core at 4 GHz (measured by MD5, ±8%); work per clock" in flat
    flat = " ".join(plan_text(planned(result(), said("vcpus=64,ghz=3,kind=rome"))).split())
    assert "32 cores (64 threads) at 3 GHz (Zen 2)" in flat and "the GPU is the limit there" in flat
    flat = " ".join(plan_text(planned(result(), said("cores=5,ghz=3"))).split())
    assert "either part may be the limit there" in flat
    colab = find_rented("Colab T4")
    assert colab is not None
    flat = " ".join(plan_text(planned(result(), rented_cpu(colab))).split())
    assert "Colab T4, 1 core (2 threads) at 2.8 GHz (Broadwell): at most" in flat
    flat = " ".join(plan_text(planned(result(), said("cores=2,ghz=2"), None)).split())
    assert "cannot tell, as the CPU time of a batch or the clock of this machine's" in flat


def test_the_core_here_is_measured_or_told(monkeypatch: pytest.MonkeyPatch) -> None:
    """A virtual machine tells its nominal clock, which says nothing of the one at work."""
    virtual, laptop = (helpers_machines.machine(name) for name in ("t4-vm", "cpu-only-torch"))
    monkeypatch.setattr(other_cpu.core_speed, "core_clock_hz", lambda: 3.1e9)
    assert CoreHere.measured(virtual) == CoreHere(3.1e9, True, find_cpu_kind("broadwell"))
    monkeypatch.setattr(other_cpu.core_speed, "core_clock_hz", lambda: None)
    assert CoreHere.measured(virtual) == CoreHere(None, False, find_cpu_kind("broadwell"))
    found = CoreHere.measured(laptop)
    assert not found.is_measured and found.hz == pytest.approx(4.6e9, rel=0.01)
