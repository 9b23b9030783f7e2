"""Memory that each epoch leaves behind, and where a step's comes from."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn

import trainfit
from trainfit.hardware import find_gpu
from trainfit.memory.growth import left_by_epochs
from trainfit.plan import planner
from trainfit.plan.command.parsing import parse_command
from trainfit.plan.first_run import Settings
from trainfit.report.sections.plan_facts import answer
from trainfit.results.findings import EPOCH_GROWTH
from trainfit.results.runs.recording import Recording

MIB = 1 << 20
SCRIPT = """
import copy
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

data = DataLoader(TensorDataset(torch.rand(64, 512)), batch_size=8)
model = nn.Linear(512, 4096).cuda()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
kept = []
for _ in range(90):
    model.train()
    for (x,) in data:
        optimizer.zero_grad()
        model(x.cuda()).sum().backward()
        optimizer.step()
    model.eval()
    with torch.no_grad():
        for (x,) in data:
            model(x.cuda())
    {keep}
"""


def recorded(*, kept: str) -> Recording:
    """Four epochs of two steps, with 4 MiB of each epoch (of the first one alone) kept."""
    with trainfit.simulate("T4") as sim:
        model = nn.Linear(8, 8).cuda()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        left = []
        for epoch in range(4):
            for _ in range(2):
                optimizer.zero_grad()
                model(torch.randn(2, 8).cuda()).sum().backward()
                optimizer.step()
            if kept == "each" or epoch == 0:
                left.append(torch.zeros(MIB).cuda())
    return sim.recording


def test_what_each_epoch_leaves_and_where() -> None:
    (source,) = left_by_epochs(recorded(kept="each"), 2)
    assert source.bytes_per_step == 4 * MIB
    assert source.line is not None and source.line.startswith(__file__)
    assert left_by_epochs(recorded(kept="first"), 2) == ()


@pytest.mark.slow
@pytest.mark.usefixtures("warm")
@pytest.mark.parametrize(
    ("keep", "grows"),
    [
        ("kept.append(copy.deepcopy(model.state_dict()))", True),
        pytest.param("best = copy.deepcopy(model.state_dict())", False, marks=pytest.mark.slow),
    ],
)
@pytest.mark.usefixtures("brief_with_ends")
def test_a_copy_of_the_model_from_each_epoch(keep: str, grows: bool, tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(SCRIPT.format(keep=keep))
    result = planner.simulated(
        parse_command(["python", str(script)]), find_gpu("T4"), Settings()
    ).result
    said = [each for each in result.findings if each.kind == EPOCH_GROWTH]
    assert bool(said) == grows
    if grows:
        (found,) = said
        assert found.is_critical and found.place is not None and found.place.line == 21
        assert "Memory grows by 8 MiB with each epoch: full after about " in found.title
        assert answer(result).startswith("Fits at first: ")
        assert f"memory grows with each epoch: full after {found.subject}." in answer(result)
