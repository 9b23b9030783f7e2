"""The launch line of ``trainfit loader``: by the script's own options, where a run proves them."""

from __future__ import annotations

import dataclasses
import shlex
from collections.abc import Mapping
from typing import Any

import pytest

from helpers_loader import result
from helpers_report import whole
from trainfit.hardware import find_gpu
from trainfit.plan.command.parsing import parse_command
from trainfit.plan.dataloader import measurement
from trainfit.plan.dataloader.measurement import with_own_options
from trainfit.plan.runs.failures import ScriptError
from trainfit.plan.runs.options import CommandOptions
from trainfit.report.sections.loader import loader_line, loader_subject
from trainfit.results.dataloader import LoaderSettings
from trainfit.results.loader import LoaderResult
from trainfit.results.runs.script import ScriptOption
from trainfit.results.runs.trace import LoaderInfo, TraceOutcome

pytestmark = pytest.mark.usefixtures("script")

#: What ``helpers_loader.result`` recommends, of which the script's options say two.
WORKERS = ScriptOption(("--num-workers",), "num_workers", "1", False, default="1")
PIN = ScriptOption(("--pin",), "pin_memory", "False", False, default="False", switch=True)
BATCH = ScriptOption(("--batch-size",), "batch_size", "8", False, default="8")


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[Mapping[str, str]]:
    """The values that a run was asked to show; it shows the number of workers alone."""
    calls: list[Mapping[str, str]] = []

    def prove(options: CommandOptions, values: Mapping[str, str], *_: Any) -> CommandOptions:
        calls.append(values)
        return options.proven(["num_workers"])

    monkeypatch.setattr(measurement, "proven_settings", prove)
    return calls


def launched(line: str, *options: ScriptOption, **changes: Any) -> LoaderResult:
    found = result(**changes)
    info = LoaderInfo(0, 8, 100, 1, found.present, "Pictures", "train.py:12")
    trace = TraceOutcome("finished", loader=info, options=options)
    gpu = find_gpu("T4")
    told: list[str] = []
    command = parse_command(shlex.split(line), several=True)
    return with_own_options(found, command, trace, gpu, 60.0, told.append)


def test_a_proven_option_is_in_the_launch_line(asked: list[Mapping[str, str]]) -> None:
    found = launched("python train.py", WORKERS, PIN, BATCH)
    assert found.launch == "python train.py --num-workers=4"
    assert found.launch_sets == ("num_workers",)
    assert asked == [{"num_workers": "4", "pin_memory": asked[0]["pin_memory"]}]
    text = whole(loader_subject(found))
    assert "python train.py --num-workers=4" in text
    line = "DataLoader(…, pin_memory=True, persistent_workers=True)"
    assert text.index("--num-workers=4") < text.index(line)


def test_an_option_without_effect_is_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(measurement, "proven_settings", lambda options, *_: options)
    found = launched("python train.py", WORKERS)
    assert (found.launch, found.launch_sets) == ("", ())
    assert "DataLoader(…, num_workers=4, " in whole(loader_subject(found))


def test_nothing_is_lost_where_the_run_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: Any) -> CommandOptions:
        raise ScriptError("train.py: it fails with 4 workers")

    monkeypatch.setattr(measurement, "proven_settings", fail)
    assert launched("python train.py", WORKERS) == result()


def test_placeholders_of_the_command_are_filled(asked: list[Mapping[str, str]]) -> None:
    found = launched("python train.py --j={num_workers:1}")
    assert found.launch == "python train.py --j=4" and not asked


@pytest.mark.parametrize("changes", [{"verdict": "cannot_tell"}, {"recommended": None}])
def test_what_stays_as_it_is_needs_no_run(
    changes: dict[str, Any], asked: list[Mapping[str, str]]
) -> None:
    if "recommended" in changes:
        changes = {"recommended": result().present, "verdict": "keep"}
    assert launched("python train.py", WORKERS, **changes) == result(**changes)
    assert not asked


def test_several_processes_are_not_simulated_for_it(asked: list[Mapping[str, str]]) -> None:
    found = launched("torchrun --nproc_per_node=2 train.py", WORKERS)
    assert not asked and not found.launch_sets


def test_what_is_left_to_write() -> None:
    best, now = result().recommended, result().present
    rest = ("prefetch_factor", "pin_memory", "persistent_workers")
    assert loader_line(best, now, ("num_workers", *rest)) == ""
    none = LoaderSettings(0)
    assert loader_line(none, now, ("num_workers",)) == "DataLoader(…, prefetch_factor=None)"
    spawned = dataclasses.replace(best, start_method="spawn")
    assert 'multiprocessing_context="spawn"' in loader_line(spawned, now, ("num_workers", *rest))
