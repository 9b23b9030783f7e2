"""Threads of a script's DataLoader workers against the cores, on recorded and made machines."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from helpers_cli import ROOT
from helpers_cli import trainfit as run
from helpers_facts import fact, machine, unknown
from helpers_report import on_one_line, whole
from trainfit.doctor.checks import diagnose
from trainfit.lint.api import read_script
from trainfit.report.sections.doctor import checks_subject
from trainfit.results.doctor import Check, DoctorResult, PoolUse, ScriptReport, WorkerPools
from trainfit.results.machine import ThreadSettings

MACHINES = ROOT / "tests" / "machines"
DATA = """
import cv2
import numpy as np
from torch.utils.data import Dataset

class Frames(Dataset):
    def __getitem__(self, index):
        return shrink(cv2.imread(f"{index}.jpg"))

def shrink(image):
    return cv2.resize(image, (224, 224))
"""
TRAIN = """
from torch.utils.data import DataLoader
from data import Frames
for batch in DataLoader(Frames(), batch_size=8, num_workers=12):
    pass
"""


def pools(folder: Path, train: str = TRAIN, data: str = DATA) -> WorkerPools:
    (folder / "train.py").write_text(train)
    (folder / "data.py").write_text(data)
    found = read_script(folder / "train.py").pools
    assert found is not None
    return found


def checks(found: WorkerPools | None, cpus: float = 24, **variables: str) -> tuple[Check, ...]:
    """Of a machine with 24 CPUs."""
    opencv = int(variables.get("OPENCV_FOR_THREADS_NUM", cpus))
    of = machine(
        cpu={"usable_cores": float(cpus), "affinity": tuple(range(int(cpus)))},
        threads=ThreadSettings(variables, fact(opencv), fact(int(cpus))),
    )
    return diagnose(of, ("threads",), found)


# --- What the screen says -----------------------------------------------------------------------
def test_a_pool_of_each_worker_is_warned_of_with_number_and_fix(tmp_path: Path) -> None:
    found = pools(tmp_path)
    assert found.workers == 12
    (check,) = checks(found)
    assert (check.verdict, check.kind) == ("bad", "worker_threads_exceed_cores")
    assert check.title == "12 workers x 24 threads of OpenCV = 288 threads on 24 cores"
    text = on_one_line(whole(checks_subject([check])))
    assert "data.py:11 runs cv2.resize in each worker" in text
    assert "fix export OPENCV_FOR_THREADS_NUM=1 undo unset OPENCV_FOR_THREADS_NUM" in text
    assert "fix cv2.setNumThreads(0) # in worker_init_fn" in text
    assert "Not checked for: OpenCV builds with OpenMP or TBB" in text


def test_as_a_user_runs_it(tmp_path: Path) -> None:
    pools(tmp_path)
    words = ("doctor", "--machine", MACHINES / "workstation.json", "--only", "threads")
    alone = run(*words, cwd=tmp_path)
    assert alone.returncode == 0
    said = " ".join(alone.stdout.split())
    assert "OpenCV in 12 workers would use 288: check with --script" in said
    done = run(*words, "--script", "train.py", "--output", "d.json", cwd=tmp_path)
    assert done.returncode == 1 and not done.stderr
    assert "threads: 12 workers x 24 threads of OpenCV = 288 threads" in done.stdout
    kept = json.loads((tmp_path / "d.json").read_text())
    assert kept["script"]["pools"]["uses"][0]["call"] == "cv2.resize"
    assert run("show", "d.json", cwd=tmp_path).stdout == done.stdout
    del kept["script"]["pools"]  # a file of before
    former = DoctorResult.from_json(json.dumps(kept), tmp_path)
    assert former.script is not None and former.script.pools is None


def test_a_library_that_is_only_imported_is_a_doubt(tmp_path: Path) -> None:
    data = DATA.replace("cv2.resize(image, (224, 224))", "image").replace("cv2.imread", "np.load")
    (check,) = checks(pools(tmp_path, data=data))
    assert check.verdict == "cannot_tell" and "= 288 threads on 24 cores" in check.title
    assert "data.py:2 imports cv2. Whether workers call what starts its threads" in check.cause
    assert check.fixes


def test_few_threads_a_core_are_a_doubt(tmp_path: Path) -> None:
    few = pools(tmp_path, TRAIN.replace("12", "4"))
    (check,) = checks(few)
    assert check.verdict == "cannot_tell" and "= 96 threads" in check.title
    assert "From 4 threads per core on" in check.cause
    (check,) = checks(pools(tmp_path, TRAIN.replace("12", "1")))
    assert check.verdict == "good"


# --- No finding ---------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("train", "data", "variables"),
    [
        (TRAIN, DATA, {"OPENCV_FOR_THREADS_NUM": "1"}),
        (TRAIN, DATA + "\ncv2.setNumThreads(0)\n", {}),
        ("import os\nos.environ['OPENCV_FOR_THREADS_NUM'] = '1'\n" + TRAIN, DATA, {}),
        (TRAIN.replace("num_workers=12", "num_workers=0"), DATA, {}),
        (TRAIN.replace(", num_workers=12", ""), DATA, {}),
        ("from data import Frames\nframes = Frames()\n", DATA, {}),
        # PyTorch's own threads are 1 in workers, whatever OMP_NUM_THREADS is.
        (TRAIN, DATA.replace("import cv2", "import torch").replace("cv2.", "torch."), {}),
        # NumPy is everywhere; without its BLAS it has no threads.
        (TRAIN, DATA.replace("import cv2", "").replace("cv2.", "np."), {}),
    ],
)
def test_nothing_is_said_of_workers_without_a_pool(
    train: str, data: str, variables: dict[str, str], tmp_path: Path
) -> None:
    (check,) = checks(pools(tmp_path, train, data), **variables)
    assert check.verdict == "good" and "--script" not in check.title


def test_openblas_follows_its_variables(tmp_path: Path) -> None:
    data = DATA.replace("import cv2", "").replace("cv2.imread", "np.load")
    found = pools(tmp_path, data=data.replace("cv2.resize(image, (224, 224))", "np.dot(image, 1)"))
    (check,) = checks(found)
    assert check.title == "12 workers x 24 threads of OpenBLAS = 288 threads on 24 cores"
    assert check.fixes[0].action == "export OPENBLAS_NUM_THREADS=1"
    assert "NumPy with MKL" in check.cause
    assert checks(found, OMP_NUM_THREADS="1")[0].verdict == "good"
    assert checks(found, OPENBLAS_NUM_THREADS="1", OMP_NUM_THREADS="24")[0].verdict == "good"
    (huge,) = checks(found, cpus=128)
    assert "12 workers x 64 threads of OpenBLAS = 768" in huge.title


def test_what_is_bad_already_stays(tmp_path: Path) -> None:
    first, second = checks(pools(tmp_path), OMP_NUM_THREADS="99")
    assert first.kind == "threads_exceed_cores"
    assert second.kind == "worker_threads_exceed_cores"


def test_where_the_pools_size_is_not_known_nothing_is_claimed(tmp_path: Path) -> None:
    of = machine(threads=ThreadSettings({}, unknown(), unknown()))
    (check,) = diagnose(of, ("threads",), pools(tmp_path))
    assert check.verdict == "good"


# --- How many workers ---------------------------------------------------------------------------
LOADER = "from torch.utils.data import DataLoader\nfrom data import Frames\n"


@pytest.mark.parametrize(
    ("text", "workers"),
    [
        ("DataLoader(Frames(), 8, True, None, None, 6)", 6),
        ("N = 7\nDataLoader(Frames(), num_workers=N)", 7),
        ("N = 7\nN = 8\nDataLoader(Frames(), num_workers=N)", None),
        ("import os\nDataLoader(Frames(), num_workers=os.cpu_count())", None),
        ("class C:\n    num_workers: int = 5\nDataLoader(Frames(), num_workers=C().num_workers)\n",
         5),
        ("p.add_argument('-j', '--num-workers', type=int, default=3)\n"
         "a = p.parse_args()\nDataLoader(Frames(), num_workers=a.num_workers)", 3),
        ("p.add_argument('-j', dest='num_workers', default=3)\n"
         "DataLoader(Frames(), num_workers=p.num_workers)", 3),
        ("p.add_argument('--num_workers', type=int)\n"
         "DataLoader(Frames(), num_workers=p.num_workers)", None),
        ("p.add_argument('-j', '--workers', type=int, default=3)\nn = p.parse_args().workers\n"
         "DataLoader(Frames(), **{'num_workers': n})", 3),
        ("p.add_argument('--num_workers', type=int, default=3)\ndef make(args):\n"
         "    num_workers = args.num_workers\n"
         "    return DataLoader(Frames(), num_workers=num_workers)\nmake(p.parse_args())", 3),
        ("p.add_argument('--j', default=3)\ndef make(batch, workers=0):\n"
         "    return DataLoader(Frames(), num_workers=int(workers))\nmake(8, p.parse_args().j)", 3),
        ("def make(workers=4):\n    return DataLoader(Frames(), num_workers=workers)\n"
         "make()\nmake(workers=4)", 4),
        ("def make(workers=4):\n    return DataLoader(Frames(), num_workers=workers)\n"
         "make()\nmake(2)", None),
        ("class Data:\n    def __init__(self, *, workers=4):\n        self.workers = workers\n"
         "DataLoader(Frames(), num_workers=Data().workers)", 4),
        ("import click\n@click.option('-w', '--workers', 'n', default=3)\n"
         "def main(n):\n    DataLoader(Frames(), num_workers=n)\nmain()", 3),
        ("import click\n@click.option('--num-workers', default=3)\n"
         "def main(num_workers):\n    DataLoader(Frames(), num_workers=num_workers)", 3),
        ("import typer\ndef main(workers: int = typer.Option(3, help='x')):\n"
         "    DataLoader(Frames(), num_workers=workers)\ntyper.run(main)", 3),
        ("from dataclasses import dataclass, field\n@dataclass\nclass Data:\n"
         "    num_workers: int = field(default=3, metadata={})\n@draccus.wrap()\n"
         "def main(cfg: Data):\n    DataLoader(Frames(), num_workers=cfg.num_workers)", 3),
        ("flags.DEFINE_integer('workers', 3, 'x')\n"
         "DataLoader(Frames(), num_workers=FLAGS.workers)", 3),
        ("n = 3\nn += 1\nDataLoader(Frames(), num_workers=n)", None),
        ("n = n2\nn2 = n\nDataLoader(Frames(), num_workers=n)", None),
        ("kw = {'num_workers': 3}\nkw = {'num_workers': 4}\nDataLoader(Frames(), **kw)", None),
        ("DataLoader(Frames(), num_workers=2)\nDataLoader(Frames(), num_workers=9)", 9),
        ("DataLoader(Frames(), num_workers=2)\nDataLoader(Frames(), **more)", None),
        ("DataLoader(Frames(), num_workers=True)", None),
    ],
)  # fmt: skip
def test_the_number_of_workers(text: str, workers: int | None, tmp_path: Path) -> None:
    found = pools(tmp_path, LOADER + text + "\n")
    assert found.has_workers and found.workers == workers
    (check,) = checks(found)
    if workers is None:
        assert check.verdict == "cannot_tell"
        assert check.title == (
            "each worker's OpenCV starts 24 threads on 24 cores; num_workers is not known"
        )
    else:
        assert f"{workers} workers x 24" in check.title


@given(
    workers=st.one_of(st.none(), st.integers(0, 200)),
    threads=st.integers(1, 200),
    usable=st.floats(0.5, 200),
    in_worker=st.booleans(),
)
def test_it_is_a_finding_from_the_jobs_cores_on(
    workers: int | None, threads: int, usable: float, in_worker: bool
) -> None:
    use = PoolUse("OpenCV", "cv2.resize", "data.py", 1, in_worker)
    found = WorkerPools(workers != 0, workers, (use,))
    of = machine(cpu={"usable_cores": usable}, threads=ThreadSettings({}, fact(threads), fact(1)))
    (check,) = diagnose(of, ("threads",), found)
    number = (2 if workers is None else workers) * threads
    assert (check.verdict != "good") == (threads > 1 and number > usable)
    assert len(check.title) < 100 and check.title.isprintable()
    if check.verdict == "bad":
        assert in_worker and number > 4 * usable and check.kind and check.fixes
    if check.verdict == "cannot_tell":
        assert check.cause and check.fixes


def test_the_table_of_the_docs_names_the_cause() -> None:
    assert "`worker_threads_exceed_cores`" in (ROOT / "docs" / "checks.md").read_text()


def test_a_report_without_pools_is_as_no_script() -> None:
    report: Any = ScriptReport("a.py", ("a.py",), ())
    assert checks(report.pools) == checks(None)
