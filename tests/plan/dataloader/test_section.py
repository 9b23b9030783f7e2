"""The DataLoader's part of a plan: the launch command, the bottleneck, its words."""

from __future__ import annotations

import dataclasses
import json
import shlex
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from helpers_cli import ROOT, error_line, json_of, trainfit
from helpers_loader import probe, result
from helpers_report import plan_text
from tests.report.plan.test_text import PLAN, with_now
from trainfit.plan.command.parsing import Command, parse_command
from trainfit.plan.dataloader.section import (
    bottleneck,
    is_tuned,
    predicted_step,
    with_loading,
    without_told,
)
from trainfit.plan.launch import with_launch
from trainfit.results.changes import changes_by_hand
from trainfit.results.dataloader import Candidate, LoaderSettings
from trainfit.results.files.errors import TrainfitError
from trainfit.results.findings import Finding, failure_finding
from trainfit.results.loader import CoreAdvice, LoaderResult, VariableAdvice
from trainfit.results.plan import Inference, PlanResult
from trainfit.results.speed import Speed, StepSpeed

pytestmark = pytest.mark.usefixtures("script", "warm_measuring")

INFERENCE = Inference(False, None, None)
LINE = "python train.py --batch_size={batch_size:8} --j={num_workers:1} --pin={pin_memory:0}"


def planned(
    found: LoaderResult | Exception, line: str = LINE, plan: PlanResult = PLAN, **options: Any
) -> PlanResult:
    def tune(command: Command) -> LoaderResult:
        if isinstance(found, Exception):
            raise found
        return found

    command = parse_command(shlex.split(line))
    return with_launch(with_loading(plan, command, tune, **options), command)


def rate(rate: float, alone: float | None = None, **changes: Any) -> LoaderResult:
    """A result whose recommended settings give ``rate`` with the GPU, predicted."""
    best = LoaderSettings(4, pin_memory=True, persistent_workers=True)
    candidate = Candidate(best, rate, 0.0, 4.5, alone_batches_per_s=alone)
    present = Candidate(LoaderSettings(1), rate / 3, 0.5, 1.5)
    return result(candidates=(present, candidate), confirmed=(), **changes)


# -- what it has to keep up with -----------------------------------------------------------------


def step(batch: int, seconds: float) -> StepSpeed:
    return StepSpeed(
        batch, seconds, (0.8 * seconds, 1.35 * seconds), seconds, 0.01, 0.0, "bandwidth"
    )


def test_the_loader_keeps_up_with_the_fast_end_of_the_predicted_step() -> None:
    """At the batch size that it is tuned at, where that is known."""
    known = Speed(step(8, 0.05), (step(16, 0.1), step(24, 0.15)), 24, 0.2, {}, "")
    found = predicted_step(dataclasses.replace(PLAN, speed=known))
    assert found is not None and found.step_s == pytest.approx(0.8 * 0.15)
    assert "120 ms to 202 ms" in found.source and PLAN.gpu in found.source
    assert found.work_s == 0.0  # an older plan does not say
    busy = dataclasses.replace(step(8, 0.05), core_s=0.025)
    found = predicted_step(
        dataclasses.replace(PLAN, speed=dataclasses.replace(known, now=busy, curve=()))
    )
    assert found is not None and found.step_s == pytest.approx(0.04)
    assert found.work_s == pytest.approx(0.02)
    assert predicted_step(dataclasses.replace(PLAN, speed=None)) is None
    # A DataLoader whose batch size the command does not say gives the current one.
    plain = dataclasses.replace(PLAN, speed=known, batch_in_command=False)
    found = predicted_step(plain)
    assert found is not None and found.step_s == pytest.approx(0.8 * 0.05)


# -- the launch command ------------------------------------------------------------------------


