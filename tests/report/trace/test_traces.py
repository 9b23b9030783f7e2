"""Traces: what Chrome's format asks for, and what the recordings hold."""

from __future__ import annotations

import dataclasses
import json
from collections import defaultdict
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from helpers_cli import ROOT
from helpers_watch import run
from trainfit.hardware import find_gpu
from trainfit.plan.job_detail import step_timeline
from trainfit.plan.sizing.costing import machine_of
from trainfit.report.writers.trace import TraceEvents, run_trace, step_trace
from trainfit.results.runs.recording import Recording
from trainfit.results.runs.watched import load_run
from trainfit.watch.judge import judge

FIXTURES = ROOT / "tests" / "fixtures"
#: Of a double of microseconds.
TINY = 1e-3


def parsed(text: str) -> list[dict[str, Any]]:
    """The events, each checked; slices of a track lie in one another or do not meet."""
    document = json.loads(text, parse_constant=pytest.fail)
    names: dict[tuple[str, Any], str] = {}
    tracks: dict[tuple[int, int], list[tuple[float, float]]] = defaultdict(list)
    for event in document["traceEvents"]:
        place = (event["pid"], event.get("tid"))
        if event["ph"] == "M":
            names[(event["name"], place)] = event["args"].get("name", "")
            continue
        assert ("process_name", (event["pid"], None)) in names
        assert isinstance(event["ts"], float | int) and event["name"]
        if event["ph"] == "X":
            assert ("thread_name", place) in names and event["dur"] >= 0
            tracks[place].append((event["ts"], event["ts"] + event["dur"]))
        elif event["ph"] == "C":
            assert all(isinstance(value, float | int) for value in event["args"].values())
        else:
            assert event["ph"] == "i" and event["s"] in "gpt"
    for slices in tracks.values():
        open_until: list[float] = []
        for begin, end in sorted(slices, key=lambda each: (each[0], -each[1])):
            while open_until and open_until[-1] <= begin + TINY:
                open_until.pop()
            assert not open_until or end <= open_until[-1] + TINY
            open_until.append(end)
    return [
        {**event, "track": names.get(("thread_name", (event["pid"], event.get("tid"))), "")}
        for event in document["traceEvents"]
    ]


def test_a_simulated_step() -> None:
    recording = Recording.load(FIXTURES / "results" / "recording-v1.trainfit")
    timeline = step_timeline(recording, machine_of(find_gpu("T4")))
    assert timeline is not None
    events = parsed(step_trace(timeline, "train.py"))
    by_track = defaultdict(list)
    for event in events:
        if event["ph"] == "X":
            by_track[event["track"]].append(event)
    assert len(by_track["operators"]) == len(timeline.operators)
    assert len(by_track["stream 0"]) == len(timeline.kernels)
    assert [each["name"] for each in by_track["phases"]][-1] == "optimizer"
    modules = {each["args"]["module"] for each in by_track["modules"]}
    assert modules >= {each.module for each in timeline.operators if each.module}
    counters = [event["args"] for event in events if event["ph"] == "C"]
    assert len(counters) == len(timeline.memory)
    assert max(sum(each.values()) for each in counters) == max(
        sum(point.by_kind_bytes.values()) for point in timeline.memory
    )


@pytest.mark.parametrize("name", ["starved", "slow-worker", "checkpoints-nan"])
def test_a_watched_run(name: str) -> None:
    record = load_run(FIXTURES / "watched_runs" / name)
    result = judge(record)
    events = parsed(run_trace(record, result.findings))
    tracks = {event["track"] for event in events}
    assert {"steps", "phases (in the usual order)"} <= tracks
    assert {f"finding: {each.kind}" for each in result.findings} <= tracks
    rank = record.ranks[0]
    steps = [event for event in events if event["track"] == "steps" and event["ph"] == "X"]
    assert len(steps) == (rank.steps["step_s"] > 0).sum()
    batches = [event for event in events if event["name"] == "batch"]
    assert len(batches) == (rank.fetches["fetch_s"] > 0).sum()
    workers = {event["track"] for event in batches}
    assert workers == {f"worker {number}" for number in set(rank.fetches["worker"].tolist())}
    cores = [event for event in events if event["name"] == "busy cores"]
    assert len(cores) == np.isfinite(record.machine["cores_busy"]).sum()


def test_each_rank_and_machine_has_its_own() -> None:
    record = run(input_s=0.1)
    (rank,) = record.ranks
    header = dataclasses.replace(rank.header, rank=1, host="other")
    other = dataclasses.replace(record, ranks=(dataclasses.replace(rank, header=header),))
    events = parsed(run_trace(dataclasses.replace(record, elsewhere=(other,))))
    processes = {event["args"]["name"] for event in events if event["name"] == "process_name"}
    host = rank.header.host
    assert processes >= {
        f"rank 0 on {host}",
        "rank 1 on other",
        f"machine {host}",
        "GPU 0 of other",
    }


@given(name=st.text(), value=st.floats(allow_nan=False, allow_infinity=False))
def test_any_text_is_data(name: str, value: float) -> None:
    trace = TraceEvents()
    trace.slice("p", "t", name, 1.0, 2.0, text=name, nothing=None)
    trace.instant("p", "t", "moment", 0.5)
    trace.counter("p", "c", 0.0, {name: value})
    document = json.loads(trace.to_json({"script": name}))
    found = document["traceEvents"][-3]
    assert (found["name"], found["ts"], found["dur"]) == (name, 1e6, 1e6)
    assert found.get("args", {}) == ({"text": name} if name else {})
    assert document["traceEvents"][-1]["args"] == {name: value}
