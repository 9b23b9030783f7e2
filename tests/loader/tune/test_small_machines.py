"""A part of a core, one core, odd thread variables, data that is not there."""

from __future__ import annotations

import functools
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import helpers_machines
from helpers_cases import some_of
from helpers_cli import error_line, trainfit
from helpers_loader import machine, probe
from tests.loader.tune.test_machine import four_cpus_under_a_quota
from trainfit.hardware.machine.limits import is_one_thread_to_mkl, misread_lines
from trainfit.hardware.machine.recorded import RecordedSystem
from trainfit.hardware.machine.survey import survey
from trainfit.loader.bottleneck import limit
from trainfit.loader.confirmation import nothing_ran
from trainfit.loader.measure.events import Cores
from trainfit.loader.measure.fitting import Fitted
from trainfit.loader.measure.machine_limits import loader_machine, model_cores
from trainfit.loader.measure.model import BatchCost, Transfer
from trainfit.loader.search import Goal, infeasible, oversubscribed, search
from trainfit.loader.threads import variables
from trainfit.plan.command.parsing import parse_command
from trainfit.plan.dataloader.measurement import notes_of
from trainfit.plan.dataloader.process import CoreWrapper, Loaded, core_wrapper
from trainfit.plan.runs.failures import remedy, what_happened
from trainfit.results.dataloader import LoaderMachine, LoaderSettings
from trainfit.results.findings import failure_finding
from trainfit.results.runs.measurement import Consumer
from trainfit.results.runs.spec import LoaderSpec, RunSpec
from trainfit.results.runs.trace import TraceOutcome

SETTINGS = st.builds(LoaderSettings, num_workers=st.integers(0, 8))


def model(cores: Cores) -> Fitted:
    costs = (BatchCost(0.0, 0.01),)
    return Fitted(costs, costs, Transfer(), Transfer(), cores, 0.03)


def rates(found: LoaderMachine) -> list[float]:
    fitted = model(model_cores(found, 0.0))
    return [fitted.predict(LoaderSettings(n), Consumer(0.0)).batches_per_s for n in (1, 2, 4)]


def test_a_quota_of_one_and_a_half_cores() -> None:
    found = loader_machine(survey(RecordedSystem(four_cpus_under_a_quota())))
    one, two, four = rates(found)
    assert (one, two) == (pytest.approx(100, rel=0.03), pytest.approx(150, rel=0.03))
    assert four < two  # on second threads, under the same quota


def test_one_core_is_one_worker() -> None:
    document = helpers_machines.document("container-quota")
    document["calls"]["affinity"] = "1"
    found = loader_machine(survey(RecordedSystem(document)))
    assert (found.usable_cores, found.affinity, found.core_speeds) == (1.0, (1,), (1.0,))
    assert rates(found) == [pytest.approx(100, rel=0.03)] * 3


@pytest.mark.parametrize(("cores", "most"), [(Cores((1.0,)), 1), (Cores((1.0, 1.0), quota=1.5), 2)])
@pytest.mark.parametrize("present", some_of([0, 1, 2, 8], 2))
@pytest.mark.parametrize("step_s", [0.0, 0.02])
def test_few_workers_are_recommended_on_few_cores(
    cores: Cores, most: int, present: int, step_s: float
) -> None:
    found = machine(usable_cores=cores.quota or 1.0, core_speeds=cores.speeds)
    seen = probe(fetch_s=0.01, fetch_cpu_s=0.01)
    goal = Goal(
        Consumer(step_s),
        LoaderSettings(present),
        4,
        infeasible=lambda settings: infeasible(settings, seen, found),
        oversubscribed=lambda settings, busy: oversubscribed(settings, seen, found, busy),
    )
    choice = search(model(cores), goal)
    best = choice.best()
    assert best.num_workers <= most + (present == most + 1)
    assert not choice.look(best).infeasible and not choice.look(best).oversubscribed


@pytest.mark.parametrize(
    ("cores", "bound"),
    [
        (Cores((1.0,)), "cores"),
        (Cores((1.0, 1.0), quota=0.75), "cores"),
        (Cores((1.0, 1.0)), "workers"),
    ],
)
def test_workers_do_not_help_the_main_process_on_one_core(cores: Cores, bound: str) -> None:
    assert limit(model(cores).load(Consumer(0.0)), LoaderSettings(0), probe()) == bound


@given(st.floats(0.05, 4), SETTINGS, st.text(max_size=8))
def test_advised_threads_are_whole_numbers_on_any_part_of_cores(
    usable: float, settings: LoaderSettings, said: str
) -> None:
    found = variables(
        probe(), machine(usable_cores=usable, quota_cores=usable), settings,
        {"OMP_NUM_THREADS": said},
    )  # fmt: skip
    for each in found:
        assert each.where != "environment" or int(each.value) >= 1


