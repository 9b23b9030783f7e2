"""Every verb's default screen: at most 25 lines of the screen's width, and --explain has the rest.

What is shown are results of every kind, and recorded machines.
"""

from __future__ import annotations

import functools
import io
import re
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any
from unittest import mock

import pytest

from helpers_page import FILES, RESULTS
from trainfit.cli import main as command_line
from trainfit.cli.main import main
from trainfit.cli.verbs import gpus
from trainfit.hardware import GpuSpec
from trainfit.plan.gpu_job import Job
from trainfit.plan.gpus import compare_gpus
from trainfit.results.speed import GpuComparison

MACHINES = sorted((Path(__file__).parents[1] / "machines").glob("*.json"))
RECORDING = str(RESULTS / "recording-v1.trainfit")
PLAN = str(RESULTS / "plan-v1.json")
SCRIPT = str(Path(__file__).parents[1] / "training_scripts" / "tiny.py")
#: Results that have no text, but JSON.
_JSON = ("gpu-truth", "report", "watched-run")
SHOWN = tuple(
    ("show", str(path))
    for path in sorted(RESULTS.iterdir())
    if path.suffix in (".json", ".trainfit") and not path.name.startswith(_JSON)
)
SCREENS: tuple[tuple[str, ...], ...] = (
    *SHOWN,
    *(("doctor", "--machine", str(path)) for path in MACHINES),
    *(("doctor", "--cpu", "--machine", str(path)) for path in MACHINES),
    ("doctor", "--machine", str(MACHINES[0]), "--script", SCRIPT),
    ("memory", RECORDING),
    ("memory", RECORDING, "--by-hand"),
    ("gpus",),
    ("gpus", "RTX 4090", "T4", "GTX 1650", "custom:24GiB"),
    ("gpus", "--for", PLAN),
    ("gpus", "--for", PLAN, "RTX 4090", "custom:24GiB"),
    *(
        ("batch", "explain", "--noise-scale", "200:150:280", "--batch-size", "64", "--to", *more)
        for more in (("16",), ("4096", "--optimizer", "adam", "--lr", "1e-4", "--samples", "9999"))
    ),
)
#: Commands to copy are never broken into lines, and a path or a name cannot be.
WHOLE = re.compile(
    r"^ *(fix|undo|to try|now|write:|try the fix:|next:|tried:|next: trainfit|trainfit|python) "
    r"|^ *(Recording: )?\S+$"
    r"|^ *DataLoader\(|.*; next: trainfit |^Recording: |^ *(\| |.*:\d+:\d+ )|.*\S{42}"
)


@pytest.fixture(scope="module", autouse=True)
def each_comparison_is_made_once() -> Iterator[None]:
    """The same job on the same GPUs, laid out for another screen."""

    @functools.cache
    def compared(keys: tuple[str, ...], **options: bool) -> GpuComparison:
        return compare_gpus(*asked[keys], **options)

    def once(job: Job, found: list[GpuSpec], *rest: Any, **options: bool) -> GpuComparison:
        assert rest == (None, None, None)
        keys = tuple(gpu.key for gpu in found)
        asked[keys] = job, found
        return compared(keys, **options)

    asked: dict[tuple[str, ...], tuple[Job, list[GpuSpec]]] = {}
    with mock.patch.object(gpus, "compare_gpus", once):
        yield


def _ids(words: Sequence[str]) -> str:
    return " ".join(words)[-40:]


def shown(
    words: Sequence[str],
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    width: int = 80,
) -> str:
    """What is printed on a screen of so many columns."""
    monkeypatch.setattr(command_line, "_screen_columns", lambda: width)
    capsys.readouterr()
    main(words)
    return capsys.readouterr().out


