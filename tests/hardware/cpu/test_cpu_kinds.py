"""Kinds of CPU by name and by /proc/cpuinfo, and the clock of a busy core."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from hypothesis import given
from hypothesis import strategies as st

import helpers_machines
from trainfit.hardware.machine import core_speed
from trainfit.hardware.machine.core_speed import CYCLES_PER_BYTE, core_clock_hz
from trainfit.hardware.machine.processor import KINDS, CpuKindError, cpu_kind_here, find_cpu_kind
from trainfit.hardware.machine.recorded import RecordedSystem


@pytest.mark.parametrize(
    ("text", "key"),
    [
        ("skylake", "Skylake"),
        ("Cascade Lake", "Skylake"),
        ("cascade-lake", "Skylake"),
        ("Xeon E5 v4", "Broadwell"),
        ("ICELAKE", "Ice Lake"),
        ("Emerald Rapids", "Sapphire Rapids"),
        ("12th gen", "Alder Lake"),
        ("Intel Core 12th Generation", "Alder Lake"),
        ("AMD EPYC Milan", "Zen 3"),
        ("zen4", "Zen 4"),
        ("Zen+", "Zen 1"),
    ],
)
def test_a_kind_has_many_spellings(text: str, key: str) -> None:
    assert find_cpu_kind(text).key == key


def test_no_name_means_two_kinds() -> None:
    for kind in KINDS:
        for name in (kind.key, *kind.names):
            assert find_cpu_kind(name) is kind
        assert kind.source and 0.5 < kind.per_clock < 2


@given(st.text(max_size=100))
def test_any_text_is_a_kind_or_one_line(text: str) -> None:
    try:
        assert find_cpu_kind(text) in KINDS
    except CpuKindError as error:
        assert "available: Haswell" in str(error)


@pytest.mark.parametrize(
    ("machine", "key"),
    [
        ("cpu-laptop", "Alder Lake"),
        ("cpu-only-torch", "Skylake"),
        ("t4-vm", "Broadwell"),
        ("slurm-node", "Zen 3"),
        ("wsl2", "Zen 3"),
        ("server-8gpu", "Zen 4"),
        ("jetson-orin", None),
    ],
)
def test_recorded_machines_have_kinds(machine: str, key: str | None) -> None:
    found = cpu_kind_here(helpers_machines.machine(machine))
    assert (found.key if found is not None else None) == key


@pytest.mark.parametrize(
    ("lines", "key"),
    [
        ("vendor_id: AuthenticAMD\ncpu family: 23\nmodel: 1\n", "Zen 1"),
        ("vendor_id: AuthenticAMD\ncpu family: 23\nmodel: 49\n", "Zen 2"),
        ("vendor_id: AuthenticAMD\ncpu family: 25\nmodel: 97\n", "Zen 4"),
        ("vendor_id: AuthenticAMD\ncpu family: 25\nmodel: 144\n", None),
        ("vendor_id: AuthenticAMD\ncpu family: 26\nmodel: 2\n", "Zen 5"),
        ("vendor_id: AuthenticAMD\ncpu family: 99\nmodel: 2\n", None),
        ("vendor_id: GenuineIntel\ncpu family: 6\nmodel: 143\n", "Sapphire Rapids"),
        ("vendor_id: GenuineIntel\ncpu family: 6\nmodel: 9999\n", None),
        ("vendor_id: GenuineIntel\ncpu family: six\nmodel: 85\n", None),
        ("vendor_id: GenuineIntel\n", None),
        ("", None),
    ],
)
def test_families_and_models(lines: str, key: str | None) -> None:
    document = helpers_machines.document("t4-vm")
    document["files"]["/proc/cpuinfo"] = f"processor: 0\n{lines}"
    found = cpu_kind_here(RecordedSystem(document))
    assert (found.key if found is not None else None) == key


# -- the clock ---------------------------------------------------------------------------------


def ticks(*steps: float) -> Iterator[float]:
    """A clock that goes on by these steps, the last one for ever."""
    now, left = 0.0, list(steps)
    while True:
        yield now
        now += left.pop(0) if len(left) > 1 else left[0]


def test_the_clock_follows_from_what_a_piece_takes() -> None:
    clock = ticks(CYCLES_PER_BYTE * 16384 / 3.0e9)
    found = core_clock_hz(0.0, lambda: next(clock))
    assert found == pytest.approx(3.0e9)


def test_disturbed_pieces_do_not_count() -> None:
    took = CYCLES_PER_BYTE * 16384 / 3.0e9
    # Of each two differences of the clock one is a piece.
    clock = ticks(*([3 * took, 0.0] * 20), took)
    assert core_clock_hz(0.0, lambda: next(clock)) == pytest.approx(3.0e9)


def test_this_machine_has_a_clock() -> None:
    found = core_clock_hz(0.01)
    assert found is not None and 0.2e9 < found < 20e9


def test_a_clock_that_stands_still_tells_nothing() -> None:
    assert core_clock_hz(0.0, lambda: 1.0) is None


def test_a_system_without_md5_tells_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise ValueError("disabled for FIPS")

    monkeypatch.setattr(core_speed.hashlib, "md5", refuse)
    assert core_clock_hz() is None
