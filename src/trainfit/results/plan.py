"""The result of ``trainfit plan``.

All memory figures are bytes. ``None`` means not determined; 0 is a figure.

Format history
    1   first version
    2   remedies, inference; steps are calls of the model where there is an inference
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Final, Literal

from trainfit.results.decoding import DecodingError, decode
from trainfit.results.errors import ResultFileError

FORMAT: Final = "trainfit-plan"
VERSION: Final = 2

#: How the batch sizes were obtained: computed from two simulated ones (exact for all),
#: simulated one by one, or not at all.
Basis = Literal["two traces", "one trace a batch size", "one trace"]

#: How the figures of a remedy were obtained: the changed script was simulated; the recording
#: was replayed with another allocator; the recording was replayed without the tensors that
#: would go (not simulated). Or why there are none: the trial failed, or it does not apply.
RemedyStatus = Literal["simulated", "replayed", "estimated", "failed", "not applicable"]

#: What becomes of the training: the same up to rounding; the same in lower precision; another
#: one, whose result has to be compared.
Changes = Literal["nothing", "precision", "training"]

#: Share of the device memory below which a remedy has won nothing worth a change.
LEAST_GAIN: Final = 0.002


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
class ExtraCompute:
    """The work of one optimizer step against the job as written; 0.25 is a quarter more.

    ``flops_share`` counts matrix products, convolutions and attention; ``traffic_share`` the
    bytes that all operators read and write; ``operators_share`` how many operators run.
    """

    flops_share: float
    traffic_share: float
    operators_share: float


@dataclasses.dataclass(frozen=True)
class Remedy:
    """One remedy.

    ``memory``, ``fits``, ``saved_bytes`` (of device memory; negative: it takes more),
    ``extra`` and ``cost_percent`` are ``None`` where there are no figures; ``largest_batch`` also
    where no law of the batch size was cheap to get. ``cost_percent`` is the price in percent of a
    step's compute: see :mod:`trainfit.plan.pricing`. ``how`` are lines for people: what to
    change, and where. ``launch`` is the command with it, where the command changes.
    """

    name: str
    title: str
    status: RemedyStatus
    reason: str
    changes: Changes
    changes_detail: str
    found: str = ""
    memory: MemoryFigures | None = None
    fits: bool | None = None
    saved_bytes: int | None = None
    largest_batch: int | None = None
    extra: ExtraCompute | None = None
    cost_percent: float | None = None
    how: tuple[str, ...] = ()
    launch: str | None = None


@dataclasses.dataclass(frozen=True)
class Combination:
    """Several remedies at once, simulated together, because none alone is enough.

    ``batch_size`` is what goes into the command or the DataLoader, smaller than the present
    one where gradients are accumulated. ``memory`` is ``None`` where they could not be
    simulated together; ``failure`` says why.
    """

    names: tuple[str, ...]
    memory: MemoryFigures | None
    fits: bool
    batch_size: int | None
    extra: ExtraCompute | None
    launch: str
    failure: str = ""


@dataclasses.dataclass(frozen=True)
class Remedies:
    """Everything that was tried on a job, best first.

    ``before`` are the figures of the job as written over the same ``steps`` as the trials.
    ``combination`` is the last one tried where no remedy alone makes the job fit; ``failure``
    says why nothing could be tried.
    """

    before: MemoryFigures | None
    batch_size: int | None
    largest_batch: int | None
    steps: int
    items: tuple[Remedy, ...]
    combination: Combination | None = None
    failure: str = ""

    @property
    def won(self) -> tuple[Remedy, ...]:
        """Those that lower the memory of the job by :data:`LEAST_GAIN` or more."""
        if self.before is None:
            return ()
        least = max(1, int(LEAST_GAIN * self.before.device_bytes))
        return tuple(each for each in self.items if (each.saved_bytes or 0) >= least)


@dataclasses.dataclass(frozen=True)
class Inference:
    """Memory of a script that does not train, with gradients recorded and without.

    ``records_gradients`` says what the script itself does; the other way round is ``None``
    where it could not be simulated (``failure`` says why).
    """

    records_gradients: bool
    without_gradients: MemoryFigures | None
    with_gradients: MemoryFigures | None
    failure: str = ""


@dataclasses.dataclass(frozen=True)
class PlanResult:
    """Everything that ``trainfit plan`` found out.

    ``recommended`` are the figures at ``now.recommended_batch``. ``basis_detail`` says why,
    where ``basis`` is not the usual "two traces". ``other_gpus`` are GPUs of the catalogue
    on which the present batch size would run when it does not here, smallest first.
    ``remedies`` are ``None`` where none were tried, ``inference`` where the script trains.
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
    remedies: Remedies | None = None
    inference: Inference | None = None

    @property
    def fits(self) -> bool:
        """Is there a batch size, or the present one where no other is known, that fits?"""
        largest = self.now.largest_batch
        return self.now.fits if largest is None else largest > 0

    def to_json(self) -> str:
        """One JSON document, with its format's name and version."""
        document = {"format": FORMAT, "version": VERSION, **dataclasses.asdict(self)}
        return json.dumps(document, indent=2, allow_nan=False)

    @classmethod
    def from_json(cls, text: str, path: Path) -> PlanResult:
        """The reverse of :meth:`to_json`; raises :class:`ResultFileError` for ``path``."""
        again = "make it again with `trainfit plan`"
        try:
            document = json.loads(text, parse_constant=_no_constant)
        except (ValueError, RecursionError) as error:
            raise ResultFileError(path, f"it is damaged or no result ({error})", again) from error
        if not isinstance(document, dict) or "format" not in document:
            raise ResultFileError(path, "it is no result of trainfit", again)
        name, version = document.pop("format"), document.pop("version", None)
        if name != FORMAT:
            raise ResultFileError(
                path,
                f"its format is {name!r}, not {FORMAT!r}",
                "give a file of `trainfit plan --output` or `trainfit simulate --output`",
            )
        if type(version) is not int or version < 1:
            raise ResultFileError(path, f"its format version is {version!r}", again)
        if version > VERSION:
            reason = f"its format version {version} is newer than this trainfit reads ({VERSION})"
            raise ResultFileError(path, reason, "upgrade trainfit")
        try:
            return decode(cls, document)
        except DecodingError as error:
            raise ResultFileError(path, f"it is damaged ({error})", again) from error

    def save(self, path: Path) -> None:
        """Write the result; the file appears whole or not at all."""
        scratch = path.with_name(path.name + ".part")
        scratch.write_text(self.to_json() + "\n", encoding="utf-8")
        scratch.replace(path)

    @classmethod
    def load(cls, path: Path) -> PlanResult:
        """Read a result file; raises :class:`ResultFileError`."""
        try:
            text = path.read_text(encoding="utf-8")
        except FileNotFoundError:
            raise ResultFileError(path, "there is no such file", "check the path") from None
        except UnicodeDecodeError as error:
            reason = f"it is damaged or no result ({error.reason} at byte {error.start})"
            raise ResultFileError(path, reason, "make it again with `trainfit plan`") from error
        except OSError as error:
            raise ResultFileError(path, error.strerror or str(error), "check the path") from error
        return cls.from_json(text, path)


def _no_constant(name: str) -> None:
    """JSON has neither NaN nor Infinity, though Python reads them."""
    raise ValueError(f"{name} is no JSON")