@pytest.mark.parametrize("width", [60, 80, pytest.param(120, marks=pytest.mark.slow)])
@pytest.mark.parametrize("words", SCREENS, ids=_ids)
def test_a_default_screen_has_25_lines_that_fit(
    words: Sequence[str],
    width: int,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    text = shown(words, capsys, monkeypatch, width)
    lines = text.rstrip("\n").split("\n")
    assert text and (len(lines) <= 25 or width < 80), text
    assert not [line for line in lines if len(line) > width and not WHOLE.match(line)]
    assert lines == [line.rstrip() for line in lines]
    assert all(lines) or "\n\n\n" not in text
    assert not lines[-1].endswith("…")  # where to read more


_NUMBER = re.compile(r"\d+(?:[.,]\d+)*")


@pytest.mark.parametrize("words", SHOWN, ids=_ids)
def test_explain_says_all_that_the_screen_does(
    words: Sequence[str], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    if "plan-" in words[1]:
        pytest.skip("the words of a plan's screen are its own: tests/report/plan")
    screen = shown(words, capsys, monkeypatch)
    whole = shown([*words, "--explain"], capsys, monkeypatch)
    *said, last = screen.rstrip().split("\n")
    figures = set(_NUMBER.findall("\n".join(said if "--explain" in last else [*said, last])))
    assert figures and figures <= set(_NUMBER.findall(whole))
    assert len(whole.split("\n")) >= len(said)


@pytest.mark.parametrize("name", FILES)
def test_the_answer_comes_first(
    name: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    first = shown(["show", str(RESULTS / name)], capsys, monkeypatch).split("\n")[0]
    answers = {
        "plan": "Fits: ",
        "gpu-comparison": "Fastest (1 other within 1%): RTX 4090: ",
        "recording": "Fits: ",
        "loader": "Cannot tell which settings are best",
        "rehearsal": "The DataLoader costs 62% of the GPU's time",
        "watch": "Waiting for batches takes 67% of the time",
        "watch-comparison": "No difference of the step time found",
        "watch-verification": "Proven: num_workers=20 is faster",
        "pace": "",
        "batch": "64 → 16 samples a step",
        "noise-scale": "Noise scale 62",
        "doctor": "0 bad, 2 unknown",
        "profile": "Tesla T4",
        "gpus": "1 GPU",
    }
    assert first and first.startswith(answers[name.rpartition("-v")[0]])


def test_the_line_to_write_is_below_the_verdict_of_a_loader() -> None:
    import dataclasses

    from helpers_page import entry
    from helpers_report import screen
    from trainfit.report.sections.loader import loader_subject
    from trainfit.results.loader import LoaderResult

    result = entry("loader-v1.json").result
    assert isinstance(result, LoaderResult)
    settings = dataclasses.replace(result.present, num_workers=7)
    changed = dataclasses.replace(result, verdict="change", recommended=settings, reason="")
    lines = screen(loader_subject(changed)).splitlines()
    at = next(number for number, line in enumerate(lines) if "num_workers=7" in line)
    assert lines[0].startswith("Change the settings") and at <= 8


def _bad_machine() -> str:
    return next(str(path) for path in MACHINES if path.stem == "no-driver")


@pytest.mark.parametrize("extra", [(), ("--explain",)])
def test_what_is_bad_is_red_and_no_color_leaves_nothing(
    extra: Sequence[str], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    words = ["doctor", "--machine", _bad_machine(), *extra]
    monkeypatch.setenv("TERM", "xterm-256color")
    monkeypatch.delenv("NO_COLOR", raising=False)
    monkeypatch.setenv("FORCE_COLOR", "1")
    coloured = shown(words, capsys, monkeypatch)
    assert re.search("\x1b\\[1;31m  - gpu: ", coloured)
    monkeypatch.setenv("NO_COLOR", "1")
    plain = shown(words, capsys, monkeypatch)
    assert "\x1b" not in plain and "- gpu: " in plain
    monkeypatch.delenv("NO_COLOR")
    monkeypatch.setenv("TERM", "dumb")
    assert "\x1b" not in shown(words, capsys, monkeypatch)
    monkeypatch.delenv("FORCE_COLOR")
    assert shown(words, capsys, monkeypatch).split("\n")[1:] == plain.split("\n")[1:]


@pytest.mark.parametrize("words", SCREENS, ids=_ids)
def test_no_character_is_written_as_a_code_in_ascii(
    words: Sequence[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    data = io.BytesIO()
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(data, encoding="ascii"))
    main(words)
    sys.stdout.flush()
    assert not re.search(r"\\(x|u|U)[0-9a-f]", data.getvalue().decode("ascii"))
