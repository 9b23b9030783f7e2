"""The other ranks of a simulated rank's job: what it did with them, and what comes from them.

Ranks that differ (stages of a pipeline) are simulated side by side, each in a process of its own.
What one sends to another passes through files in their folders, which whoever started them carries
over: small values themselves, of others that they were sent. A rank waits for what it has to know,
and takes what is large as unknown, as it takes its own.
"""

from __future__ import annotations

import ast
import dataclasses
import os
import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

import torch

from trainfit.findings.source_code import file_syntax
from trainfit.results.runs.communication import Meeting
from trainfit.results.runs.trace import CAME_FOLDER, SENT_FOLDER, WAITS_FILE, ScriptOutcome
from trainfit.simgpu.device.errors import UnsupportedOperatorError
from trainfit.simgpu.device.tensor import DeviceTensor, gpu_of
from trainfit.simgpu.device.user_location import user_frame
from trainfit.torch_private.operators import no_dispatch

#: What is kept of what a rank does with others; a step of a large model has a few hundreds.
_MOST: Final = 4000
#: Names that a line with gathered objects may share with any other.
_NO_OBJECTS: Final = {"dist", "torch", "rank", "world_size", "self", "print", "len", "range"}
#: Seconds between looks for what another rank sends.
_TICK_S: Final = 0.005


#: Where one of these names a single GPU, or ranks come from a batch system, which may give each its
#: own, GPU 0 of one rank is not that of another.
_HIDES: Final = ("CUDA_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES")
#: Rank and number of tasks that are ranks themselves: Open MPI's, PMI's and Slurm's variables.
TASKS: Final = (
    ("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE"),
    ("PMI_RANK", "PMI_SIZE"),
    ("SLURM_PROCID", "SLURM_STEP_NUM_TASKS"),
)
_OF_BATCH_SYSTEMS: Final = (*(rank for rank, _ in TASKS), "FLUX_TASK_RANK")


def gpu_in(group: Any, tensors: Sequence[Any]) -> int | None:
    """The number of the machine's GPU that NCCL finds ``tensors`` on in a collective of ``group``;
    ``None``: it has no part in it, or the number may be another GPU's in another rank."""
    gpu = next((gpu_of(tensor) for tensor in tensors if isinstance(tensor, DeviceTensor)), None)
    if gpu is None or not _by_nccl(group):
        return None
    hidden = any("," not in os.environ.get(name, ",") for name in _HIDES)
    return None if hidden or of_tasks() else gpu


def of_tasks() -> bool:
    """Is this process a task of a batch system's, or of MPI's?"""
    return any(name in os.environ for name in _OF_BATCH_SYSTEMS)


#: Ranks of a machine: variables of torchrun, DeepSpeed, Open MPI, PMI and Slurm ("8(x2)").
_PER_MACHINE: Final = (
    *("LOCAL_WORLD_SIZE", "LOCAL_SIZE", "OMPI_COMM_WORLD_LOCAL_SIZE", "MPI_LOCALNRANKS"),
    "SLURM_STEP_TASKS_PER_NODE",
)


def ranks_per_machine(gpus: int) -> int:
    """How many of the job's ranks are on a machine, of ``gpus`` GPUs."""
    for name in _PER_MACHINE:
        said = os.environ.get(name, "").partition("(")[0]
        if said.isdigit() and int(said):
            return int(said)
    return gpus


def _by_nccl(group: Any) -> bool:
    """Gloo and MPI let two ranks use one GPU."""
    try:
        return "cuda:nccl" in torch.distributed.get_backend_config(group)
    except (KeyError, ValueError):  # one that PyTorch keeps no list of
        return False


def _words(place: str) -> set[str]:
    """Variables at a line of the script's ("file:line")."""
    file, _, line = place.rpartition(":")
    tree = file_syntax(file)
    nodes = () if tree is None or not line.isdigit() else ast.walk(tree)
    return {
        node.id for node in nodes if isinstance(node, ast.Name) and node.lineno == int(line)
    } - _NO_OBJECTS


class PeerIsGone(RuntimeError):
    """A rank waits for another that has ended: the job would hang."""


class Peers:
    """What one rank does with others: ``rank`` is its number in the job, ``company`` those
    simulated with it, and ``folder`` where it reads and writes what passes between them.

    Attributes: ``meetings`` are what it did with others, in order; ``gave_none_at`` is the line at
    which it had no object where objects of all ranks were gathered (``None``: nowhere).
    """

    def __init__(
        self, rank: int = 0, company: Sequence[int] = (), folder: str | Path = "."
    ) -> None:
        self.rank, self.company = rank, frozenset(company) - {rank}
        self.meetings: list[Meeting] = []
        self.gave_none_at: str | None = None
        self._folder = Path(folder)
        self._sent, self._expected = 0, Counter[int]()

    def met(
        self,
        kind: str,
        group: Sequence[int],
        nbytes: int,
        peer: int | None = None,
        gpu: int | None = None,
    ) -> None:
        """It takes part in something that all ranks of ``group`` have to, with what is on ``gpu``
        (:func:`gpu_in`)."""
        if len(self.meetings) < _MOST:
            self.meetings.append(Meeting(kind, tuple(group), nbytes, user_frame(), peer, gpu))

    def explained(self, end: ScriptOutcome) -> ScriptOutcome:
        """The outcome ``end``; where the script failed on a None among gathered objects to which
        this rank gave one, others may have given what it needs, and do not run."""
        if self.gave_none_at is None or end.status != "failed" or "NoneType" not in end.message:
            return end
        if not _words(self.gave_none_at) & _words(end.location or ""):
            return end
        what = UnsupportedOperatorError(
            "objects gathered from other ranks",
            self.gave_none_at,
            "not simulated",
            f"only rank {self.rank} runs, which gives None there, and what others give is not "
            f"known; let rank {self.rank} have its object, too",
        )
        return dataclasses.replace(end, status="unsupported", message=str(what))

    def send(self, to: int, content: torch.Tensor | None) -> None:
        """``content`` goes to rank ``to`` (``None``: it is not known)."""
        if to not in self.company:
            return
        folder = self._folder / SENT_FOLDER
        folder.mkdir(exist_ok=True)
        self._sent += 1
        whole, part = folder / f"{self._sent:08}-{to}", folder / "part"
        with no_dispatch(), part.open("wb") as file:
            if content is not None:
                torch.save(content.detach().clone(), file)
        os.replace(part, whole)

    def expect(self, source: int) -> int | None:
        """The number of what comes next from rank ``source``; ``None``: that does not run."""
        if source not in self.company:
            return None
        self._expected[source] += 1
        return self._expected[source]

    def receive(self, source: int, number: int) -> torch.Tensor | None:
        """What :meth:`expect` gave the number of, when it has come; ``None``: it is not known.

        Raises :class:`PeerIsGone` where it will never come.
        """
        came, gone = (self._folder / CAME_FOLDER / f"{source}-{each}" for each in (number, "gone"))
        waits = self._folder / WAITS_FILE
        if not came.exists():
            waits.write_text(came.name)
        while not came.exists():
            if gone.exists() and not came.exists():
                raise PeerIsGone(
                    f"rank {self.rank} waits for what rank {source} never sends: the job hangs"
                )
            time.sleep(_TICK_S)
        waits.unlink(missing_ok=True)
        if not came.stat().st_size:
            return None
        with no_dispatch():
            tensor: Any = torch.load(came, weights_only=True)
        assert isinstance(tensor, torch.Tensor)
        return tensor