@pytest.mark.parametrize("value", ["0", "-3", "garbage", "", "1.5", "2,", "0,1", "²"])
def test_thread_numbers_that_openmp_ignores_are_said(value: str) -> None:
    (said,) = misread_lines({"OMP_NUM_THREADS": value})
    assert said.startswith(f"OMP_NUM_THREADS={value!r} is ignored") and "or unset it" in said


@pytest.mark.parametrize("environment", [{}, {"OMP_NUM_THREADS": " 4"}, {"OMP_NUM_THREADS": "4,2"}])
def test_thread_numbers_that_openmp_takes(environment: dict[str, str]) -> None:
    assert misread_lines(environment) == ()


@pytest.mark.parametrize(
    ("environment", "words"),
    [
        ({"MKL_NUM_THREADS": "0"}, "MKL uses its default thread count"),
        ({"MKL_NUM_THREADS": ""}, None),
        ({"MKL_NUM_THREADS": "12"}, None),
        ({"MKL_NUM_THREADS": "abc"}, "which then uses one thread, as does PyTorch"),
        ({"MKL_NUM_THREADS": "4,2"}, "uses one thread"),
        ({"MKL_NUM_THREADS": " 2"}, "uses one thread"),
        ({"OPENBLAS_NUM_THREADS": "0"}, "follows OMP_NUM_THREADS instead"),
        ({"OPENBLAS_NUM_THREADS": "abc"}, "is ignored"),
        ({"OPENBLAS_NUM_THREADS": "4,2"}, "is read as 4 by OpenBLAS"),
        ({"OPENBLAS_NUM_THREADS": " 4"}, None),
        ({"OMP_NUM_THREADS": "1.5"}, "OpenBLAS reads it as 1"),
        ({"NUMEXPR_NUM_THREADS": "0"}, "makes `import numexpr` fail"),
        ({"SOME_NUM_THREADS": "x"}, None),
    ],
)
def test_what_other_libraries_make_of_it(environment: dict[str, str], words: str | None) -> None:
    said = misread_lines(environment)
    assert said == () if words is None else words in said[0]


THREADS = """
import numpy, torch, threadpoolctl
blas = [each["num_threads"] for each in threadpoolctl.threadpool_info()
        if each["internal_api"] == "openblas"]
print(torch.get_num_threads(), *blas[:1])
"""


@functools.cache
def library_threads(*variables: tuple[str, str]) -> list[int]:
    """Of PyTorch and BLAS, in a fresh process with these variables."""
    clean = {key: text for key, text in os.environ.items() if not key.endswith("_NUM_THREADS")}
    done = subprocess.run(
        [sys.executable, "-c", THREADS], env={**clean, **dict(variables)}, capture_output=True,
        text=True, check=True,
    )  # fmt: skip
    return [int(word) for word in done.stdout.split()]


@pytest.mark.skipif(
    not torch.backends.mkl.is_available() or torch.get_num_threads() < 2, reason="MKL, two cores"
)
@pytest.mark.parametrize(
    ("name", "value"),
    [("MKL_NUM_THREADS", "abc"), ("OMP_NUM_THREADS", "1.5"),
     *(pytest.param(name, value, marks=pytest.mark.slow)
       for name, value in (("MKL_NUM_THREADS", " 2"), ("OPENBLAS_NUM_THREADS", "1,2"),
                           ("MKL_NUM_THREADS", "0"), ("OMP_NUM_THREADS", "0")))],
)  # fmt: skip
def test_the_libraries_here_do_so(name: str, value: str) -> None:
    usual, found = library_threads(), library_threads((name, value))
    one = is_one_thread_to_mkl(value) and name.startswith("MKL")
    assert found[0] == (1 if one else usual[0])
    reads_one = value.startswith("1") and not name.startswith("MKL")
    assert found[1:] == ([1] if reads_one and usual[1:] else usual[1:])


GONE = """
from torch.utils.data import Dataset
class Gone(Dataset):
    def __len__(self):
        return 100
    def __getitem__(self, index):
        return open(f"/nowhere/{index}.jpg").read()
"""


@pytest.mark.usefixtures("warm_measuring")
def test_data_that_is_not_there_is_one_line_and_exit_code_2(tmp_path: Path) -> None:
    (tmp_path / "data.py").write_text(GONE)
    words: tuple[Any, ...] = ("--loader", "data.py:Gone", "--batch-size", "4")
    done = trainfit("loader", "--probe-time", "1", *words, cwd=tmp_path)
    assert done.returncode == 2
    said = error_line(done)
    assert said.startswith("data.py:Gone: Gone, batch size 4: every run of the loader failed: ")
    assert "FileNotFoundError: [Errno 2] No such file or directory: '/nowhere/0.jpg'; " in said
    assert "Cannot tell which settings are best" in done.stdout


