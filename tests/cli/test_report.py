"""`trainfit report`: any results as HTML, Markdown, JSON or SVG; where it writes, and where not."""

from __future__ import annotations

import io
import json
import shutil
import sys
from pathlib import Path
from unittest import mock

import pytest

from helpers_cli import ROOT, error_line, trainfit
from helpers_page import FILES, RESULTS
from trainfit.cli import results_options as options
from trainfit.cli.main import main
from trainfit.cli.verbs import report
from trainfit.cli.verbs.report import FORMS, Form
from trainfit.results.files.errors import ResultFileError
from trainfit.results.kinds import parted

WATCHED = ROOT / "tests" / "fixtures" / "watched_runs" / "starved"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    for name in ("plan-v1.json", "loader-v1.json", "watch-v1.json", "pace-v1.json"):
        shutil.copy(RESULTS / name, tmp_path / name.partition("-")[0].__add__(".json"))
    shutil.copy(RESULTS / "recording-v1.trainfit", tmp_path / "run.trainfit")
    return tmp_path


def test_several_results_are_one_page(folder: Path) -> None:
    words = ("report", "pace.json", "loader.json", "watch.json", "plan.json", "-o", "all.html")
    done = trainfit(*words, cwd=folder)
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("all.html: report, opens in a browser, ")
    text = (folder / "all.html").read_text()
    assert text.startswith("<!doctype html>")
    # The plan is first, whatever the order of the words.
    places = [text.index(f'aria-label="{kind}"') for kind in
              ("Plan", "DataLoader", "Watched run", "Paced calls")]  # fmt: skip
    assert places == sorted(places)
    for name in ("plan.json", "loader.json", "watch.json", "pace.json"):
        assert f"<code>{name}</code>" in text


@pytest.mark.parametrize("name", FILES)
def test_every_kind_of_result_is_a_page(name: str, tmp_path: Path) -> None:
    done = trainfit("report", RESULTS / name, "-o", "page.md", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    text = (tmp_path / "page.md").read_text()
    assert text.startswith("# ") and "\n## " in text


def test_the_folder_of_a_watched_run_is_a_result(tmp_path: Path) -> None:
    done = trainfit("report", WATCHED, "-o", "page.md", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert "The DataLoader is the limit" in (tmp_path / "page.md").read_text()


def test_without_a_name_the_page_lies_here_under_the_results(folder: Path) -> None:
    assert trainfit("report", "gone/../loader.json", cwd=folder).returncode == 2
    assert trainfit("report", "loader.json", cwd=folder).returncode == 0
    assert (folder / "loader.html").is_file()
    # A page of ours is replaced; a file of the user's is not.
    assert trainfit("report", "loader.json", cwd=folder).returncode == 0
    (folder / "loader.html").write_text("mine")
    done = trainfit("report", "loader.json", cwd=folder)
    assert done.returncode == 2
    assert "'loader.html' exists and is not a result of trainfit" in error_line(done)
    assert (folder / "loader.html").read_text() == "mine"


def test_standard_output_is_markdown_unless_asked_otherwise(folder: Path) -> None:
    done = trainfit("report", "loader.json", "-o", "-", cwd=folder)
    assert done.returncode == 0 and done.stdout.startswith("# ")
    done = trainfit("report", "loader.json", "-o", "-", "--format", "svg", cwd=folder)
    assert done.stdout.startswith("<svg")
    assert not (folder / "-").exists()


def test_one_json_document_of_all_results_is_a_result_too(folder: Path) -> None:
    done = trainfit("report", "plan.json", "loader.json", "-o", "all.json", cwd=folder)
    assert done.returncode == 0, done.stderr
    document = json.loads((folder / "all.json").read_text())
    assert document["format"] == "trainfit-report" and document["version"] == 1
    assert [each["file"] for each in document["results"]] == ["plan.json", "loader.json"]
    loaded = document["results"][1]["result"]
    assert loaded["probe"].pop("core_wait_s") is None  # the file is older than that field
    assert loaded.pop("launch_sets") == []  # nor has it this one
    assert loaded == json.loads((folder / "loader.json").read_text())
    again = trainfit("report", "all.json", "-o", "-", cwd=folder)
    both = trainfit("report", "plan.json", "loader.json", "-o", "-", cwd=folder)
    assert again.stdout == both.stdout


@pytest.mark.parametrize(
    ("source", "name"),
    [("plan.json", "addmm"), ("run.trainfit", "addmm"), (str(WATCHED), "waiting for batches")],
)
def test_a_trace_is_of_a_step_or_of_a_watched_run(folder: Path, source: str, name: str) -> None:
    done = trainfit("report", source, "-o", "out.trace.json", cwd=folder)
    assert done.returncode == 0, done.stderr
    events = json.loads((folder / "out.trace.json").read_text())["traceEvents"]
    assert any(name in event["name"] for event in events) or len(events) > 50


def test_a_joined_document_of_a_later_version_or_damaged_is_refused(folder: Path) -> None:
    later = folder / "later.json"
    later.write_text(
        '{"format": "trainfit-report", "version": 2, "written_by": "9", "results": []}'
    )
    done = trainfit("report", "later.json", cwd=folder)
    assert "upgrade trainfit" in error_line(done)
    with pytest.raises(ResultFileError, match="damaged"):
        parted('{"version": 1, "written_by": "0.1.0", "results": [1]}', later)


def test_the_picture_is_the_first_chart(folder: Path) -> None:
    done = trainfit("report", "plan.json", "-o", "plan.svg", cwd=folder)
    assert done.returncode == 0, done.stderr
    assert "allocations and frees" in (folder / "plan.svg").read_text()
    shutil.copy(RESULTS / "profile-v1.json", folder / "profile.json")
    done = trainfit("report", "profile.json", "-o", "profile.svg", cwd=folder)
    assert error_line(done) == "profile.json has no chart; write .html or .md"


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("missing.json",), "there is no such file"),
        (
            ("loader.json", "-o", "page.pdf"),
            "its name shows no known format; end it in .html, .md, .json",
        ),
        (("loader.json", "-o", "loader.json"), "is one of the inputs; name another"),
        (("loader.json", "-o", "nowhere/a.html"), "its folder does not exist"),
        (("loader.json", "-o", "l.trace.json"), "has no step over time; give a plan"),
        (("plan.json", "loader.json", "-o", "p.trace.json"), "a trace is of one result"),
        (("watch.json", "-o", "w.trace.json"), "is not there; give its path"),
        (("run.trainfit", "-o", "run.json"), "a recording has no JSON document"),
    ],
)
def test_bad_input_is_one_line(folder: Path, words: tuple[str, ...], message: str) -> None:
    done = trainfit("report", *words, cwd=folder)
    assert done.returncode == 2
    assert message in error_line(done)


