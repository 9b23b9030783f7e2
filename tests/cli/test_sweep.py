"""`trainfit sweep`: real runs of its cells, what is kept of them, and what ends them early."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import IO, Any
from unittest import mock

import psutil
import pytest

from helpers_cli import called_here, environment, error_line, json_of, trainfit
from trainfit.plan.sweep import cell_run

#: One cell is told to wait until a file is there.
SCRIPT = """
import os, sys, time, torch
width = int(sys.argv[1])
if width == 32:
    while not os.path.exists("go"):
        time.sleep(0.05)
if width == 48:
    raise RuntimeError("no data set")
model = torch.nn.Linear(width, width).cuda()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for _ in range(5):
    model(torch.ones(8, width).cuda()).mean().backward()
    optimizer.step()
    optimizer.zero_grad()
"""
SWEEP = """
commands = ["python train.py {{width:16}}"]
gpus = ["RTX 4090"]
verb = "simulate"
[values]
width = {widths}
[options]
steps = 3
"""
PRICES = 'currency = "USD"\n[per_hour]\n"RTX 4090" = 0.5\n'
#: Seconds after which a test that waits for a process gives up.
PATIENCE_S = 240.0


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "train.py").write_text(SCRIPT)
    (tmp_path / "prices.toml").write_text(PRICES)
    return tmp_path


def write(folder: Path, *widths: int) -> None:
    (folder / "sweep.toml").write_text(SWEEP.format(widths=list(widths)))


def sweep_here(folder: Path, *words: str) -> subprocess.CompletedProcess[str]:
    """A sweep whose cells are calls in this process, which has imported what theirs would."""

    def begin(words: list[str], *, cwd: str, stderr: IO[bytes], **rest: Any) -> SimpleNamespace:
        assert words[:4] == [sys.executable, "-P", "-m", "trainfit"]
        cell = called_here(words[4:], Path(cwd))
        stderr.write(cell.stderr.encode())
        stderr.flush()
        return SimpleNamespace(poll=lambda: cell.returncode, returncode=cell.returncode)

    stand_in = SimpleNamespace(**{**vars(subprocess), "Popen": begin})
    with mock.patch.object(cell_run, "subprocess", stand_in):
        return trainfit("sweep", "sweep.toml", "--jobs", "1", *words, cwd=folder)


def by_width(document: dict[str, Any]) -> dict[str, dict[str, Any]]:
    return {cell["values"]["width"]: cell for cell in document["cells"]}


def started(folder: Path, *words: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-m", "trainfit", "sweep", "sweep.toml", *words],
        cwd=folder,
        env=environment(),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def until(holds: Any) -> Any:
    """What ``holds`` gives as soon as it is something."""
    end = time.monotonic() + PATIENCE_S
    while time.monotonic() < end:
        with contextlib.suppress(psutil.Error):
            if found := holds():
                return found
        time.sleep(0.1)
    pytest.fail("it did not come to that")


def waiting_cell(process: subprocess.Popen[str]) -> psutil.Process | None:
    """The child of a sweep that runs the cell of width 32."""
    for each in psutil.Process(process.pid).children():
        if "{width:16}" not in " ".join(words := each.cmdline()) and words[-1] == "32":
            return each
    return None


def test_a_sweep_is_run_kept_and_goes_on(folder: Path) -> None:
    write(folder, 16, 48)
    done = sweep_here(folder, "--price", "prices.toml", "--samples", "1000", "--json")
    assert done.returncode == 0, done.stderr
    found = json_of(done)
    cells = by_width(found)
    good, bad = cells["16"], cells["48"]
    assert good["fits"] and not good["failure"] and good["price_per_hour"] == 0.5
    assert good["device_bytes"] > 0 and good["step_s"] > 0
    assert "no data set" in bad["failure"] and bad["fits"] is None
    assert found["cells"][0] == good and found["fastest"] in (0, None)
    # The good one's result is an ordinary recording; the bad one left nothing.
    (kept,) = (folder / "sweep-cells").iterdir()
    assert kept.name == good["result"]
    shown = trainfit("show", kept, cwd=folder)
    assert shown.returncode == 0 and "RTX 4090" in shown.stdout
    former = kept.stat().st_mtime_ns

    # What has a result is not run again, and what failed is.
    second = sweep_here(folder, "--output", "out.json")
    assert second.returncode == 0
    assert "1 of 2 cells have a result" in second.stderr
    assert "cell 2 of 2" in second.stderr and "no data set" in second.stderr
    assert kept.stat().st_mtime_ns == former
    assert "no data set" in second.stdout
    assert len(second.stdout.splitlines()) <= 25
    page = trainfit("report", "out.json", "-o", "page.html", cwd=folder)
    assert page.returncode == 0
    assert "no data set" in (folder / "page.html").read_text()
    assert json.loads((folder / "out.json").read_text())["format"] == "trainfit-sweep"


@pytest.mark.slow
@pytest.mark.usefixtures("brief")
def test_a_plan_of_several_gpus_is_a_cell_with_its_price(folder: Path) -> None:
    script = Path(__file__).resolve().parents[1] / "training_scripts" / "ddp.py"
    (folder / "ddp.py").write_text(script.read_text())
    (folder / "sweep.toml").write_text(
        'commands = ["torchrun --nproc_per_node={gpus} ddp.py --batch-size={batch_size:8}"]\n'
        'gpus = ["RTX 4090"]\ncounts = [1, 2]\n[values]\nbatch_size = [16]\n'
    )
    done = sweep_here(folder, "--price", "prices.toml", "--json")
    assert done.returncode == 0, done.stderr
    cells = {cell["gpu"]: cell for cell in json_of(done)["cells"]}
    one, two = cells["RTX 4090"], cells["2x RTX 4090"]
    assert (one["gpus"], two["gpus"]) == (1, 2)
    assert (one["price_per_hour"], two["price_per_hour"]) == (0.5, 1.0)
    assert one["batch_size"] == two["batch_size"] == 16  # the sweep's, not the recommended one
    assert one["run_s"] and one["cost"] == pytest.approx(one["run_s"] / 3600 * 0.5)
    # Of both GPUs together, each with a batch, less what communication costs.
    assert two["samples_per_s"] < 2 * one["samples_per_s"]
    assert two["samples_per_s"] == pytest.approx(2 * 16 / two["step_s"])
    assert two["launch"].startswith("torchrun --nproc_per_node=2 ")


@pytest.mark.slow
def test_a_killed_worker_loses_nothing(folder: Path) -> None:
    write(folder, 16, 32)
    process = started(folder, "--jobs", "2", "--json")
    try:
        until(lambda: list((folder / "sweep-cells").glob("*")))  # the other is done
        until(lambda: waiting_cell(process)).send_signal(signal.SIGKILL)
        out, err = process.communicate(timeout=PATIENCE_S)
    finally:
        process.kill()
    cells = by_width(json.loads(out))
    assert process.returncode == 0, err
    assert cells["16"]["fits"]
    assert cells["32"]["failure"] == "its process was killed by SIGKILL"
    (folder / "go").touch()
    done = sweep_here(folder, "--json")
    assert "1 of 2 cells have a result" in done.stderr
    assert all(cell["fits"] for cell in json_of(done)["cells"])


@pytest.mark.parametrize(
    "number", [signal.SIGINT, pytest.param(signal.SIGTERM, marks=pytest.mark.slow)]
)
def test_an_interrupt_ends_the_cells_and_keeps_what_is_done(
    folder: Path, number: signal.Signals
) -> None:
    write(folder, 16)
    sweep_here(folder)
    write(folder, 16, 32)
    process = started(folder)
    try:
        cell = until(lambda: waiting_cell(process))
        process.send_signal(number)
        out, err = process.communicate(timeout=PATIENCE_S)
    finally:
        process.kill()
    assert process.returncode == (130 if number == signal.SIGINT else 143)
    assert "trainfit: interrupted" in err and "Traceback" not in err
    assert "1 of 2 cells fit; 1 without a result" in " ".join(out.split())
    assert "not run: the sweep was interrupted" in " ".join(out.split())
    until(lambda: not cell.is_running())


def test_exit_codes_say_whether_any_fits(folder: Path) -> None:
    write(folder, 48)
    failed = sweep_here(folder, "--json")
    assert failed.returncode == 2
    write(folder, 16)
    text = (folder / "sweep.toml").read_text().replace("RTX 4090", "custom:64MiB")
    (folder / "sweep.toml").write_text(text)
    small = sweep_here(folder, "--json")
    assert small.returncode == 1, small.stderr
    (cell,) = json_of(small)["cells"]
    assert cell["fits"] is False and not cell["failure"]


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["gone.toml"], "sweep file 'gone.toml': No such file or directory"),
        (["sweep.toml", "--folder", "train.py"], "--folder 'train.py' is a file"),
        (["sweep.toml", "--price", "gone.toml"], "price file 'gone.toml'"),
        (["sweep.toml", "--output", "train.py"], "is not a result of trainfit"),
        (["sweep.toml", "--output", "sweep.toml"], "is one of the inputs"),
        (["sweep.toml", "--ray", "auto", "--jobs", "2"], "--jobs is for cells on this machine"),
    ],
)
def test_what_cannot_be_is_said_before_a_cell_is_run(
    folder: Path, words: list[str], said: str
) -> None:
    write(folder, 16)
    done = trainfit("sweep", *words, cwd=folder)
    assert done.returncode == 2
    assert said in error_line(done)
    assert not (folder / "sweep-cells").exists()


def test_options_that_the_verb_does_not_take_are_named(folder: Path) -> None:
    (folder / "sweep.toml").write_text(
        'commands = ["python train.py 16"]\ngpus = ["T4"]\n[options]\nsteps = "many"\n'
    )
    done = trainfit("sweep", "sweep.toml", cwd=folder)
    assert done.returncode == 2
    assert "[options] of the sweep's file: argument --steps" in error_line(done)


def test_ray_is_named_where_it_is_missing(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "ray", None)
    write(folder, 16)
    done = trainfit("sweep", "sweep.toml", "--ray", "auto", cwd=folder)
    assert done.returncode == 2
    assert "pip install 'trainfit[ray]'" in error_line(done)


# --- A Ray cluster of two nodes on this machine ---------------------------------------------------


@pytest.fixture
def cluster() -> Iterator[Any]:
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    pytest.importorskip("ray")
    from ray.cluster_utils import Cluster

    made = Cluster(initialize_head=True, head_node_args={"num_cpus": 1, "include_dashboard": False})
    made.add_node(num_cpus=1)
    try:
        yield made
    finally:
        made.shutdown()


def test_a_cluster_runs_cells_on_its_nodes_and_survives_a_lost_worker(
    folder: Path, cluster: Any
) -> None:
    write(folder, 16, 32)
    process = started(folder, "--ray", cluster.address, "--json")
    try:
        until(lambda: list((folder / "sweep-cells").glob("*")))
        cell = until(lambda: next(iter(_cells_of(folder)), None))
        worker = cell.parent()
        assert "run_cell" in worker.name() or "ray" in " ".join(worker.cmdline())
        worker.kill()
        (folder / "go").touch()
        cell.kill()
        out, err = process.communicate(timeout=PATIENCE_S)
    finally:
        process.kill()
    assert process.returncode == 0, err
    cells = by_width(json.loads(out))
    assert all(cell["fits"] for cell in cells.values()), cells
    # Where they ran makes no difference: here they would be the same cells.
    done = trainfit("sweep", "sweep.toml", "--json", cwd=folder)
    assert "2 of 2 cells have a result" in done.stderr


def _cells_of(folder: Path) -> list[psutil.Process]:
    found = []
    for each in psutil.process_iter():
        with contextlib.suppress(psutil.Error):
            words = each.cmdline()
            if "simulate" in words and words[-1] == "32" and each.cwd() == str(folder):
                found.append(each)
    return found


def test_an_address_where_nothing_answers_is_not_left_to_ray(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It asks again for a quarter of an hour."""
    ray = SimpleNamespace(init=lambda **_: pytest.fail("Ray was asked"))
    monkeypatch.setitem(sys.modules, "ray", ray)
    write(folder, 16)
    for address in ("127.0.0.1:1", "ray://127.0.0.1:1"):
        done = trainfit("sweep", "sweep.toml", "--ray", address, cwd=folder)
        assert done.returncode == 2
        assert f"--ray {address}: no cluster is reached there" in error_line(done)


def test_a_cluster_that_is_not_there_is_named(folder: Path) -> None:
    pytest.importorskip("ray")
    write(folder, 16)
    done = trainfit("sweep", "sweep.toml", "--ray", "127.0.0.1:1", cwd=folder)
    assert done.returncode == 2
    assert "--ray 127.0.0.1:1: no cluster is reached there" in error_line(done)