@pytest.mark.slow
@pytest.mark.usefixtures("warm_measuring")
def test_a_data_set_that_cannot_be_made_is_one_line(tmp_path: Path) -> None:
    (tmp_path / "data.py").write_text("def make():\n    return open('/nowhere/list')\n")
    done = trainfit("loader", "--loader", "data.py:make", "--batch-size", "4", cwd=tmp_path)
    assert done.returncode == 2 and not done.stdout
    said = f"'data.py:make' failed at {tmp_path / 'data.py'}:2 (FileNotFoundError: [Errno 2] No "
    assert said in error_line(done)


def test_the_last_fault_says_why_nothing_ran() -> None:
    faults = [
        failure_finding("a", "with workers", "", ""),
        failure_finding("b", "without any", "", ""),
    ]
    assert nothing_ran(faults) == "every run of the loader failed: without any"
    assert nothing_ran([]) == "every run of the loader failed"


# --- What the command says of cores, data that only a worker misses -----------------------------


HAS_TASKSET = pytest.mark.skipif(shutil.which("taskset") is None, reason="util-linux' taskset")


@pytest.fixture
def script(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "train.py").write_text("")


def commanded(line: str) -> CoreWrapper:
    return core_wrapper(parse_command(line.split()))


@HAS_TASKSET
def test_a_loader_is_measured_on_the_cores_and_with_the_priority_of_its_command(
    script: None,
) -> None:
    one = min(os.sched_getaffinity(0))
    found = commanded(
        f"A=b nice -n 5 taskset -c {one} env C=d python train.py -c {{num_workers:2}}"
    )
    assert found == CoreWrapper(("nice", "-n", "5", "taskset", "-c", str(one)))
    assert commanded("nohup env A=b python train.py") == CoreWrapper()
    code = "import os; print(os.sched_getaffinity(0), os.nice(0))"
    words = [*found.words, sys.executable, "-c", code]
    done = subprocess.run(words, capture_output=True, text=True, check=True)
    assert done.stdout == f"{{{one}}} {os.nice(0) + 5}\n"


@HAS_TASKSET
def test_cores_of_another_machine_are_left_out_and_said(script: None) -> None:
    found = commanded("taskset -c 1000 python train.py")
    assert found.words == ()
    assert "`taskset -c 1000` does not work here (" in found.failure
    loaded = Loaded(None, "", None, "", "", 0, 1.0, wrapper_failure=found.failure)
    assert notes_of(loaded, None, RunSpec(loading=LoaderSpec()))[0] == found.failure


@HAS_TASKSET
def test_the_others_of_its_programs_are_used_all_the_same(script: None) -> None:
    found = commanded("nice -n 5 taskset -c 1000 chrt -x 0 python train.py")
    assert found.words == ("nice", "-n", "5")
    assert "`taskset -c 1000` does not work here (" in found.failure
    assert "`chrt -x 0` does not work here (" in found.failure
    assert found.failure.endswith("the DataLoader was measured without it")


def test_a_wrapper_that_is_not_installed_is_said(
    script: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", "/nowhere")
    found = core_wrapper(parse_command(["numactl", "-N", "0", sys.executable, "train.py"]))
    assert found.words == () and "No such file" in found.failure


def test_a_file_that_only_a_worker_misses_is_named_with_what_to_do() -> None:
    message = (
        "FileNotFoundError: Caught FileNotFoundError in DataLoader worker process 0.\n"
        'Original Traceback (most recent call last):\n  File "/lib/torch/worker.py", line 3, in f\n'
        '  File "/home/me/train.py", line 5, in __getitem__\n    return open(path)\n'
        "FileNotFoundError: [Errno 2] No such file or directory: '/data/0.pt'\n"
    )
    outcome = TraceOutcome("failed", 0, 0.1, message=message, location="train.py:9")
    assert what_happened(outcome) == (
        "the script failed at /home/me/train.py:5 (FileNotFoundError: [Errno 2] No such file or "
        "directory: '/data/0.pt', in DataLoader worker process 0)"
    )
    assert remedy(outcome, "a traceback").startswith(
        "put '/data/0.pt' there, or give its path in the command"
    )
    other = TraceOutcome("failed", 0, 0.1, message="KeyError: 'a'", location="train.py:9")
    assert what_happened(other) == "the script failed at train.py:9 (KeyError: 'a')"
    assert remedy(other, "a traceback") == "its traceback is below"
