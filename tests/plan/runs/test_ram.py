"""Simulated runs side by side only where RAM allows."""

from __future__ import annotations

import threading

import pytest

from trainfit.plan.runs.failures import remedy
from trainfit.plan.runs.processes import (
    GaveWay,
    RamGate,
    RamShort,
    available_ram,
    others_with_ram,
)
from trainfit.results.runs.trace import TraceOutcome

GIB = 1 << 30


class Machine:
    """So much RAM is available, by a clock that goes on a second with each look at it."""

    def __init__(self, available: int | None) -> None:
        self.available = available
        self.now = 0.0
        self.said: list[str] = []
        self.others = ""
        self.gate = RamGate(
            self.said.append, lambda: self.available, self.clock, lambda gone: self.others
        )

    def clock(self) -> float:
        self.now += 1.0
        return self.now


def begins(gate: RamGate, run: int, within_s: float = 0.2) -> bool:
    """Does a run begin at once? It ends then, too."""
    began = threading.Event()
    stopped = threading.Event()

    def body() -> None:
        with gate.turn(run, stopped.is_set):
            if not stopped.is_set():
                began.set()

    thread = threading.Thread(target=body)
    thread.start()
    found = began.wait(within_s)
    stopped.set()
    thread.join()
    return found


@pytest.mark.parametrize(
    ("available", "peak", "fits"),
    [(10 * GIB, 4 * GIB, True), (8 * GIB, 4 * GIB, False), (None, 4 * GIB, True), (GIB, 0, True)],
)
def test_a_second_run_begins_where_both_have_room(
    available: int | None, peak: int, fits: bool
) -> None:
    machine = Machine(available)
    machine.gate.learn(peak)
    with machine.gate.turn(1):
        assert begins(machine.gate, 2, 5.0 if fits else 0.2) is fits
    assert begins(machine.gate, 3, 5.0)
    said = [
        "simulated runs are made one at a time: a run needs 4.00 GiB of RAM, "
        "8.00 GiB were available"
    ]
    assert machine.said == ([] if fits else said)


def test_the_youngest_run_gives_way_where_ram_runs_short() -> None:
    machine = Machine(20 * GIB)
    gate = machine.gate
    with gate.turn(1), gate.turn(2):
        gate.look(1)
        gate.look(2)
        machine.available = GIB
        gate.look(1)
        with pytest.raises(GaveWay):
            gate.look(2)
    assert machine.said == ["simulated runs are made one at a time: 1.00 GiB of RAM are left"]
    with gate.turn(1):
        gate.look(1)  # alone it goes on
        assert not begins(gate, 2)
        machine.available = GIB // 2
        with pytest.raises(RamShort, match=r"512 MiB of RAM are left of 20\.00 GiB"):
            gate.look(1)  # before it fills the machine
    assert len(machine.said) == 1


def test_the_ram_of_this_machine() -> None:
    found = available_ram()
    assert found is not None and 0 < found < 1 << 50


def test_ram_that_other_programs_took_is_not_the_scripts() -> None:
    machine = Machine(20 * GIB)
    machine.others = others_with_ram(1 << 60)  # more than our processes have
    assert "other programs have taken most of it" in machine.others
    machine.available = GIB // 2
    with machine.gate.turn(1), pytest.raises(RamShort) as caught:
        machine.gate.look(1)
    ended = TraceOutcome("died", 0, 1.0, str(caught.value))
    assert remedy(ended, "") == "run it when they have ended"
    assert others_with_ram(1 << 20) == ""  # this process alone has more than half of it