def test_the_loader_is_tuned_at_the_recommended_batch_size() -> None:
    seen = []

    def tune(command: Command) -> LoaderResult:
        seen.append(command.target().args)
        assert not command.present
        return result()

    command = parse_command([*shlex.split(LINE), "{{batch_size:8}}", "it's"])
    with_loading(PLAN, command, tune)
    assert seen == [("--batch_size=24", "--j=1", "--pin=0", "{batch_size:8}", "it's")]


def test_the_launch_command_has_the_recommended_settings() -> None:
    found = result(
        variables=(
            VariableAdvice("OMP_NUM_THREADS", "1", "environment", "", "", ""),
            VariableAdvice("cv2", "0", "worker_init_fn", "cv2.setNumThreads(0)", "64 threads", ""),
        ),
        cores=CoreAdvice("taskset -c 0-7", tuple(range(8)), "", ""),
    )
    plan = planned(found, plan=dataclasses.replace(PLAN, variables={"A": "b"}))
    assert plan.launch == (
        "A=b OMP_NUM_THREADS=1 taskset -c 0-7 python train.py --batch_size=24 --j=4 --pin=1"
    )
    assert plan.loading is not None
    assert plan.loading.result == found
    text = plan_text(plan)
    assert "worker_init_fn: cv2.setNumThreads(0)" in text and "64 threads" in text
    assert "taskset -c 0-7" in text


def test_what_the_command_cannot_say_is_a_line_to_change() -> None:
    plan = planned(result(), plan=dataclasses.replace(PLAN, loader_at="train.py:12"))
    assert changes_by_hand(plan.launch_parts) == [
        ("train.py:12", "DataLoader(…, persistent_workers=True)")
    ]
    assert "- change train.py:12: DataLoader(…, persistent_workers=True)" in plan_text(plan)
    notes = "\n".join(plan.notes)
    assert "tuned at batch size 8, not at 24: the DataLoader (train.py:12" in notes
    assert "num_workers" not in notes


def test_a_batch_that_the_data_set_does_not_fill_is_not_tuned_at() -> None:
    seen = []

    def tune(command: Command) -> LoaderResult:
        seen.append(command.target().args[0])
        return result()

    small = dataclasses.replace(PLAN, samples=20)
    command = parse_command(shlex.split(LINE))
    plan = with_launch(with_loading(small, command, tune), command)
    assert seen == ["--batch_size=8"]
    assert "--batch_size=24" in plan.launch
    assert "tuned at batch size 8, not at 24: the data set has only 20 samples" in str(plan.notes)


def test_without_a_placeholder_for_the_batch_size() -> None:
    plan = planned(result(), "python train.py --j={num_workers:1}")
    assert plan.launch == "python train.py --j=4"
    assert "not at 24: write {batch_size:N} into the command" in str(plan.notes)


def test_a_placeholder_that_does_not_reach_the_loader_is_noted() -> None:
    notes = "\n".join(planned(result(), LINE.replace(":1}", ":6}")).notes)
    assert "the command says num_workers 6, the DataLoader (train.py:12" in notes
    assert "has 1: put {num_workers} into the option that sets it" in notes


def test_no_workers_and_a_prefetch_factor() -> None:
    found = result(recommended=LoaderSettings(0))
    plan = planned(found, "python train.py --j={num_workers:1} --pf={prefetch_factor:2}")
    assert "leave them out of the DataLoader" in "\n".join(plan.notes)
    assert plan.launch.endswith("--j=0 --pf=2")


def test_workers_that_the_command_cannot_give_change_nothing_of_theirs() -> None:
    """PyTorch refuses persistent_workers with the script's own num_workers=0."""
    found = result(present=LoaderSettings(0))
    command = "python train.py --pw={persistent_workers:no} --pf={prefetch_factor:None}"
    plan = planned(found, command)
    assert plan.launch.endswith("--pw=no --pf=None")
    assert "num_workers=4" in str(changes_by_hand(plan.launch_parts))


