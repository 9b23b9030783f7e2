"""What ``trainfit memory`` explains of a memory snapshot that PyTorch wrote. All sizes are bytes.

Format history
    1   first version
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import ClassVar, Final, Literal

from trainfit.results.files.documents import Format, ResultFile
from trainfit.results.findings import Finding
from trainfit.results.memory import SettingOutcome

FORMAT: Final = "trainfit-memory-snapshot"
VERSION: Final = 1
_REMAKE: Final = "re-create it with `trainfit memory SNAPSHOT.pickle --json`"


@dataclasses.dataclass(frozen=True)
class SnapshotOwner:
    """Blocks that the same line of code made by the same operator.

    Attributes
    ----------
    kind: A kind of memory as of simulated runs, "backward" (made by the backward pass: gradients of
        activations, and with ``stacks="python"`` all that it makes), "loaded" (read from a file),
        "other" (outside of modules), "before_history" or "no_stack".
    line: Innermost line of code outside of PyTorch; ``None``: not recorded.
    user_line: Innermost line outside of installed packages.
    in_module: Whether a module's call made it.
    """

    kind: str
    operator: str
    line: str | None
    user_line: str | None
    in_module: bool
    nbytes: int
    blocks: int
    largest_bytes: int


@dataclasses.dataclass(frozen=True)
class SnapshotReport(ResultFile):
    """One GPU at one moment of its history.

    Attributes
    ----------
    why: What the moment is: the last request that failed, the history's peak, or the end.
    gpu_index: The GPU of the process that it is about.
    other_gpus_bytes: Allocated on the others ("GPU 1"), when the snapshot was written.
    event, events: Place of the moment in the history, and the history's entries.
    begins_before: Memory that was there before the history begins.
    requested_bytes, device_free_bytes: Of the request that failed; ``None``: none did, or the file
        does not say.
    reserved_bytes: By PyTorch, tensors and cache together.
    largest_free_bytes: The largest free block of the cache; ``None``: cannot be told for a moment
        before the end.
    failures: Requests that failed in the history.
    files_bytes: Memory made within modules by the file of the code that made it.
    replayed: Whether the history, replayed through the allocator's model, reserves what it did.
    """

    FILE: ClassVar = Format(FORMAT, VERSION, _REMAKE, _REMAKE)

    file: str
    why: Literal["out_of_memory", "peak", "snapshot"]
    gpu_index: int
    other_gpus_bytes: Mapping[str, int]
    event: int
    events: int
    begins_before_bytes: int
    allocated_bytes: int
    pending_bytes: int
    reserved_bytes: int
    requested_bytes: int | None
    device_free_bytes: int | None
    largest_free_bytes: int | None
    failures: int
    conf: str | None
    by_kind_bytes: Mapping[str, int]
    files_bytes: Mapping[str, int]
    owners: tuple[SnapshotOwner, ...]
    replayed: bool
    settings: tuple[SettingOutcome, ...]
    best_setting: SettingOutcome | None
    findings: tuple[Finding, ...]
    notes: tuple[str, ...]

    @property
    def fits(self) -> bool:
        """Whether no request failed."""
        return self.why != "out_of_memory"