def test_a_missing_package_is_one_line(folder: Path) -> None:
    with mock.patch.dict(sys.modules, {"jinja2": None}):
        done = trainfit("report", "loader.json", cwd=folder)
    assert done.returncode == 2
    assert error_line(done).endswith("install it: pip install 'trainfit[report]'")
    assert not (folder / "loader.html").exists()


def test_a_binary_form_never_goes_to_a_terminal(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """No form is binary yet; one that will be is refused on a terminal and written to a pipe."""
    forms = {**FORMS, ".bin": Form(lambda sources: b"\x00\x01", "bytes", binary=True)}
    monkeypatch.setattr(report, "FORMS", forms)
    monkeypatch.setattr(options, "ENDS", (*options.ENDS, ".bin"))
    monkeypatch.chdir(folder)

    class Terminal(io.StringIO):
        def isatty(self) -> bool:
            return True

    monkeypatch.setattr(sys, "stdout", Terminal())
    assert main(["report", "loader.json", "-o", "-", "--format", "bin"]) == 2
    assert "bytes is binary: give a file" in capsys.readouterr().err
    monkeypatch.undo()
    monkeypatch.setattr(report, "FORMS", forms)
    monkeypatch.chdir(folder)
    assert main(["report", "loader.json", "-o", "x.bin"]) == 0
    assert Path("x.bin").read_bytes() == b"\x00\x01"


def test_commands_name_the_page_of_their_result(tmp_path: Path) -> None:
    done = trainfit(
        *("plan", "--gpu", "T4", "--steps", "2", "--output", "my plan.json"),
        *("--", "python", ROOT / "tests" / "training_scripts" / "tiny.py"),
        cwd=tmp_path,
    )
    assert done.returncode == 0, done.stderr
    assert "page: trainfit report 'my plan.json'" in done.stderr.splitlines()
    assert len(done.stdout.splitlines()) <= 25
    done = trainfit("watch", "--read", WATCHED, cwd=tmp_path)
    assert f"page: trainfit report {WATCHED}" in done.stderr.splitlines()
    done = trainfit("watch", "--read", WATCHED, "--json", cwd=tmp_path)
    assert "page:" not in done.stderr
