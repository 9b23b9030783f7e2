"""``trainfit plan`` and ``simulate`` of a job with a process for each GPU, as a user calls them."""

from __future__ import annotations

import importlib.util
import subprocess
from pathlib import Path
from typing import Any

import pytest

from helpers_cli import SCRIPTS, error_line, json_of, trainfit

DDP = str(SCRIPTS / "ddp.py")
TORCHRUN = ("torchrun", "--nproc_per_node=4", DDP)
OWN = ("--no-remedies", "--no-loader")
#: Of ddp.py, in float32.
PARAMETERS = 8 * (1024 * 1024 + 1024) + 1024 * 10 + 10


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("several")


@pytest.fixture(scope="module")
def done(folder: Path) -> subprocess.CompletedProcess[str]:
    own = ("--gpu", "4x RTX 4090", "--json", "--output", "plan.json", *OWN)
    return trainfit("plan", *own, "--", *TORCHRUN, "--batch-size={batch_size:32}", cwd=folder)


@pytest.fixture(scope="module")
def result(done: subprocess.CompletedProcess[str]) -> dict[str, Any]:
    assert done.returncode == 0, done.stderr
    return json_of(done)


@pytest.mark.slow
def test_the_collectives_of_a_step_are_those_of_ddp(result: dict[str, Any]) -> None:
    ranks = result["ranks"]
    assert ranks["count"] == 4
    (reduced,) = [each for each in ranks["collectives"] if each["kind"] == "all_reduce"]
    assert reduced["nbytes"] == 4 * PARAMETERS
    assert reduced["calls"] > 1
    assert "host's memory" in ranks["link"]


def test_what_is_lost_by_communication(result: dict[str, Any]) -> None:
    step = result["speed"]["now"]
    assert 0 < step["exposed_s"] < step["communication_s"]
    assert step["exposed_s"] < step["seconds"]
    assert step["samples_per_s"] == pytest.approx(32 / step["seconds"])


def test_the_launch_line_keeps_its_launcher(result: dict[str, Any]) -> None:
    assert result["launch"].startswith(f"torchrun --nproc_per_node=4 {DDP} --batch-size=")


def test_the_screen_says_it(folder: Path, result: dict[str, Any]) -> None:
    shown = trainfit("show", "plan.json", cwd=folder)
    assert shown.returncode == 0, shown.stderr
    assert "samples/s on 4 GPUs" in shown.stdout
    assert "4 GPUs (predicted)" in shown.stdout
    assert "wait for communication" in shown.stdout
    assert "effective batch 4 x" in shown.stdout


def test_its_figures_can_be_gated(folder: Path, result: dict[str, Any]) -> None:
    page = trainfit("show", "plan.json", "--fail-if", "efficiency<1%", cwd=folder)
    assert page.returncode == 0, page.stderr


def test_on_how_many_gpus_it_fits(folder: Path, result: dict[str, Any]) -> None:
    """The same job on the same GPUs has the plan's memory and step."""
    done = trainfit(
        *("gpus", "RTX 4090", "H100 SXM", "--for", "plan.json", "--count", "1,4", "--json"),
        cwd=folder,
    )
    assert done.returncode == 0, done.stderr
    compared = json_of(done)
    assert compared["counts"] == [1, 4]
    (same,) = [
        each
        for each in compared["gpus"]
        if (each["gpu"], each["count"], each["strategy"]) == ("RTX 4090", 4, "DDP")
    ]
    assert same["device_bytes"] == result["now"]["memory"]["device_bytes"]
    assert same["now"]["exposed_s"] == pytest.approx(result["speed"]["now"]["exposed_s"], rel=0.01)
    shown = trainfit("gpus", "RTX 4090", "--for", "plan.json", "--count", "1,2,4,8", cwd=folder)
    assert shown.returncode == 0, shown.stderr
    assert shown.stdout.startswith("Fits from 1 GPU on")
    assert len(shown.stdout.splitlines()) <= 25


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("--for", "plan.json"), "--count 4"),
        (("--count", "2"), "--for FILE"),
        (("--for", "plan.json", "--count", "2,x"), "1,2,4,8"),
        (("--for", "plan.json", "--count", "0"), "1,2,4,8"),
        (("--for", "plan.json", "--count", "64"), "16 GPUs"),
        (("8x RTX 4090", "--for", "plan.json", "--count", "2"), "--for FILE --count 8"),
    ],
)
def test_numbers_of_gpus_that_cannot_be(
    words: tuple[str, ...], said: str, folder: Path, result: dict[str, Any]
) -> None:
    refused = trainfit("gpus", *words, cwd=folder)
    assert refused.returncode == 2
    assert said in refused.stderr.splitlines()[-1]


