"""The environment in which a launcher starts the ranks of a job."""

from __future__ import annotations

import pytest


def as_rank_0(monkeypatch: pytest.MonkeyPatch, size: int, *, of_machine: int | None = None) -> None:
    """This process is the first of ``size`` ranks, of which ``of_machine`` are on each machine."""
    values = {"RANK": 0, "LOCAL_RANK": 0, "WORLD_SIZE": size, "MASTER_PORT": 29500}
    if of_machine is not None:
        values["LOCAL_WORLD_SIZE"] = of_machine
    for name, value in (values | {"MASTER_ADDR": "localhost"}).items():
        monkeypatch.setenv(name, str(value))
