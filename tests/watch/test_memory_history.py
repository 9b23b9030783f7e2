"""A watched run that records its GPU's memory: what it was full of stands in the report."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

import trainfit
from tests.memory.snapshot import scenarios
from trainfit.cli.verbs.watched import with_memory
from trainfit.memory.snapshot_report import explain_snapshot
from trainfit.results.runs.watched import memory_path
from trainfit.results.watch import WatchResult
from trainfit.watch.recorder.cuda_hooks import MemoryHistory
from trainfit.watch.recorder.recorder import Recorder, RecordingPlace

RESULT = Path(__file__).parents[1] / "fixtures" / "results" / "watch-v1.json"


def out_of_memory() -> torch.OutOfMemoryError:
    with pytest.raises(torch.OutOfMemoryError) as error:
        scenarios.fragmented()
    return error.value


def test_it_begins_with_cuda_and_is_saved_where_memory_runs_out(tmp_path: Path) -> None:
    path = tmp_path / "memory.pickle"
    with trainfit.simulate("custom:1500MiB"):
        history = MemoryHistory()
        out_of_memory()
        history.save(path)
        history.end()
        assert not torch.cuda.memory._snapshot()["device_traces"][0]
    report = explain_snapshot(path)
    assert report.why == "out_of_memory"
    assert report.findings[0].kind == "fragmented"


def test_nothing_is_saved_without_cuda(tmp_path: Path) -> None:
    history = MemoryHistory()
    history.save(tmp_path / "memory.pickle")
    history.end()
    assert not list(tmp_path.iterdir())


def test_the_recorder_saves_the_first_failure(tmp_path: Path) -> None:
    place = RecordingPlace(tmp_path, 0.0, 0.0, "python train.py", keeps_memory_history=True)
    with trainfit.simulate("custom:1500MiB"):
        recorder = Recorder(place)
        recorder.start()
        try:
            error = out_of_memory()
            recorder.saw(error)
            (saved,) = tmp_path.glob("memory-*.pickle")
            first = saved.read_bytes()
            recorder.saw(torch.OutOfMemoryError("CUDA out of memory: another try"))
            assert saved.read_bytes() == first
        finally:
            recorder.stop(unhook=True)


def test_the_report_says_what_the_memory_was_full_of(tmp_path: Path) -> None:
    result = WatchResult.from_json(RESULT.read_text("utf-8"), RESULT)
    assert with_memory(result, [tmp_path]) is result
    with trainfit.simulate("custom:1500MiB"):
        history = MemoryHistory()
        out_of_memory()
        history.save(memory_path(tmp_path / "rank0"))
    told = with_memory(result, [tmp_path])
    assert told.findings[0].kind == "fragmented"
    assert any(f"trainfit memory {tmp_path}" in note for note in told.notes)


def test_a_damaged_snapshot_is_a_note(tmp_path: Path) -> None:
    result = WatchResult.from_json(RESULT.read_text("utf-8"), RESULT)
    memory_path(tmp_path / "rank0").write_bytes(b"\x80")
    told = with_memory(result, [tmp_path])
    assert told.findings == result.findings
    assert "damaged" in told.notes[-1]
