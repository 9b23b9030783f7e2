"""DeepSpeed's launcher, and ZeRO by its own code on the simulated device; needs its package."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from helpers_cli import error_line, json_of, trainfit
from trainfit.scripts.launchers import check_json, deepspeed

pytest.importorskip("deepspeed")

PARAMETERS = 4 * 1024 * 1024
SCRIPT = """
import argparse
import deepspeed
import torch
from torch import nn

parser = argparse.ArgumentParser()
parser.add_argument("--local_rank", type=int, default=0)
options = deepspeed.add_config_arguments(parser).parse_args()
layers = [nn.Linear(1024, 1024, bias=False) for _ in range(4)]
model = nn.Sequential(*layers)
engine, _, loader, _ = deepspeed.initialize(
    args=options, model=model, model_parameters=model.parameters(),
    training_data=torch.utils.data.TensorDataset(torch.zeros(256, 1024)),
)
for (data,) in loader:
    engine.backward(engine(data.to(engine.device)).square().mean())
    engine.step()
"""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "train.py").write_text(SCRIPT)
    for stage in range(4):
        zero = {"stage": stage, "reduce_bucket_size": 1 << 20}
        adam = {"type": "AdamW", "params": {"lr": 1e-3, "torch_adam": True}}
        config = {"train_micro_batch_size_per_gpu": 8, "optimizer": adam, "zero_optimization": zero}
        (tmp_path / f"zero{stage}.json").write_text(json.dumps(config))
    (tmp_path / "bad.json").write_text("{")
    return tmp_path


def test_how_many_it_starts(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(folder)
    found = deepspeed(["--num_gpus", "2", "train.py", "--lr", "1"], 8)
    assert (found.processes, found.words, found.per_gpu) == (2, 3, False)
    assert found.arguments == ("--local_rank=0",)
    assert found.variables["WORLD_SIZE"] == "2"
    every = deepspeed(["--no_local_rank", "train.py"], 8)
    assert (every.processes, every.per_gpu, every.arguments) == (8, True, ())
    Path("hosts").write_text("one slots=4\ntwo slots=4\n")
    hosts = deepspeed(["--hostfile", "hosts", "train.py"], 8)
    assert (hosts.processes, hosts.machines) == (8, 2)


@pytest.mark.parametrize("words", ["--deepspeed_config bad.json", "--deepspeed bad.json"])
def test_a_configuration_that_does_not_parse(words: str, folder: Path) -> None:
    command = ("deepspeed", "--num_gpus", "4", "train.py", *words.split())
    refused = trainfit("simulate", "--gpu", "4x RTX 4090", "--", *command, cwd=folder)
    assert refused.returncode == 2
    assert "'bad.json' is not valid JSON" in error_line(refused)
    with pytest.raises(ValueError, match="No such file"):
        check_json("none.json")


def test_each_stage_of_zero_shares_more(folder: Path) -> None:
    """Kinds of memory at the peak, by DeepSpeed's own partitions."""
    state = {}
    for stage in (0, 1, 3):
        command = ("deepspeed", "--num_gpus=4", "train.py", "--deepspeed")
        own = ("--gpu", "4x RTX 4090", "--json", "--steps", "3")
        config = ("--deepspeed_config", f"zero{stage}.json")
        done = trainfit("simulate", *own, "--", *command, *config, cwd=folder)
        assert done.returncode == 0, done.stderr
        state[stage] = json_of(done)["by_kind_bytes"]["optimizer_state"]
    assert state[0] == pytest.approx(2 * 4 * PARAMETERS, rel=0.01)
    assert state[1] == pytest.approx(2 * PARAMETERS, rel=0.01)
    assert state[3] == pytest.approx(2 * PARAMETERS, rel=0.01)
