"""`trainfit doctor --cpu`: clocks by group of cores and C-states, on recorded machines."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from helpers_cli import ROOT, error_line
from helpers_cli import trainfit as run
from helpers_facts import cores_of, frequency, machine, unknown
from helpers_machines import document, mutated, names
from helpers_report import screen as screen_of
from trainfit.doctor.checks import diagnose
from trainfit.doctor.cores import MOST, core_groups
from trainfit.hardware.machine.recorded import RecordedSystem
from trainfit.hardware.machine.survey import survey
from trainfit.report.sections.doctor import CPU_CHECKS, cpu_subject
from trainfit.results.doctor import DoctorResult
from trainfit.results.machine import IdleState, Machine
from trainfit.results.text import WIDTH, laid_out_for

MACHINES = ROOT / "tests" / "machines"
#: Lines that the screen has at most.
LINES = 25


def screen(of: Machine) -> str:
    found = cpu_subject(DoctorResult(diagnose(of, CPU_CHECKS), of, None, 0.1, "0"))
    with laid_out_for(WIDTH):
        text = screen_of(found)
    lines = text.splitlines()
    assert len(lines) <= LINES, text
    # A fix is copied from the screen: it stays whole.
    assert all(len(line) <= WIDTH or line.startswith(("    fix", "    undo")) for line in lines)
    return text


def recorded(what: dict[str, Any]) -> Machine:
    return survey(RecordedSystem(what))


def hybrid(cores: int, **changes: Any) -> Machine:
    """A processor of 32 cores, half of them efficient, each with a largest clock of its own."""
    kinds = (
        cores_of(range(cores // 2), "performance", 5.4e9),
        cores_of(range(cores // 2, cores), "efficiency", 3.8e9),
    )
    policies = tuple(
        frequency(
            cpus=(cpu,), governor="powersave", energy_preference="balance_performance",
            current_hz=1.7e9 + 1e7 * cpu, limit_hz=5e9 + 1e6 * cpu, hardware_hz=5.4e9 + 1e6 * cpu,
        )
        for cpu in range(cores)
    )  # fmt: skip
    states = tuple(IdleState(f"C{n}", n * 1e-4, n == 3, n * 3e-4) for n in range(9))
    cpu = {"core_kinds": kinds, "policies": policies, "idle_states": states, "logical_cpus": cores}
    return machine(cpu={**cpu, **changes})


@pytest.mark.parametrize("name", names())
def test_every_recorded_machine_fits_the_screen(name: str) -> None:
    screen(recorded(document(name)))


def test_cores_that_are_alike_share_a_row() -> None:
    lines = screen(recorded(document("workstation"))).splitlines()
    assert lines[0] == (
        "12th Gen Intel(R) Core(TM) i9-12900K, 16 cores, 24 CPUs, driver intel_pstate (active), "
        "turbo on"
    )
    assert lines[1] == "  Available governors: performance, powersave"
    rows = [" ".join(line.split()) for line in lines]
    at = rows.index("CPUs Kind Governor EPP MHz now limit max")
    assert rows[at + 1 : at + 4] == [
        "0-7,12-15 performance powersave balance_performance 1725-3482 5100 5100",
        "8-11 performance powersave balance_performance 1725-3482 5200 5200",
        "16-23 efficiency powersave balance_performance 1600-2318 3900 3900",
    ]
    assert "C-state of CPU 0 Exit latency Target residency" in rows
    assert "C1E 2 µs 4 µs" in rows
    assert any(row.startswith("- frequency: intel_pstate powersave") for row in rows)


def test_clocks_now_come_from_cpuinfo_where_cpufreq_was_not_asked() -> None:
    """128 policies: reading each clock of an idle CPU takes 10 ms on older kernels."""
    text = screen(recorded(document("server-8gpu")))
    assert "0-127 uniform performance none 2696-3891 2700 3910" in " ".join(text.split())


def test_what_a_virtual_machine_hides_cannot_be_told() -> None:
    text = screen(recorded(document("t4-vm")))
    assert "0-7   cannot tell" in text
    assert "cannot tell: this is a virtual machine: its host sets the clocks" in text
    assert (
        "C-states\n  cannot tell (this is a virtual machine: its host chooses idle states)" in text
    )
    text = screen(machine(cpu={"policies": unknown(), "idle_states": unknown()}))
    assert "cannot tell: the test does not tell" in text
    assert "C-states\n  cannot tell (the test does not tell)" in text


def test_32_cores_with_32_largest_clocks_fit_the_screen() -> None:
    text = screen(hybrid(32, affinity=tuple(range(4))))
    assert "This process may run on CPUs 0-3 only" in text
    rows = [" ".join(line.split()) for line in text.splitlines()]
    assert "0-15 performance powersave balance_performance 1700-1850 5000-5015 5400-5415" in rows
    assert "16-31 efficiency powersave balance_performance 1860-2010 5016-5031 5416-5431" in rows
    assert "needs up to 800 µs" in text
    assert "C3 300 µs 900 µs switched off" in rows


@given(
    st.lists(
        st.tuples(
            st.sampled_from(("powersave", "performance", "schedutil", None)),
            st.sampled_from((None, "power", "128")),
            st.one_of(st.none(), st.floats(1e9, 6e9)),
        ),
        max_size=40,
    )
)
def test_each_cpu_is_in_one_group(settings_of: list[tuple[Any, Any, float | None]]) -> None:
    policies = tuple(
        frequency(
            cpus=(number,), governor=governor, energy_preference=wish, hardware_hz=hertz,
            limit_hz=hertz, current_hz=hertz,
        )
        for number, (governor, wish, hertz) in enumerate(settings_of)
    )  # fmt: skip
    of = machine(cpu={"policies": policies, "core_kinds": None, "logical_cpus": len(policies)})
    groups = core_groups(of.cpu)
    assert len(groups) <= MOST
    listed = sorted(cpu for group in groups for cpu in group.cpus)
    assert listed == list(range(len(policies)))
    for group in groups:
        mine = [policies[cpu] for cpu in group.cpus]
        clocks = [each.hardware_hz for each in mine if each.hardware_hz is not None]
        assert group.hardware_hz == ((min(clocks), max(clocks)) if clocks else None)
        assert all((each.governor or "") in (group.governor or "") for each in mine)
    screen(of)


@given(name=st.sampled_from(names()), seed=st.integers(0, 2**32))
@settings(max_examples=40)
def test_no_damaged_machine_breaks_the_screen(name: str, seed: int) -> None:
    text = screen(recorded(mutated(document(name), seed)))
    assert "\x1b" not in text and "None" not in text


def test_as_a_user_runs_it(tmp_path: Path) -> None:
    path = MACHINES / "cpu-laptop.json"
    done = run("doctor", "--cpu", "--machine", path, "--output", "cpu.json", cwd=tmp_path)
    assert done.returncode in (0, 1) and not done.stderr
    assert "8-15  efficiency   powersave" in done.stdout
    kept = DoctorResult.from_json((tmp_path / "cpu.json").read_text(), tmp_path)
    assert {check.name for check in kept.checks} == set(CPU_CHECKS)
    printed = run("doctor", "--cpu", "--machine", path, "--json", cwd=tmp_path)
    assert json.loads(printed.stdout)["machine"]["cpu"]["policies"]
    for words in (["--only", "gpu"], ["--skip", "gpu"], ["--script", "x.py"]):
        wrong = run("doctor", "--cpu", *words, "--machine", path, cwd=tmp_path)
        assert wrong.returncode == 2 and "--cpu shows only the processor" in error_line(wrong)
