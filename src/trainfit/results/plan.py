"""The result of ``trainfit plan``.

All memory figures are bytes. ``None`` means not determined; 0 is a figure.

Format history
    1   first version
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from pathlib import Path
from typing import Final, Literal

from trainfit.results import documents
from trainfit.results.constants import Constant

FORMAT: Final = "trainfit-plan"
VERSION: Final = 1

_AGAIN: Final = "make it again with `trainfit plan`"
_WANTED: Final = "give a file of `trainfit plan --output` or `trainfit simulate --output`"

#: How the batch sizes were obtained: computed from two simulated ones (exact for all),
#: simulated one by one, or not at all.
Basis = Literal["two traces", "one trace a batch size", "one trace"]


@dataclasses.dataclass(frozen=True)
class MemoryFigures:
    """The three quantities of GPU memory, in bytes.

    ``allocated`` is torch.cuda.max_memory_allocated, ``reserved`` max_memory_reserved, and
    ``device`` what nvidia-smi shows for the process: reserved + ``context``, which is
    taken to lie in ``context_range``. ``context_parts`` are what it consists of: the bare
    context and what the libraries add that the job uses.
    """

    allocated_bytes: int
    reserved_bytes: int
    device_bytes: int
    context_bytes: int
    context_range_bytes: tuple[int, int]
    context_parts: tuple[Constant, ...] = ()


@dataclasses.dataclass(frozen=True)
class Configuration:
    """One setting of the job and what it needs.

    ``batch_size`` is ``None`` where the script's batch size could not be told. ``amp`` is
    autocast's dtype ("bfloat16", "float16") or "off". ``by_kind_bytes`` and
    ``by_module_bytes`` split the peak of allocated memory; ``largest_batch`` is 0 where one
    sample does not fit and ``None`` where it could not be determined.
    """

    batch_size: int | None
    amp: str
    memory: MemoryFigures
    fits: bool
    by_kind_bytes: Mapping[str, int]
    by_module_bytes: Mapping[str, int]
    step_peak_allocated_bytes: tuple[int, ...]
    largest_batch: int | None
    recommended_batch: int | None


@dataclasses.dataclass(frozen=True)
class PlanResult:
    """Everything that ``trainfit plan`` found out.

    ``recommended`` are the figures at ``now.recommended_batch``. ``basis_detail`` says why,
    where ``basis`` is not the usual "two traces". ``other_gpus`` are GPUs of the catalogue
    on which the present batch size would run when it does not here, smallest first.
    ``other_processes_bytes`` of the GPU are held by others; ``profile`` names the
    calibration profile in use ("": none, the context is assumed).
    """

    command: str
    gpu: str
    gpu_memory_bytes: int
    headroom_share: float
    steps: int
    now: Configuration
    recommended: MemoryFigures | None
    other_amp: Configuration | None
    basis: Basis
    basis_detail: str
    launch: str
    assumptions: Mapping[str, int]
    notes: tuple[str, ...]
    other_gpus: tuple[str, ...]
    gpu_sources: Mapping[str, str]
    environment: Mapping[str, str]
    seconds: float
    other_processes_bytes: int = 0
    profile: str = ""

    @property
    def fits(self) -> bool:
        """Is there a batch size, or the present one where no other is known, that fits?"""
        largest = self.now.largest_batch
        return self.now.fits if largest is None else largest > 0

    def to_json(self) -> str:
        """One JSON document, with its format's name and version."""
        return documents.to_json(self, FORMAT, VERSION)

    @classmethod
    def from_json(cls, text: str, path: Path) -> PlanResult:
        """The reverse of :meth:`to_json`; raises :class:`ResultFileError` for ``path``."""
        return documents.from_json(cls, text, path, FORMAT, VERSION, again=_AGAIN, wanted=_WANTED)

    def save(self, path: Path) -> None:
        """Write the result; the file appears whole or not at all."""
        documents.save(path, self.to_json())

    @classmethod
    def load(cls, path: Path) -> PlanResult:
        """Read a result file; raises :class:`ResultFileError`."""
        return cls.from_json(documents.read(path, _AGAIN), path)
