"""What is asked of a process that measures a script's DataLoader, and what became of it."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Final, Literal

from trainfit.results.files.exchange import Exchanged
from trainfit.results.machine.gpu_spec import GpuSpec
from trainfit.results.runs.trace import OwnFault, Target, TraceOutcome

#: Source of a step time of 0.
AS_FAST: Final = "as fast as the loader can: a step time of 0"


@dataclasses.dataclass(frozen=True)
class Consumer:
    """What happens between two calls of a DataLoader's ``next``: a training step, in seconds.

    ``work_s`` of it keeps a core busy (launching kernels); in the rest the main thread waits.
    ``pageable_s`` comes on top where batches are not pinned: the driver copies them to its own
    pinned buffers first, and the main thread works at it. ``source`` says in words where the
    figures are from.
    """

    step_s: float
    work_s: float = 0.0
    pageable_s: float = 0.0
    source: str = ""

    def __post_init__(self) -> None:
        if not 0 <= self.work_s <= self.step_s:
            raise ValueError("expected a work time from 0 to the step time")


@dataclasses.dataclass(frozen=True)
class LoadingRequest(Exchanged):
    """One process that measures a loader, which a script or a callable of the user's makes.

    ``folder`` is where it writes (see :class:`LoadingOutcome`). ``target`` is the
    script, run on the simulated ``gpu`` until its first step is made; without it ``loader`` is
    "module:callable" or "path/to/file.py:callable", of which a data set is given ``batch_size``.
    With ``step`` of ``None`` it is the one that is predicted for the simulated step. ``function``
    is what is called on the loader, "tune" or "trainfit.module:function"; ``arguments`` is a JSON
    object of that function's own.
    ``ranks`` share the machine. ``script_limit_s`` is for the script until its first step,
    ``limit_s`` for everything. ``variables`` are those that the user's command sets. Not
    ``thorough``: what hardly changes the choice of settings is not measured.
    """

    folder: str
    gpu: GpuSpec
    target: Target | None = None
    loader: str = ""
    batch_size: int | None = None
    step: Consumer | None = None
    function: str = "tune"
    arguments: str = "{}"
    seconds: float = 20.0
    confirm: int = 4
    thorough: bool = True
    max_workers: int | None = None
    any_order: bool = False
    ranks: int = 1
    script_limit_s: float = 600.0
    limit_s: float = 1200.0
    command: str = ""
    variables: Mapping[str, str] = dataclasses.field(default_factory=dict)


#: What became of it: "measured" (``result.json`` is there), "script" (the script came to no
#: batch; see ``trace``), "loader" (there is none that can be measured; see ``error``),
#: "failed" (measuring failed; see ``error`` and ``traceback``).
LoadingStatus = Literal["measured", "script", "loader", "failed"]


@dataclasses.dataclass(frozen=True)
class LoadingOutcome(Exchanged):
    """What became of a :class:`LoadingRequest`; ``outcome.json`` in its folder.

    ``result.json`` is there too if ``function`` gave a result, and ``partial.json`` is the last
    that it kept before something risky. ``progress`` has a line of JSON for each thing begun.
    ``loader`` says in words which it was, ``trace`` what became of the script: the work of its
    first step (``compute``), ``autocast``, and the rest. ``error`` is one line.
    """

    status: LoadingStatus
    loader: str = ""
    trace: TraceOutcome | None = None
    error: str = ""
    traceback: str = ""
    seconds: float = 0.0
    own_fault: OwnFault | None = None