def test_when_the_loader_is_tuned() -> None:
    """Where training takes batches from it; where it was asked for, whatever the script does."""
    plain = parse_command(["python", "train.py", "{batch_size:2}"])
    trains = dataclasses.replace(PLAN, loader_at="")
    assert is_tuned(trains, plain, asked=False)
    assert not is_tuned(PLAN, plain, asked=False)
    assert not is_tuned(dataclasses.replace(trains, inference=INFERENCE), plain, asked=False)
    assert not is_tuned(with_now(fits=False, recommended_batch=None), plain, asked=False)
    assert is_tuned(PLAN, plain, asked=True)
    for name in ("num_workers:2", "prefetch_factor:2", "pin_memory:no", "persistent_workers:1"):
        command = parse_command(["python", "train.py", f"{{{name}}}"])
        assert is_tuned(PLAN, command, asked=False)


# -- the bottleneck ----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("found", "limit", "factor"),
    [
        (rate(25.0, 77.5, step_s=0.04), "gpu", 3.1),
        (rate(24.5, 24.6, step_s=0.04), "gpu", 1.0),  # within what is chosen and measured
        (rate(25.0, None, step_s=0.04), "gpu", None),
        (rate(12.5, 12.5, step_s=0.04), "loader", 2.0),
        (rate(12.5, 12.5, step_s=0.0), "unknown", None),
        (result(candidates=(), confirmed=()), "unknown", None),
        (result(), "gpu", None),  # 24.1 of 25 measured
    ],
)
def test_the_bottleneck(found: LoaderResult, limit: str, factor: float | None) -> None:
    assert bottleneck(found) == (limit, pytest.approx(factor) if factor is not None else None)


@given(st.floats(0.01, 1e4), st.floats(1e-4, 10.0), st.floats(1.0, 50.0))
def test_the_factor_is_never_below_one(most: float, step_s: float, more: float) -> None:
    """The rate with the GPU is never above either's own."""
    with_gpu = min(most, 1 / step_s)
    limit, factor = bottleneck(rate(with_gpu, most * more, step_s=step_s))
    assert limit in ("gpu", "loader")
    assert factor is not None
    assert factor >= 1


# -- words -------------------------------------------------------------------------------------


def words(found: LoaderResult | Exception, **options: Any) -> str:
    return " ".join(plan_text(planned(found, **options)).split())


def test_the_loader_is_the_limit_of_a_step_that_is_known() -> None:
    text = words(rate(12.5, step_s=0.04), step_is_bound=False)
    assert "the DataLoader is the limit by 2.00×" in text
    assert "the GPU 25.0 batches/s (given)" in text


def test_the_gpu_is_the_limit() -> None:
    text = words(rate(25.0, 77.5, step_s=0.04, verdict="nothing_to_gain"))
    limit = "the GPU is the limit even at the lower bound of its step time"
    assert f"{limit}: the DataLoader could supply 3.10× as" in text
    text = words(rate(25.0, 77.5, step_s=0.04), step_is_bound=False)
    assert "the GPU is the limit: the DataLoader could supply 3.10× as much" in text
    assert "the GPU is the limit: the DataLoader keeps up" in words(
        rate(25.0, 25.1, step_s=0.04), step_is_bound=False
    )


def test_measured_beside_predicted() -> None:
    assert "recommended 4 2 yes yes yes 24.8 24.1" in words(result())


def test_without_a_step_time_nothing_is_claimed() -> None:
    text = words(rate(99.0, step_s=0.0, step_source="as fast as the loader can"))
    assert "step time unknown (as fast as the loader can)" in text
    assert "cannot tell which part is the limit: no step time is known; give --step-time" in text


def test_faults_are_named_with_their_cure() -> None:
    fault = failure_finding(
        "shm_full", "bus error on a full /dev/shm", "64 MB", "docker run --shm-size=8g"
    )
    said = words(result(faults=(fault,)))
    assert "bus error on a full /dev/shm" in said and "docker run --shm-size=8g" in said


