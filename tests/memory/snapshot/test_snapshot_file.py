"""Snapshots of all versions are read; what is no snapshot is refused, and never run."""

from __future__ import annotations

import gzip
import os
import pickle
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from trainfit.memory.snapshot_file import is_snapshot, read_snapshot
from trainfit.memory.snapshot_report import explain_snapshot
from trainfit.results.files.errors import ResultFileError

MIB = 1 << 20
FRAME = {"name": "forward", "filename": "/home/me/model.py", "line": 7}


def segment(*blocks: Mapping[str, Any], **fields: Any) -> dict[str, Any]:
    return {
        "device": 0,
        "address": 1 << 30,
        "total_size": 20 * MIB,
        "stream": 0,
        "blocks": list(blocks),
        **fields,
    }


def written(folder: Path, document: Any) -> Path:
    path = folder / "snapshot.pickle"
    path.write_bytes(pickle.dumps(document))
    return path


#: A block of 6 MiB as versions of PyTorch wrote it.
BLOCKS: dict[str, dict[str, Any]] = {
    "2.1 and newer": {
        "address": 1 << 30,
        "size": 6 * MIB,
        "requested_size": 5 * MIB,
        "state": "active_allocated",
        "frames": [FRAME],
    },
    "1.13 to 2.0": {
        "size": 6 * MIB,
        "state": "active_allocated",
        "history": [{"addr": 1 << 30, "real_size": 5 * MIB, "frames": [FRAME]}],
    },
    "without recording": {"size": 6 * MIB, "state": "active_allocated"},
}
REST = {"size": 14 * MIB, "state": "inactive"}


@pytest.mark.parametrize("version", BLOCKS)
def test_blocks_of_all_versions(tmp_path: Path, version: str) -> None:
    path = written(tmp_path, {"segments": [segment(BLOCKS[version], REST)]})
    assert is_snapshot(path)
    (device,) = read_snapshot(path).devices
    block, rest = device.blocks()
    assert device.allocated_bytes == block.nbytes == 6 * MIB
    assert rest.address == (1 << 30) + 6 * MIB
    assert rest.state == "free"
    if version != "without recording":
        assert block.requested == 5 * MIB
        assert [frame.line for frame in block.stack] == [7]


def test_a_list_of_segments(tmp_path: Path) -> None:
    """`torch.cuda.memory_snapshot()`, pickled."""
    path = written(tmp_path, [segment(BLOCKS["2.1 and newer"], REST)])
    report = explain_snapshot(path)
    assert report.why == "snapshot"
    assert report.allocated_bytes == 6 * MIB
    assert report.reserved_bytes == 20 * MIB
    assert any("no history" in note for note in report.notes)


def test_compressed(tmp_path: Path) -> None:
    plain = written(tmp_path, {"segments": [segment(BLOCKS["2.1 and newer"])]})
    path = tmp_path / "snapshot.pickle.gz"
    path.write_bytes(gzip.compress(plain.read_bytes()))
    assert is_snapshot(path)
    assert read_snapshot(path) == read_snapshot(plain)


def test_the_gpu_that_ran_out_of_memory(tmp_path: Path) -> None:
    """Of several GPUs the one with the failure, though another has more memory."""
    failed = {"action": "oom", "size": 3 * MIB, "device_free": MIB, "stream": 0}
    document = {
        "segments": [
            segment(BLOCKS["2.1 and newer"], REST),
            segment({"size": 20 * MIB, "state": "active_allocated"}, device=1),
        ],
        "device_traces": [[failed], []],
        "allocator_settings": {"PYTORCH_CUDA_ALLOC_CONF": "max_split_size_mb:64"},
    }
    report = explain_snapshot(written(tmp_path, document))
    assert (report.why, report.gpu_index) == ("out_of_memory", 0)
    assert (report.requested_bytes, report.device_free_bytes) == (3 * MIB, MIB)
    assert report.other_gpus_bytes == {"GPU 1": 20 * MIB}
    assert report.largest_free_bytes == 14 * MIB
    assert report.conf == "max_split_size_mb:64"


class Command:
    """Pickles as a call."""

    def __init__(self, file: Path) -> None:
        self._file = file

    def __reduce__(self) -> tuple[Any, ...]:
        return os.mkdir, (str(self._file),)


def test_a_pickle_that_would_run_code(tmp_path: Path) -> None:
    made = tmp_path / "made"
    path = written(tmp_path, {"segments": [segment()], "note": Command(made)})
    with pytest.raises(ResultFileError, match="would run code"):
        read_snapshot(path)
    assert not made.exists()


@pytest.mark.parametrize(
    ("document", "said"),
    [
        (7, "holds a int"),
        ({}, "no segments"),
        ({"segments": 3}, "segments of the snapshot is no list"),
        ({"segments": [3]}, "segment 0 is a int"),
        ({"segments": [segment(total_size=-1)]}, "total_size of segment 0 is -1"),
        ({"segments": [segment({"size": 1})]}, "block 0 of segment 0 has no state"),
        ({"segments": [segment({"size": 1, "state": "lost"})]}, "is in state 'lost'"),
        ({"segments": [], "device_traces": [[{}]]}, "entry 0 of GPU 0's history has no action"),
        ({"segments": [], "device_traces": [[]]}, "no GPU has memory"),
        ({"segments": [segment({**BLOCKS["2.1 and newer"], "frames": 3})]}, "is no list"),
    ],
)
def test_what_is_no_snapshot(tmp_path: Path, document: Any, said: str) -> None:
    with pytest.raises(ResultFileError, match=said) as error:
        explain_snapshot(written(tmp_path, document))
    assert "\n" not in str(error.value)
    assert "_record_memory_history" in str(error.value)


@pytest.mark.parametrize("share", [0.01, 0.3, 0.99])
def test_a_file_that_was_cut(tmp_path: Path, share: float) -> None:
    path = written(tmp_path, {"segments": [segment(*[BLOCKS["2.1 and newer"]] * 9)]})
    whole = path.read_bytes()
    path.write_bytes(whole[: max(2, int(share * len(whole)))])
    with pytest.raises(ResultFileError, match="damaged"):
        read_snapshot(path)
