"""Every kind of result file by its format's name; reads any, joins several into one document."""

from __future__ import annotations

import json
import zipfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final

from trainfit.results.batch import BatchExplanation, NoiseResult
from trainfit.results.doctor import DoctorResult
from trainfit.results.files import documents
from trainfit.results.files.documents import Format, ResultFile
from trainfit.results.files.errors import ResultFileError
from trainfit.results.gpus import GpusResult, Profile
from trainfit.results.loader import LoaderResult
from trainfit.results.memory import SnapshotReport
from trainfit.results.pace import PaceResult
from trainfit.results.plan import PlanResult
from trainfit.results.real_runs import Verification
from trainfit.results.rehearsal import Rehearsal
from trainfit.results.runs.continuation import whole
from trainfit.results.runs.recording import Recording
from trainfit.results.runs.sweep import SweepResult
from trainfit.results.speed import GpuComparison
from trainfit.results.watch import AdviceVerification, Comparison, WatchResult

_KINDS: Final[tuple[type[ResultFile], ...]] = (
    *(PlanResult, SweepResult, GpuComparison, GpusResult, Verification, Profile),
    *(LoaderResult, Rehearsal, WatchResult, Comparison, AdviceVerification),
    *(PaceResult, BatchExplanation, NoiseResult, DoctorResult, SnapshotReport),
)
#: By the names of formats.
KINDS: Final[Mapping[str, type[ResultFile]]] = {kind.FILE.name: kind for kind in _KINDS}

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
    if path.is_file() and zipfile.is_zipfile(path):  # which reads a device without an end
        return whole(Recording.load(path))
    return of_text(documents.read(path, "re-create it"), path)


def of_text(text: str, path: Path) -> ResultFile:
    """The result that a JSON document is; raises :class:`ResultFileError` for ``path``."""
    name = documents.format_of(text) or ""
    if name in _ELSEWHERE:
        raise ResultFileError(path, f"its format is {name!r}", _ELSEWHERE[name])
    return KINDS.get(name, PlanResult).from_json(text, path)


# ---
# Several results as one JSON document, each as its own file has it.


JOINED: Final = Format.of("trainfit-report", "trainfit report RESULT… -o FILE.json")


def joined(parts: Sequence[tuple[str, str]]) -> str:
    """One document of ``parts``: the name of each file, and its JSON text."""
    results = [{"file": name, "result": json.loads(text)} for name, text in parts]
    document = {**JOINED.head(), "results": results}
    return json.dumps(document, indent=2, allow_nan=False)


def parted(text: str, path: Path) -> list[tuple[str, str]]:
    """The reverse of :func:`joined`; raises :class:`ResultFileError` for ``path``."""
    document: Any = json.loads(text)
    JOINED.check(document, path)
    try:
        return [(str(each["file"]), json.dumps(each["result"])) for each in document["results"]]
    except (KeyError, TypeError) as error:
        raise ResultFileError(path, f"it is damaged ({error!r})", JOINED.remake) from error
