"""Watched runs whose tables are made by chance, most of them impossible."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
from hypothesis import strategies as st

from helpers_watch import HEADER, loader
from trainfit.results.runs import tables
from trainfit.results.runs.tables import Table
from trainfit.results.runs.watched import RankRecord, RunRecord


def _filled(kind: Any, count: int, seed: int) -> Table:
    """Columns that are plausible, not measured, zero, or of any bits."""
    random = np.random.default_rng(seed)
    raw = random.integers(0, 256, count * kind.itemsize, dtype=np.uint8)
    rows = np.frombuffer(raw.tobytes(), kind).copy()
    missing = tables.empty_rows(kind, count)
    for name in kind.names:
        way = random.integers(0, 5)
        if way == 0:
            rows[name] = missing[name]
        elif way == 1:
            rows[name] = 0
        elif way == 2:
            rows[name] = random.integers(0, 5, count)
        elif way == 3 and kind[name].kind == "f":
            rows[name] = random.exponential(0.1, count)
    if random.integers(0, 2):
        time = "time_s" if "time_s" in kind.names else "end_s"
        rows[time] = np.cumsum(random.exponential(0.1, count))
    if kind is tables.STEPS and random.integers(0, 2):
        rows["step_s"] = random.exponential(0.1, count)
    return rows


@st.composite
def runs(draw: Any) -> RunRecord:
    """Any run at all."""
    filled = {
        name: _filled(kind, draw(st.sampled_from([0, 1, 5, 40, 200])), draw(st.integers(0, 10**6)))
        for name, kind in tables.BY_NAME.items()
    }
    cores = draw(st.sampled_from([None, 0.0, 0.5, 2.0, 64.0]))
    header = {
        "gpu": draw(st.sampled_from([None, 0, 7])),
        "usable_cores": cores,
        "quota_cores": draw(st.sampled_from([None, 0.5, 3.0])),
        "loaders": loader(num_workers=draw(st.sampled_from([0, 1, 4, 100])))
        if draw(st.booleans())
        else (),
        "threads": draw(st.sampled_from([{}, {"torch": 64}])),
        "worker_threads": draw(st.sampled_from([{}, {"opencv": 64, "other": 3}])),
        "flops_per_sample": draw(st.sampled_from([None, 1e12])),
    }
    told = dataclasses.replace(HEADER, **header)
    rank = RankRecord(told, filled["steps"], filled["fetches"])
    return RunRecord(
        *((rank,), filled["machine"], filled["gpus"], filled["processes"]),
        memory=filled["memory"],
        folders=filled["folders"],
        core_waits=filled["core_waits"],
    )
