"""Stores of keys that ranks share: what rank 0 sets is there, what only another sets is named."""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch

import trainfit
from helpers_ranks import as_rank_0
from trainfit.simgpu.device.errors import UnsupportedOperatorError

distributed: Any = torch.distributed
STORES: dict[str, Callable[[Path], Any]] = {
    "default": lambda folder: distributed.distributed_c10d._get_default_store(),
    "tcp": lambda folder: distributed.TCPStore("localhost", 0, 2, True, timedelta(seconds=60)),
    "file": lambda folder: distributed.FileStore(str(folder / "store"), 2),
    "prefix": lambda folder: distributed.PrefixStore("a", distributed.HashStore()),
}


@pytest.mark.parametrize("make", STORES.values(), ids=STORES)
def test_what_only_another_rank_sets_is_named(
    make: Callable[[Path], Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    as_rank_0(monkeypatch, 2)
    get = distributed.Store.get
    with trainfit.simulate("2x T4"):
        distributed.init_process_group("nccl")
        store = make(tmp_path)
        store.set_timeout(timedelta(seconds=1))
        store.set("mine", "1")
        assert store.get("mine") == b"1"
        store.wait(["mine"])
        assert store.add("count", 2) == 2
        for call in (lambda: store.get("run_id"), lambda: store.wait(["run_id"])):
            with pytest.raises(UnsupportedOperatorError) as raised:
                call()
            said = str(raised.value)
            assert '("run_id") called at ' in said and "test_stores.py" in said
            assert "a value that only another rank has: rank 0 runs" in said
    assert distributed.Store.get is get and not (tmp_path / "store").exists()


def test_stores_are_known_by_their_class(monkeypatch: pytest.MonkeyPatch) -> None:
    as_rank_0(monkeypatch, 2)
    with trainfit.simulate("2x T4"):
        store = distributed.TCPStore("localhost", 29500, world_size=2, is_master=True)
        assert isinstance(store, distributed.TCPStore) and isinstance(store, distributed.Store)