# -- what goes wrong ---------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("error", "says"),
    [
        (TrainfitError("its loader raised:\nKeyError; see its traceback"), "raised: KeyError; see"),
        (RuntimeError("out of it"), "RuntimeError: out of it; run `trainfit loader` to see where"),
    ],
)
def test_a_plan_outlives_its_loader(error: Exception, says: str) -> None:
    plan = planned(error)
    assert plan.loading is not None
    assert plan.loading.result is None
    changed = {"loading": None, "launch": PLAN.launch, "launch_parts": ()}
    assert dataclasses.replace(plan, **changed) == PLAN
    part = next(each for each in plan.launch_parts if each.name == "num_workers")
    assert part.status == "cannot tell" and says.partition(";")[0] in part.reason
    text = words(error)
    assert "not tuned " in text
    assert says in text
    assert "trainfit loader --gpu 'RTX 4090'" in text


def test_a_job_that_does_not_fit_is_not_measured() -> None:
    plan = planned(
        AssertionError("not to be called"), plan=with_now(fits=False, recommended_batch=None)
    )
    assert plan.loading is not None
    assert "does not fit" in plan.loading.failure


def test_an_interrupt_is_not_caught() -> None:
    def tune(command: Command) -> LoaderResult:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        with_loading(PLAN, parse_command(["python", "train.py"]), tune)


# -- the command line --------------------------------------------------------------------------

SCRIPT = """
import sys
import torch
from torch.utils.data import DataLoader, Dataset

class Pictures(Dataset):
    def __len__(self):
        return 20000
    def __getitem__(self, index):
        return torch.ones(3, 8, 8)

if __name__ == "__main__":
    batch, workers, pin = int(sys.argv[1]), int(sys.argv[2]), sys.argv[3] == "yes"
    loader = DataLoader(Pictures(), batch, num_workers=workers, pin_memory=pin)
    model = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(192, 8)).cuda()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    for _ in range(4):
        for x in loader:
            model(x.cuda()).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
"""
WORDS = ("python", "fit.py", "{batch_size:4}", "{num_workers:0}", "{pin_memory:no}")

Plan = Callable[..., dict[str, Any]]


@pytest.fixture
def real_plan(tmp_path: Path) -> Plan:
    """The command line up to the tuner, in whose place there is a stand-in."""
    (tmp_path / "fit.py").write_text(SCRIPT)
    stub = f"{ROOT / 'src'}:{ROOT / 'tests' / 'tuning_stub'}:{ROOT / 'tests'}"

    def run(*options: str, tuner: str = "facts") -> dict[str, Any]:
        done = trainfit(
            *("plan", "--gpu", "RTX 4090", "--json", "--no-remedies", "--steps=2", *options, "--"),
            *WORDS,
            cwd=tmp_path,
            PYTHONPATH=stub,
            STUB_TUNER=tuner,
        )
        assert done.returncode == 0, done.stderr
        return json_of(done)

    return run


@pytest.mark.slow
def test_plan_tunes_the_loader_of_a_script(real_plan: Plan) -> None:
    plan = real_plan("--output=plan.json")
    loading = plan["loading"]
    assert loading["failure"] == ""
    batch = plan["now"]["recommended_batch"]
    assert shlex.split(plan["launch"])[-5:] == ["python", "fit.py", str(batch), "4", "yes"]
    assert loading["step_is_bound"]
    assert loading["result"]["step_s"] > 0
    source = loading["result"]["step_source"]
    assert "lower bound for RTX 4090 (90% interval: " in source
    seen = json.loads(loading["result"]["notes"][0])
    # Tuned at what the GPU alone would like; the stub's DataLoader is the limit at any batch size.
    assert (int(seen["argv"][1]) > 4, seen["argv"][2:]) == (True, ["0", "no"])
    assert batch == 4 and "gains nothing" in plan["now"]["limits"]["reason"]
    # The file has the recordings besides, for `trainfit gpus --for`.
    saved = json.loads(Path("plan.json").read_text())
    assert saved["recordings"] and saved | {"recordings": []} == plan
    plan = real_plan("--step-time=500ms", "--probe-time=3")
    assert (plan["loading"]["step_is_bound"], plan["loading"]["bottleneck"]) == (False, "gpu")


