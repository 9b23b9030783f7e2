"""When kernels run: streams, copies, events, the launch queue and the CPU's waits."""

from __future__ import annotations

import time

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

import trainfit
from trainfit.hardware import find_gpu
from trainfit.plan.sizing.speed import speed
from trainfit.results.runs.steps import KINDS, MARKS
from trainfit.speed.efficiency import FITTED, Efficiency
from trainfit.speed.step import HostCosts, HostedGpu, TimedWork, step_time
from trainfit.speed.timeline import Timeline
from trainfit.speed.work import COLUMNS, Work, WorkLaw

GPU = find_gpu("RTX 3090")
ALIKE = {"wide_groups": 1.0, "uneven_groups": 1.0}
IDEAL = Efficiency({}, {}, small_tile=0.0, unaligned=1.0, cache=0.0, least_s=0.0, **ALIKE)
#: Launches take nothing, a microsecond of the CPU an operator.
MACHINE = HostedGpu(GPU, IDEAL, HostCosts(1e-6, 1e-6, 0.0, 0.0, 0.0))

Row = tuple[str, int, dict[str, int]]


def row(kind: str, stream: int = 0, **values: int) -> Row:
    return kind, stream, values


def work(*rows: Row) -> Work:
    """One operator a row."""
    table = [
        [{"kind": KINDS.index(kind), "batches": 1, **values}.get(name, 0) for name in COLUMNS]
        for kind, _, values in rows
    ]
    return Work(
        np.array(table, dtype=np.int64).reshape(len(rows), len(COLUMNS)),
        np.array([stream for _, stream, _ in rows], dtype=np.int64),
        np.arange(len(rows)),
        np.zeros(len(rows), dtype=np.int64),
    )


def computing(seconds: float, stream: int = 0) -> Row:
    return row("pointwise", stream, read=round(seconds * GPU.bandwidth_bytes_per_s))


def copying(seconds: float, stream: int = 0) -> Row:
    return row("upload_pinned", stream, read=round(seconds * MACHINE.pinned_bytes_per_s))


def step(*rows: Row) -> float:
    return step_time(work(*rows), MACHINE).seconds


def once(*rows: Row) -> float:
    timeline = Timeline()
    TimedWork(work(*rows), MACHINE).launch(timeline)
    return timeline.end_s


# --- Several streams ------------------------------------------------------------------------------


def prefetching(copy_s: float, compute_s: float, side: int) -> list[Row]:
    """The next batch is copied, on a stream of its own (or the same), while this one is used."""
    return [
        row("event_wait", 0, rows=7, columns=side),
        copying(copy_s, side),
        row("event", side, rows=8),
        computing(compute_s),
        row("download", 0, read=4),
    ]


def test_copies_on_another_stream_run_beside_the_kernels() -> None:
    assert step(*prefetching(0.01, 0.02, side=3)) == pytest.approx(0.02, rel=1e-3)
    assert step(*prefetching(0.01, 0.02, side=0)) == pytest.approx(0.03, rel=1e-3)
    # And are the limit where they take longer: each step waits for the copy before it.
    assert step(*prefetching(0.05, 0.02, side=3)) == pytest.approx(0.05, rel=1e-3)


def test_kernels_of_two_streams_share_the_gpu() -> None:
    assert step(computing(0.01), computing(0.02, 1)) == pytest.approx(0.03, rel=1e-3)


def test_both_directions_are_copied_at_once() -> None:
    back = row("download", 2, read=round(0.02 * MACHINE.pageable_bytes_per_s))
    assert step(copying(0.02, 1), back) == pytest.approx(0.02, rel=1e-3)
    assert step(copying(0.02, 1), copying(0.02, 2)) == pytest.approx(0.04, rel=1e-3)


def test_a_stream_that_waits_for_an_event_begins_after_it() -> None:
    waits = [row("event", 1, rows=1), row("event_wait", 0, rows=1, columns=1), computing(0.01)]
    assert once(copying(0.03, 1), *waits) == pytest.approx(0.04, rel=1e-3)
    assert once(waits[0], copying(0.03, 1), *waits[1:]) == pytest.approx(0.03, rel=1e-3)
    # One step after the other the copy is made while the step before computes.
    assert step(copying(0.03, 1), *waits) == pytest.approx(0.03, rel=1e-3)


def test_a_kernel_that_waits_does_not_hold_up_another_stream() -> None:
    """Launched first, but its data come later."""
    rows = [copying(0.03, 1), computing(0.001, 1), computing(0.02)]
    assert once(*rows) == pytest.approx(0.031, rel=1e-3)


@pytest.mark.parametrize(
    ("wait", "passed"),
    [
        (row("wait"), 0.03),
        (row("stream_wait", 0), 0.01),
        (row("stream_wait", 1), 0.03),
        (row("event_synchronize", 1, rows=1, columns=1), 0.02),
    ],
)
def test_what_the_cpu_waits_for(wait: Row, passed: float) -> None:
    rows = [computing(0.01), copying(0.02, 1), row("event", 1, rows=1), copying(0.01, 1), wait]
    timeline = Timeline()
    TimedWork(work(*rows), MACHINE).launch(timeline)
    assert timeline.cpu_s == pytest.approx(passed, rel=1e-2)
    assert timeline.end_s == pytest.approx(0.03, rel=1e-2)
    assert timeline.end_of(0) == pytest.approx(max(0.01, passed), rel=1e-2)


_COPIES = ("upload_pinned", "download", "download_pinned")
_KINDS = ("pointwise", "pointwise", *_COPIES, "event", "event_wait", "wait")


