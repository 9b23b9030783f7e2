"""The result of ``trainfit plan`` and of ``trainfit simulate``.

All memory figures are bytes. ``None`` means not determined; 0 is a figure.

Format history
    1   first version
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

from trainfit.results.errors import ResultFileError

FORMAT: Final = "trainfit-plan"
VERSION: Final = 1


@dataclasses.dataclass(frozen=True)
class MemoryFigures:
    """The three quantities of GPU memory, in bytes.

    ``allocated`` is torch.cuda.max_memory_allocated, ``reserved`` max_memory_reserved, and
    ``device`` what nvidia-smi shows for the process: reserved + ``context``, which is
    assumed to lie in ``context_range``.
    """

    allocated_bytes: int
    reserved_bytes: int
    device_bytes: int
    context_bytes: int
    context_range_bytes: tuple[int, int]


@dataclasses.dataclass(frozen=True)
class Configuration:
    """One setting of the job and what it needs.

    ``batch_size`` is ``None`` where the script's batch size could not be told. ``amp`` is
    autocast's dtype ("bfloat16", "float16") or "off". ``by_kind`` and ``by_module`` split
    the peak of allocated memory; ``largest_batch`` is 0 where one sample does not fit and
    ``None`` where it could not be determined.
    """

    batch_size: int | None
    amp: str
    memory: MemoryFigures
    fits: bool
    by_kind: Mapping[str, int]
    by_module: Mapping[str, int]
    step_peak_allocated_bytes: tuple[int, ...]
    largest_batch: int | None
    recommended_batch: int | None


@dataclasses.dataclass(frozen=True)
class PlanResult:
    """Everything that ``trainfit plan`` found out.

    ``basis`` says how the batch sizes were obtained ("two traces", "one trace a batch
    size", "one trace") and ``basis_detail`` why, where that is not the usual way.
    ``other_gpus`` are catalogue GPUs on which the job would run when it does not here.
    """

    command: str
    gpu: str
    gpu_memory_bytes: int
    headroom: float
    steps: int
    now: Configuration
    recommended: MemoryFigures | None
    other_amp: Configuration | None
    basis: str
    basis_detail: str
    launch: str
    assumptions: Mapping[str, int]
    notes: tuple[str, ...]
    other_gpus: tuple[str, ...]
    gpu_sources: Mapping[str, str]
    environment: Mapping[str, str]
    seconds: float

    def to_json(self) -> str:
        """One JSON document, with its format's name and version."""
        document = {"format": FORMAT, "version": VERSION, **dataclasses.asdict(self)}
        return json.dumps(document, indent=2)

    def save(self, path: Path) -> None:
        scratch = path.with_name(path.name + ".part")
        scratch.write_text(self.to_json() + "\n")
        scratch.replace(path)

    @classmethod
    def load(cls, path: Path) -> PlanResult:
        """Read a result file; raises :class:`ResultFileError`."""
        try:
            document = json.loads(path.read_text())
            name, version = document.pop("format"), document.pop("version")
        except FileNotFoundError:
            raise ResultFileError(path, "there is no such file", "check the path") from None
        except (OSError, ValueError, AttributeError, KeyError) as error:
            reason = f"it is damaged or no plan ({error})"
            raise ResultFileError(path, reason, "make it again with `trainfit plan`") from error
        if name != FORMAT:
            raise ResultFileError(path, f"it is a {name}", "give a file of `trainfit plan`")
        if not isinstance(version, int) or version > VERSION:
            reason = f"its format version {version} is newer than this trainfit reads ({VERSION})"
            raise ResultFileError(path, reason, "upgrade trainfit")
        try:
            return cls(**_restore(document))
        except (TypeError, KeyError) as error:
            reason = f"it is damaged ({error})"
            raise ResultFileError(path, reason, "make it again with `trainfit plan`") from error


def _restore(document: dict[str, Any]) -> dict[str, Any]:
    document["now"] = _configuration(document["now"])
    if document["other_amp"] is not None:
        document["other_amp"] = _configuration(document["other_amp"])
    if document["recommended"] is not None:
        document["recommended"] = _memory(document["recommended"])
    for name in ("notes", "other_gpus"):
        document[name] = tuple(document[name])
    return document


def _configuration(data: dict[str, Any]) -> Configuration:
    data = dict(data)
    data["memory"] = _memory(data["memory"])
    data["step_peak_allocated_bytes"] = tuple(data["step_peak_allocated_bytes"])
    return Configuration(**data)


def _memory(data: dict[str, Any]) -> MemoryFigures:
    low, high = data["context_range_bytes"]
    return MemoryFigures(**{**data, "context_range_bytes": (low, high)})