@pytest.mark.slow
def test_plan_goes_on_without_its_loader(real_plan: Plan) -> None:
    plan = real_plan(tuner="fail")
    assert plan["loading"]["result"] is None
    assert "the stub fails" in plan["loading"]["failure"]
    assert plan["now"]["fits"]


@pytest.mark.parametrize("option", ["--step-time=1", "--probe-time=9"])
def test_options_of_a_loader_that_is_not_tuned(option: str, tmp_path: Path) -> None:
    words = (option, "--no-loader", "--", "python", "train.py")
    done = trainfit("plan", "--gpu", "RTX 4090", *words, cwd=tmp_path)
    assert done.returncode == 2
    assert "applies to tuning the DataLoader: remove --no-loader" in error_line(done)


OPTIONS = """
import argparse
import torch
from torch.utils.data import DataLoader, TensorDataset

parser = argparse.ArgumentParser()
parser.add_argument("--batch-size", type=int, default=4)
parser.add_argument("--num-workers", type=int, default=0)
parser.add_argument("--pin-memory", action="store_true")
options = parser.parse_args()
data = TensorDataset(torch.ones(6400, 192))
loader = DataLoader(
    data, options.batch_size, num_workers=options.num_workers, {pinned}
)
model = torch.nn.Linear(192, 8).cuda()
optimizer = torch.optim.SGD(model.parameters(), 0.1)
for _ in range(4):
    for (x,) in loader:
        model(x.cuda()).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
"""


@pytest.mark.slow
@pytest.mark.parametrize("follows", [True, pytest.param(False, marks=pytest.mark.slow)])
@pytest.mark.usefixtures("brief")
def test_options_that_nobody_wrote_are_filled_if_they_do_what_they_say(
    follows: bool, tmp_path: Path
) -> None:
    pinned = "pin_memory=options.pin_memory" if follows else "pin_memory=False"
    (tmp_path / "train.py").write_text(OPTIONS.replace("{pinned}", pinned))
    stub = f"{ROOT / 'src'}:{ROOT / 'tests' / 'tuning_stub'}:{ROOT / 'tests'}"
    words = ("--loader", "--no-remedies", "--steps=2", "--json", "--", "python", "train.py")
    done = trainfit(
        *("plan", "--gpu", "RTX 4090", *words), cwd=tmp_path, PYTHONPATH=stub, STUB_TUNER="facts"
    )
    assert done.returncode == 0, done.stderr
    plan = json_of(done)
    assert "--num-workers=4" in plan["launch"]
    assert ("--pin-memory" in plan["launch"]) == follows
    parts = {part["name"]: part for part in plan["launch_parts"]}
    assert parts["pin_memory"]["status"] == ("set" if follows else "by hand")
    assert parts["persistent_workers"]["call"] == "DataLoader"
    # The stub's DataLoader is the limit: a larger batch would gain nothing.
    assert parts["batch_size"]["status"] == "kept" and "--batch-size" not in plan["launch"]
    assert "gains nothing" in parts["batch_size"]["reason"]


def test_what_a_plan_tells_with_its_line_is_told_once() -> None:
    fault, other = (
        Finding(kind, "critical", kind) for kind in ("data_changed", "generator_copied")
    )
    found = result(faults=(fault, other), probe=probe(faults=(fault,)))
    told = without_told(found, (Finding("samples_changed", "critical", "a line"),))
    assert told.faults == (other,) and told.probe.faults == ()
    assert without_told(found, ()) == found
