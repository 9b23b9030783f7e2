"""What a plan says of an epoch's evaluation, which no training step contains."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.helpers_cli import json_of, trainfit

_SCRIPT = """
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
train = TensorDataset(torch.zeros(2048, 64), torch.zeros(2048, dtype=torch.long))
val = TensorDataset(torch.zeros(20_000, 64))
model = nn.Linear(64, 10_000).cuda()
opt = torch.optim.SGD(model.parameters())
for epoch in range(2):
    for x, y in DataLoader(train, batch_size=64):
        opt.zero_grad()
        nn.functional.cross_entropy(model(x.cuda()), y.cuda()).backward()
        opt.step()
    {evaluation}
"""
_EVALUATION = """model.eval()
    kept = []
    with torch.no_grad():
        for (x,) in DataLoader(val, batch_size=64, num_workers={workers}):
            kept.append({kept})
    model.train()"""


def _planned(folder: Path, evaluation: str) -> dict[str, Any]:
    script = folder / "train.py"
    script.write_text(_SCRIPT.replace("{evaluation}", evaluation))
    arguments = ["plan", "--no-loader", "--gpu", "GTX 1060 3GB", "--json", "--", "python"]
    found = trainfit(*arguments, script, cwd=folder)
    return json_of(found)


@pytest.mark.parametrize("workers", [0, 2])
def test_predictions_kept(tmp_path: Path, workers: int) -> None:
    """313 batches of 64 × 10,000 numbers are kept: 800 MB that no step has."""
    text = _EVALUATION.format(kept="model(x.cuda())", workers=workers)
    end = _planned(tmp_path, text)["epoch_end"]
    assert (end["evaluation"], end["batches"]) == ("simulated", 313)
    assert end["batch_bytes"] == pytest.approx(64 * 10_000 * 4, rel=0.1)
    assert end["allocated_bytes"] == pytest.approx(20_032 * 10_000 * 4, rel=0.1)


def test_too_many_kept(tmp_path: Path) -> None:
    text = _EVALUATION.format(kept="model(x.cuda()).double().repeat(1, 4)", workers=0)
    found = _planned(tmp_path, text)
    assert found["epoch_end"]["fits"] is False
    kinds = [(each["kind"], each["place"]["line"]) for each in found["findings"][:1]]
    assert kinds == [("tensors_kept", 18)]


def test_nothing_kept(tmp_path: Path) -> None:
    end = _planned(tmp_path, _EVALUATION.format(kept="model(x.cuda()).cpu()", workers=0))[
        "epoch_end"
    ]
    assert (end["evaluation"], end["batch_bytes"], end["fits"]) == ("simulated", 0, True)


def test_no_evaluation(tmp_path: Path) -> None:
    assert _planned(tmp_path, "pass")["epoch_end"]["evaluation"] == "none"
