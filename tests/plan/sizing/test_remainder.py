"""One sample that is left over at the end of an epoch."""

from __future__ import annotations

from pathlib import Path

import pytest

from trainfit.hardware import find_gpu
from trainfit.plan import planner
from trainfit.plan.command.parsing import parse_command
from trainfit.plan.first_run import Settings
from trainfit.report.sections.plan_facts import answer
from trainfit.results.findings import LAST_BATCH

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
@pytest.mark.usefixtures("brief_with_ends")
def test_a_script_that_fails_with_the_sample_that_is_left(
    samples: int, norm: str, drop: bool, is_said: bool, tmp_path: Path
) -> None:
    script = tmp_path / "train.py"
    script.write_text(SCRIPT.format(samples=samples, norm=norm, drop=drop))
    command = parse_command(["python", str(script), "{batch_size:8}"])
    result = planner.simulated(command, find_gpu("T4"), Settings()).result
    said = [each for each in result.findings if each.kind == LAST_BATCH]
    if not is_said:
        assert not said
        return
    (found,) = said
    assert found.is_critical and found.place is not None and found.place.line == 13
    assert found.fixes[0].action == (
        "set drop_last=True in the DataLoader, or a batch size of 7 or 9"
    )
    assert "an epoch has 1 sample (33 = 4 × 8 + 1), with which the script failed at " in found.title
    assert "train.py:13 (ValueError: Expected more than 1 value per channel" in found.title
    assert "but the last batch of an epoch fails." in answer(result)


@pytest.mark.slow
@pytest.mark.usefixtures("warm")
@pytest.mark.usefixtures("brief_with_ends")
def test_a_state_of_the_batch_size_does_not_match_what_is_left(tmp_path: Path) -> None:
    """Not a single sample, but three of eight."""
    script = tmp_path / "train.py"
    text = SCRIPT.format(samples=35, norm="nn.LayerNorm(4)", drop=False)
    script.write_text(
        text.replace("model(x.cuda())", "(model(x.cuda()) + torch.ones(8, 1).cuda())")
    )
    command = parse_command(["python", str(script), "8"])
    result = planner.simulated(command, find_gpu("T4"), Settings()).result
    (found,) = (each for each in result.findings if each.kind == LAST_BATCH)
    assert "an epoch has 3 samples (35 = 4 × 8 + 3), with which " in found.title
    assert (
        found.fixes[0].action == "set drop_last=True in the DataLoader, or a batch size of 7 or 5"
    )
