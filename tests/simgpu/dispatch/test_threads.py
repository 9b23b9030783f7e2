"""Threads of a script that use the simulated GPU side by side, as loaders of weights do."""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
import torch
from torch import nn

import trainfit
from trainfit.results.runs.recording import PHASES


@pytest.fixture
def often_switched() -> Iterator[None]:
    """Threads take turns after microseconds."""
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    yield
    sys.setswitchinterval(before)


@pytest.mark.usefixtures("often_switched")
def test_threads_that_copy_leave_phases_and_allocations_whole() -> None:
    sizes = [8 * index for index in range(1, 65)]
    with trainfit.simulate("RTX 4090", limited=False) as sim:
        for _ in range(3):
            with ThreadPoolExecutor(8) as pool:
                copies = list(pool.map(lambda size: torch.zeros(size).cuda(), sizes))
        model = nn.Linear(4, 4).cuda()
        model(torch.zeros(2, 4).cuda()).sum().backward()
        torch.optim.SGD(model.parameters(), lr=0.1).step()
    recording = sim.recording
    assert [len(each) for each in copies] == sizes
    forward = recording.op_phase == PHASES.index("forward")
    assert "aten.addmm.default" in {
        recording.strings[name] for name in recording.op_name[forward].tolist()
    }
    copying = np.flatnonzero(
        [recording.strings[name] == "aten._to_copy.default" for name in recording.op_name.tolist()]
    )
    made = np.bincount(recording.alloc_op[recording.alloc_op >= 0], minlength=len(forward))
    assert (made[copying] == 1).all()


def test_what_holds_the_engine_has_other_threads_wait_at_their_next_operator() -> None:
    over = threading.Event()

    def goes_on() -> None:
        x = torch.zeros(8, device="cuda")
        while not over.is_set():
            x = x + 1

    with trainfit.simulate("RTX 4090", limited=False) as sim:
        thread = threading.Thread(target=goes_on)
        thread.start()
        try:
            while not sim.operators:
                time.sleep(0.001)
            with sim.engine.held(60.0):
                before = sim.operators
                time.sleep(0.05)
                assert sim.operators == before
            until = time.monotonic() + 60
            while sim.operators == before and time.monotonic() < until:
                time.sleep(0.001)
            assert sim.operators > before
        finally:
            over.set()
            thread.join()
