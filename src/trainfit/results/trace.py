"""What is asked of a simulated run of a user's script, and what became of it."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

Status = Literal[
    "finished",  # the wanted number of optimizer steps was reached
    "ended",  # the script came to its end by itself
    "exited",  # the script called sys.exit with a code other than 0
    "failed",  # the script raised
    "out_of_memory",  # the simulated GPU was full
    "unsupported",  # an operator cannot be simulated
    "timeout",  # the time limit was reached
    "died",  # the process ended without a word (killed, crashed)
]


@dataclasses.dataclass(frozen=True)
class Target:
    """What Python runs: a script file or a module (``-m``), and its own arguments."""

    kind: Literal["script", "module"]
    name: str
    args: tuple[str, ...]


@dataclasses.dataclass(frozen=True)
class TraceRequest:
    """One simulated run.

    ``loader`` is (index, batch size): the batch size that the DataLoader constructed
    index-th gets instead of its own. ``amp`` forces autocast "on" or "off".
    ``gpu_memory_bytes`` overrides the catalogue's figure (a measured one).
    """

    target: Target
    gpu: str
    steps: int
    recording: str
    outcome: str
    limited: bool = False
    gpu_memory_bytes: int | None = None
    loader: tuple[int, int] | None = None
    amp: Literal["on", "off"] | None = None
    time_limit_s: float = 600.0

    def to_json(self) -> str:
        return json.dumps(dataclasses.asdict(self))

    @classmethod
    def from_json(cls, text: str) -> TraceRequest:
        data = json.loads(text)
        target = data.pop("target")
        loader = data.pop("loader")
        return cls(
            target=Target(target["kind"], target["name"], tuple(target["args"])),
            loader=tuple(loader) if loader else None,
            **data,
        )


@dataclasses.dataclass(frozen=True)
class TraceOutcome:
    """What became of a simulated run.

    ``loader`` describes the DataLoader that fed the first step: index, batch_size, dataset
    length, num_workers. ``autocast`` is the dtype of autocast regions on the GPU, ``None``
    where there were none. ``message`` is for people; ``traceback`` is the script's own.
    """

    status: Status
    steps: int
    seconds: float
    message: str = ""
    traceback: str = ""
    location: str | None = None
    loader: Mapping[str, Any] | None = None
    loaders: int = 0
    autocast: str | None = None
    gpu_operators: int = 0
    module_calls: int = 0

    def save(self, path: Path) -> None:
        scratch = path.with_suffix(".part")
        scratch.write_text(json.dumps(dataclasses.asdict(self)))
        scratch.replace(path)

    @classmethod
    def load(cls, path: Path) -> TraceOutcome:
        return cls(**json.loads(path.read_text()))