@pytest.mark.parametrize(
    "launcher",
    [
        ("torchrun", "--nproc_per_node=4"),
        # How their words are read is told in plan/command/test_launchers.py.
        pytest.param(
            ("python", "-m", "torch.distributed.run", "--nproc-per-node", "4"),
            marks=pytest.mark.slow,
        ),
        pytest.param(("accelerate", "launch", "--num_processes", "4"), marks=pytest.mark.slow),
    ],
    ids=lambda words: words[0],
)
def test_memory_of_a_rank(launcher: tuple[str, ...], tmp_path: Path) -> None:
    if launcher[0] == "accelerate":
        pytest.importorskip("accelerate")
    own = ("--gpu", "RTX 4090", "--json", "--steps", "3")
    done = trainfit("simulate", *own, "--", *launcher, DDP, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    found = json_of(done)
    # Parameters, gradients, and DDP's buckets as large as the gradients.
    assert found["memory"]["allocated_bytes"] > 3 * 4 * PARAMETERS


def test_a_group_of_more_ranks_than_gpus(tmp_path: Path) -> None:
    variables = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "2"}
    variables |= {"MASTER_ADDR": "localhost", "MASTER_PORT": "29500"}
    own = ("--gpu", "RTX 4090", *OWN)
    done = trainfit("plan", *own, "--", "python", DDP, cwd=tmp_path, **variables)
    assert done.returncode == 2
    assert '--gpu "2x RTX 4090"' in error_line(done)


LIGHTNING = """
import torch
import lightning
from torch.utils.data import DataLoader, TensorDataset


class Model(lightning.LightningModule):
    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(256, 10)

    def training_step(self, batch, number):
        return torch.nn.functional.cross_entropy(self.layer(batch[0]), batch[1])

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)


print("started", flush=True)
data = TensorDataset(torch.zeros(512, 256), torch.zeros(512, dtype=torch.long))
options = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False}
trainer = lightning.Trainer(devices=4, strategy="ddp", max_epochs=1, **options)
trainer.fit(Model(), DataLoader(data, batch_size=8))
"""


def test_lightning_starts_no_other_ranks(tmp_path: Path) -> None:
    if importlib.util.find_spec("lightning") is None:  # it may not be importable without a GPU
        pytest.skip("Lightning is not installed")
    script = tmp_path / "train.py"
    # Whoever runs it says so where the sandbox lets it: in its own process.
    script.write_text(LIGHTNING.replace("print(", "assert torch.cuda.is_available()\nprint("))
    own = ("--gpu", "4x RTX 4090", "--json", "--steps", "3")
    done = trainfit("simulate", *own, "--", "python", "train.py", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert json_of(done)["steps"] == 3


@pytest.mark.slow
@pytest.mark.usefixtures("brief")
def test_several_machines_over_their_network(tmp_path: Path, result: dict[str, Any]) -> None:
    own = ("--gpu", "2x(4x RTX 4090), 1x 1Gb/s", "--json", *OWN)
    command = ("torchrun", "--nnodes=2", "--nproc_per_node=4", DDP)
    done = trainfit("plan", *own, "--", *command, "--batch-size={batch_size:32}", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    slow = json_of(done)
    assert (slow["ranks"]["count"], slow["ranks"]["machines"]) == (8, 2)
    assert slow["ranks"]["collectives"][0]["nbytes"] == 4 * PARAMETERS
    assert "between 2 machines a network card of 125 MB/s each way" in slow["ranks"]["link"]
    # 2 * 7/8 of the gradients over one card of 125 MB/s, of which it reaches 90%.
    took = slow["ranks"]["collectives"][0]["seconds"]
    assert took == pytest.approx(4 * PARAMETERS * 2 * 7 / 8 / (0.9 * 125e6), rel=0.01)
    assert slow["speed"]["now"]["exposed_s"] > 10 * result["speed"]["now"]["exposed_s"]


@pytest.mark.usefixtures("brief")
def test_one_process_on_a_machine_of_several_is_told_so(tmp_path: Path) -> None:
    """A script that starts no process group is not sent to torchrun: that would train it twice."""
    own = ("--gpu", "8x H100 SXM", "--json", "--steps", "2", *OWN)
    done = trainfit("plan", *own, "--", "python", SCRIPTS / "tiny.py", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    (note,) = [note for note in json_of(done)["notes"] if "of the 8 GPUs" in note]
    assert note == "of the 8 GPUs the script uses 1"
    command = ("torchrun", "--nproc_per_node=8", SCRIPTS / "tiny.py")
    done = trainfit("plan", *own, "--", *command, cwd=tmp_path)
    (note,) = [note for note in json_of(done)["notes"] if "8 processes" in note]
    assert "train a model each" in note and "DistributedDataParallel" in note
