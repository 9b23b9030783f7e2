"""The step of a pipeline, of kernels that are made up."""

from __future__ import annotations

import numpy as np
import pytest

from trainfit.hardware.gpu_topology import find_gpus
from trainfit.plan.sizing.costing import machine_of
from trainfit.plan.sizing.stages import pipeline_step
from trainfit.results.runs.recording import PHASES
from trainfit.results.runs.steps import DTYPES
from trainfit.speed.work import CODES, COLUMNS, Work

MACHINE = machine_of(find_gpus("4x H100 SXM"))
#: One matrix product: long enough that launches and transfers do not matter.
FLOPS = 2 * 8192**3
_LINKS = 65


class Rows:
    """What a rank launches, in order."""

    def __init__(self) -> None:
        self.rows: list[dict[str, int]] = []
        self.streams: list[int] = []
        self._event = 0

    def add(self, kind: str, stream: int = 0, **columns: int) -> None:
        defaults = {"batches": 1, "launches": 1, "dtype": DTYPES.index("bfloat16")}
        self.rows.append({**defaults, **columns, "kind": CODES[kind]})
        self.streams.append(stream)

    def compute(self, parts: int = 1) -> None:
        n = 8192
        for _ in range(parts):
            size = {"read": 4 * n * n, "written": 2 * n * n, "rows": n, "columns": n, "depth": n}
            self.add("matmul", flops=FLOPS, **size)

    def wait(self, of: int, on: int) -> None:
        self._event += 1
        self.add("event", of, rows=self._event, launches=0)
        self.add("event_wait", on, rows=self._event, columns=of, launches=0)

    def send(self, to: int) -> None:
        self.wait(0, _LINKS)
        self.add("send_receive", _LINKS, read=4096, rows=2, depth=1 + to)

    def receive(self, source: int) -> None:
        self.add("send_receive", _LINKS, read=4096, written=4096, rows=2, depth=1 + source)
        self.wait(_LINKS, 0)

    def work(self) -> Work:
        table = np.array([[row.get(name, 0) for name in COLUMNS] for row in self.rows])
        number = np.arange(len(table))
        return Work(table, np.array(self.streams), number, 0 * number + PHASES.index("forward"))


def gpipe(stages: int, parts: int, slow: int = -1) -> dict[int, Work]:
    """All forward passes, then all backward passes; one stage may compute twice as much."""
    ranks = [Rows() for _ in range(stages)]
    for rank, rows in enumerate(ranks):
        for ahead, behind in ((rank + 1, rank - 1), (rank - 1, rank + 1)):
            for _ in range(parts):
                if 0 <= behind < stages:
                    rows.receive(behind)
                rows.compute(2 if rank == slow else 1)
                if 0 <= ahead < stages:
                    rows.send(ahead)
    return {rank: rows.work() for rank, rows in enumerate(ranks)}


@pytest.mark.parametrize(("stages", "parts"), [(2, 4), (4, 4), (4, 16)])
def test_equal_stages_wait_while_the_pipeline_fills_and_empties(stages: int, parts: int) -> None:
    found = pipeline_step(gpipe(stages, parts), MACHINE)
    assert found is not None
    bubble = 1 - found.computing_s[0] / found.seconds
    # The first stage has the whole of it: it begins the next step when the last part came back.
    assert bubble == pytest.approx((stages - 1) / (parts + stages - 1), abs=0.02)


def test_a_slow_stage_is_what_the_others_wait_for() -> None:
    even, uneven = (pipeline_step(gpipe(2, 16, slow), MACHINE) for slow in (-1, 1))
    assert even is not None and uneven is not None
    assert uneven.computing_s[1] == pytest.approx(2 * even.computing_s[1])
    assert uneven.seconds > uneven.computing_s[1] > 1.8 * even.computing_s[0]


def test_what_is_received_and_never_sent_has_no_time() -> None:
    works = gpipe(2, 4)
    works[0] = gpipe(2, 3)[0]
    assert pipeline_step(works, MACHINE) is None
