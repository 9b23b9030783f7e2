"""One sample that is left over at the end of an epoch."""

from __future__ import annotations

from pathlib import Path

import pytest

from trainfit.hardware import find_gpu
from trainfit.plan import planner
from trainfit.plan.command.parsing import parse_command
from trainfit.plan.first_run import Settings

SCRIPT = """
import sys
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

data = TensorDataset(torch.rand({samples}, 4))
model = nn.Sequential(nn.Linear(4, 4), {norm}, nn.Linear(4, 1)).cuda()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for _ in range(9):
    for (x,) in DataLoader(data, batch_size=int(sys.argv[1]), drop_last={drop}):
        optimizer.zero_grad()
        model(x.cuda()).sum().backward()
        optimizer.step()
"""


@pytest.mark.usefixtures("warm")
@pytest.mark.parametrize(
    ("samples", "norm", "drop", "is_said"),
    [
        (33, "nn.BatchNorm1d(4)", False, True),
        pytest.param(33, "nn.BatchNorm1d(4)", True, False, marks=pytest.mark.slow),
        pytest.param(33, "nn.LayerNorm(4)", False, False, marks=pytest.mark.slow),
        pytest.param(34, "nn.BatchNorm1d(4)", False, False, marks=pytest.mark.slow),
    ],
)
def test_a_script_that_fails_with_the_sample_that_is_left(
    samples: int, norm: str, drop: bool, is_said: bool, tmp_path: Path
) -> None:
    script = tmp_path / "train.py"
    script.write_text(SCRIPT.format(samples=samples, norm=norm, drop=drop))
    command = parse_command(["python", str(script), "{batch_size:8}"])
    result = planner.simulated(command, find_gpu("T4"), Settings()).result
    said = [each for each in result.notes if "1 sample" in each]
    if not is_said:
        assert not said
        return
    (note,) = said
    assert result.notes[0] == note
    assert note.startswith("set drop_last=True in the DataLoader, or a batch size of 7 or 9: ")
    assert "an epoch has 1 sample (33 = 4 × 8 + 1), with which the script failed at " in note
    assert "train.py:13 (ValueError: Expected more than 1 value per channel" in note
