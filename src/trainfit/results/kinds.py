"""Every kind of result file, by the name of its format, and the reading of any of them."""

from __future__ import annotations

import zipfile
from collections.abc import Mapping
from pathlib import Path
from typing import Final

from trainfit.results.batch.explanation import BatchExplanation
from trainfit.results.batch.noise import NoiseResult
from trainfit.results.files import documents
from trainfit.results.files.documents import ResultFile
from trainfit.results.files.errors import ResultFileError
from trainfit.results.loader.rehearsal import Rehearsal
from trainfit.results.loader.result import LoaderResult
from trainfit.results.machine.doctor import DoctorResult
from trainfit.results.machine.gpus import GpusResult
from trainfit.results.machine.pace import PaceResult
from trainfit.results.machine.profile import Profile
from trainfit.results.plan.gpu_comparison import GpuComparison
from trainfit.results.plan.result import PlanResult
from trainfit.results.plan.verification import Verification as PlanVerification
from trainfit.results.runs.recording import Recording
from trainfit.results.watch.comparison import Comparison
from trainfit.results.watch.result import WatchResult
from trainfit.results.watch.verification import Verification

_KINDS: Final[tuple[type[ResultFile], ...]] = (
    *(PlanResult, GpuComparison, GpusResult, PlanVerification, Profile),
    *(LoaderResult, Rehearsal, WatchResult, Comparison, Verification),
    *(PaceResult, BatchExplanation, NoiseResult, DoctorResult),
)
#: By the names of formats, former ones too.
KINDS: Final[Mapping[str, type[ResultFile]]] = {
    name: kind for kind in _KINDS for name in (kind.FILE.name, *kind.FILE.former_names)
}

#: Documents of ours that are no result by themselves, and what to do with them.
_ELSEWHERE: Final = {
    "trainfit-report": "give it to `trainfit report`, which shows all of its results",
    "trainfit-watched-run": "give the folder of the run that it lies in to `trainfit watch --read`",
    "trainfit-machine": "give it to `trainfit doctor --machine`",
    "trainfit-memory-report": "make a page of its recording: `trainfit report RECORDING`",
    "trainfit-memory-by-hand": "make a page of its recording: `trainfit report RECORDING`",
}


def read(path: Path) -> ResultFile | Recording:
    """The result in a file; raises :class:`ResultFileError`.

    A document of an unknown format is read as a plan, whose error says what it is.
    """
    if zipfile.is_zipfile(path):
        return Recording.load(path)
    return of_text(documents.read(path, "re-create it"), path)


def of_text(text: str, path: Path) -> ResultFile:
    """The result that a JSON document is; raises :class:`ResultFileError` for ``path``."""
    name = documents.format_of(text) or ""
    if name in _ELSEWHERE:
        raise ResultFileError(path, f"its format is {name!r}", _ELSEWHERE[name])
    return KINDS.get(name, PlanResult).from_json(text, path)