@settings(max_examples=200)
@given(
    st.lists(
        st.tuples(st.sampled_from(_KINDS), st.integers(0, 2), st.integers(0, 9), st.floats(0, 1)),
        min_size=1,
        max_size=40,
    ),
    st.integers(3, 50),
)
def test_what_holds_of_every_timeline(
    launches: list[tuple[str, int, int, float]], queue: int
) -> None:
    """Streams in order, one thing at a time on each engine, events before what waits for them."""
    rows, recorded = [], 0
    for kind, stream, number, _ in launches:
        recorded += kind == "event"
        event = recorded if kind == "event" else 1 + number % (recorded + 1)
        rows.append(row(kind, stream, rows=event, columns=(stream + 1) % 3))
    job = work(*rows)
    took = np.array([0.0 if kind in MARKS else seconds for kind, *_, seconds in launches])
    issued = np.arange(len(rows)) * 0.1
    timeline = Timeline(queue)
    ready, ends = timeline.add(job, took, issued, 0.1 * len(rows))
    begins = ends - took
    assert (ready >= issued).all() and (begins >= ready - 1e-9).all()
    assert (np.diff(ready) >= -1e-9).all()
    assert timeline.end_s >= ends.max()
    kinds = [kind for kind, *_ in launches]
    for stream in range(3):
        mine = np.flatnonzero(job.stream == stream)
        assert (begins[mine[1:]] >= ends[mine[:-1]] - 1e-9).all()
        assert not len(mine) or timeline.end_of(stream) == max(ends[mine[-1]], timeline.cpu_s)
    for engine in ("pointwise", *_COPIES):
        # Those that take nothing lie anywhere among the others' ends.
        busy = [place for place, kind in enumerate(kinds) if kind == engine and took[place] > 1e-6]
        mine = np.array(busy, dtype=int)[np.argsort(begins[busy])]
        assert (begins[mine[1:]] >= ends[mine[:-1]] - 1e-9).all()
    events = {
        each[2]["rows"]: end for each, end in zip(rows, ends, strict=True) if each[0] == "event"
    }
    for place, (kind, _, values) in enumerate(rows):
        if kind == "event_wait" and values["rows"] <= kinds[:place].count("event"):
            assert ends[place] >= events[values["rows"]] - 1e-9
        if kind in ("wait", "download"):  # the CPU launches what follows no sooner
            assert (begins[place + 1 :] >= ends[place] - 1e-9).all()
    for place in range(queue, len(rows)):
        assert begins[place] >= ends[place - queue] - 1e-9


@given(st.lists(st.floats(0, 1), min_size=1, max_size=30), st.integers(1, 40))
def test_an_idle_stream_changes_nothing(took: list[float], queue: int) -> None:
    """The ways for one and for several streams come to the same."""
    rows = [row("pointwise") for _ in took]
    issued = np.arange(len(took)) * 0.3
    one, other = Timeline(queue), Timeline(queue)
    _, alone = one.add(work(*rows), np.array(took), issued, 10.0)
    marks = work(row("event", 1, rows=1), *rows)
    _, with_other = other.add(marks, np.array([0.0, *took]), np.array([0.0, *issued]), 10.0)
    if len(took) < queue:  # the mark takes a place in the queue
        assert with_other[1:].tolist() == pytest.approx(alone.tolist())
        assert one.end_s == pytest.approx(other.end_s)


def test_events_keep_their_numbers_at_every_batch_size() -> None:
    """One run had recorded more of them before the step."""
    steps = []
    for batch, earlier in ((8, 0), (16, 3)):
        copy, compute = copying(batch * 1e-3, 1), computing(batch * 1e-3)
        event = row("event", 1, rows=1 + earlier)
        steps.append(work(copy, event, row("event_wait", 0, rows=1 + earlier, columns=1), compute))
    law = WorkLaw.between(steps[0], 8, steps[1], 16)
    for batch in (8, 16, 32):
        timeline = Timeline()
        TimedWork(law.at(batch), MACHINE).launch(timeline)
        assert timeline.end_s == pytest.approx(2e-3 * batch, rel=1e-2)


# --- In a script ----------------------------------------------------------------------------------


def train(side: bool) -> tuple[float, float]:
    """Seconds of a step as the script times it, and as the model has it.

    A batch of 0.8 GB is copied for the next step, on a stream of its own or not.
    """
    with trainfit.simulate("RTX 3090", limited=False) as simulation:
        model = nn.Sequential(*(nn.Linear(8192, 8192, device="cuda") for _ in range(8)))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        copies = torch.cuda.Stream() if side else torch.cuda.current_stream()
        host = torch.empty(25_000, 8192).pin_memory()

        def load() -> torch.Tensor:
            with torch.cuda.stream(copies):
                return host.to("cuda", non_blocking=True)

        following, seconds = load(), []
        for _ in range(4):
            began = time.perf_counter()
            torch.cuda.current_stream().wait_stream(copies)
            batch, following = following, load()
            model(batch[:8192]).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
            torch.cuda.current_stream().synchronize()
            seconds.append(time.perf_counter() - began)
    found = speed(simulation.recording, 8, HostedGpu(GPU, FITTED))
    assert found is not None
    return min(seconds), found.now.seconds


def test_a_prefetchers_copies_take_no_time_of_the_step() -> None:
    apart, predicted_apart = train(side=True)
    within, predicted_within = train(side=False)
    copy = 25_000 * 8192 * 4 / 20e9
    assert within - apart == pytest.approx(copy, rel=0.1)
    assert predicted_within - predicted_apart == pytest.approx(copy, rel=0.1)
    assert apart == pytest.approx(predicted_apart, rel=0.05)
