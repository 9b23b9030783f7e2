"""Result files of the version before the renaming of their keys are read; newer ones are not."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Protocol

import pytest

from trainfit.cli.main import main
from trainfit.results.doctor import DoctorResult
from trainfit.results.files import documents
from trainfit.results.files.documents import objects_at, rename_key, rename_value, upgrade
from trainfit.results.files.errors import ResultFileError
from trainfit.results.gpus import GpusResult
from trainfit.results.loader import LoaderResult
from trainfit.results.pace import PaceResult
from trainfit.results.plan import PlanResult
from trainfit.results.rehearsal import Rehearsal
from trainfit.results.speed import GpuComparison

FOLDER = Path(__file__).parent / "older_results"

#: Keys, and values of enumerations, that no file has from its present version on.
FORMER_KEYS = {"cure", "is_cured", "offers", "enough", "beside_others", "again_share", "product",
               "product_balance_size", "hand_over"}  # fmt: skip
FORMER_VALUES = {("phase", "cure"), ("limit", "hand_off"), ("cause", "hand_over")}


class Result(Protocol):
    @classmethod
    def from_json(cls, text: str, path: Path) -> Any: ...


FILES: dict[str, type[Result]] = {
    "doctor-v1.json": DoctorResult,
    "gpu-comparison-v2.json": GpuComparison,
    "gpus-v3.json": GpusResult,
    "loader-v2.json": LoaderResult,
    "pace-v1.json": PaceResult,
    "plan-v11.json": PlanResult,
    "rehearsal-v1.json": Rehearsal,
}


def load(name: str) -> Any:
    path = FOLDER / name
    return FILES[name].from_json(path.read_text(), path)


def entries(value: Any) -> Iterator[tuple[str, Any]]:
    """Every key of a document with its value."""
    if isinstance(value, list):
        for item in value:
            yield from entries(item)
    elif isinstance(value, dict):
        for key, item in value.items():
            yield key, item
            yield from entries(item)


def test_there_is_a_type_for_each_file() -> None:
    assert {path.name for path in FOLDER.iterdir()} == set(FILES)


@pytest.mark.parametrize("name", FILES)
def test_an_older_file_is_read_and_written_in_the_present_terms(name: str) -> None:
    found = load(name)
    document = json.loads(found.to_json())
    older = json.loads((FOLDER / name).read_text())
    assert document["version"] > older["version"]
    for key, value in entries(document):
        assert key not in FORMER_KEYS
        assert not (isinstance(value, str) and (key, value) in FORMER_VALUES)
    assert type(found).from_json(found.to_json(), Path(name)) == found


@pytest.mark.parametrize("name", FILES)
def test_a_newer_file_is_refused(name: str, tmp_path: Path) -> None:
    document = json.loads(load(name).to_json())
    document["version"] += 1
    with pytest.raises(ResultFileError, match=r"newer than this trainfit.*upgrade trainfit"):
        FILES[name].from_json(json.dumps(document), tmp_path / name)


def test_the_values_arrive_under_their_present_names() -> None:
    loader: LoaderResult = load("loader-v2.json")
    assert loader.limit == "transfer" and dict(loader.probe.disturbed) == {"2 workers": 0.6}
    assert loader.faults[0].fix == loader.probe.faults[0].fix == "docker run --shm-size=8g …"
    rehearsal: Rehearsal = load("rehearsal-v1.json")
    assert rehearsal.idle_s["transfer"] == 0.1 and rehearsal.dips[-1].cause == "transfer"
    assert rehearsal.fault is not None and rehearsal.fault.fix
    pace: PaceResult = load("pace-v1.json")
    assert pace.fix_trial is not None and pace.fix_trial.is_fixed
    assert any(block.phase == "fix" for block in pace.blocks)
    plan: PlanResult = load("plan-v11.json")
    assert plan.speed is not None and dict(plan.speed.by_kind_s) == {"matmul": 0.07}
    assert plan.loading is not None and plan.loading.result == loader
    comparison: GpuComparison = load("gpu-comparison-v2.json")
    (gpu,) = comparison.gpus
    assert gpu.at_saturation is not None and gpu.at_saturation.batch_size == 24
    assert load("gpus-v3.json").gpus[0].for_a_job.matmul_balance_size == 610
    assert any(check.fixes for check in load("doctor-v1.json").checks)


@pytest.mark.parametrize("name", sorted(set(FILES) - {"gpu-comparison-v2.json", "gpus-v3.json"}))
def test_an_older_file_is_shown(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["show", str(FOLDER / name)]) == 0
    assert capsys.readouterr().out.strip()


@pytest.mark.parametrize("name", FILES)
def test_an_upgrade_survives_a_damaged_file(name: str, tmp_path: Path) -> None:
    """What is of another type than it should be is refused by the decoder, in one line."""
    document = json.loads((FOLDER / name).read_text())
    for key in document.keys() - {"format", "version"}:
        for value in (None, 3, [None], {"cure": [], "offers": 1}):
            try:
                FILES[name].from_json(json.dumps(document | {key: value}), tmp_path / name)
            except ResultFileError as error:
                assert str(error).count("\n") == 0


def test_upgrades_run_from_the_files_version_to_the_present_one() -> None:
    done: list[int] = []
    steps = {number: lambda document, n=number: done.append(n) for number in (1, 2, 4)}
    for version, wanted in ((1, [1, 2, 4]), (2, [2, 4]), (3, [4]), (5, [])):
        done.clear()
        upgrade({}, version, steps, 5)
        assert done == wanted


def test_a_path_goes_through_lists_and_leaves_out_what_is_not_there() -> None:
    document = {"a": [{"b": {"old": 1}}, {"b": None}, 3, {}], "old": 2, "kind": "x"}
    assert list(objects_at(document, "a.b")) == [{"old": 1}]
    rename_key(document, "a.b", "old", "new")
    rename_key(document, "", "absent", "new")
    rename_value(document, "", "kind", "x", "y")
    assert document == {"a": [{"b": {"new": 1}}, {"b": None}, 3, {}], "old": 2, "kind": "y"}


def test_a_file_of_another_format_is_still_refused(tmp_path: Path) -> None:
    text = (FOLDER / "loader-v2.json").read_text()
    assert documents.format_of(text) == "trainfit-loader"
    with pytest.raises(ResultFileError, match="not 'trainfit-gpu-comparison'"):
        GpuComparison.from_json(text, tmp_path / "x.json")
