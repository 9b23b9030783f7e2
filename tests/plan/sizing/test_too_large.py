"""A job whose weights, gradients and states alone are larger than the GPU."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

import helpers_cli
import trainfit
from trainfit.memory.peak import most_kept_bytes

MIB = 1 << 20
SCRIPT = """
import sys
import torch

batch = int(sys.argv[1].partition("=")[2])
model = torch.nn.Linear(4096, 4096, bias=False).cuda()
optimizer = torch.optim.Adam(model.parameters())
for _ in range(20):
    model(torch.rand(batch, 4096, device="cuda")).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
"""


def test_what_is_kept_whatever_the_batches_are() -> None:
    """64 MiB of weights, as much of gradients, and twice that of Adam's states."""
    with trainfit.simulate("RTX 4090") as simulation:
        model = torch.nn.Linear(4096, 4096, bias=False).cuda()
        optimizer = torch.optim.Adam(model.parameters())
        for _ in range(2):
            model(torch.rand(1024, 4096, device="cuda")).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
            simulation.end_step()
    assert most_kept_bytes(simulation.recording) == pytest.approx(4 * 64 * MIB, rel=1e-3)


@pytest.mark.usefixtures("warm")
@pytest.mark.parametrize(("gpu", "is_told"), [("custom:500MiB", True), ("custom:900MiB", False)])
def test_no_larger_batch_and_no_precision_is_simulated(
    tmp_path: Path, gpu: str, *, is_told: bool
) -> None:
    """The GPU's context needs more than half of it; with 900 MiB small batches fit."""
    (tmp_path / "train.py").write_text(SCRIPT)
    words = ("plan", "--gpu", gpu, "--no-loader", "--no-remedies", "--json", "--")
    done = helpers_cli.trainfit(
        *words, "python", "train.py", "--batch_size={batch_size:4096}", cwd=tmp_path
    )
    plan = helpers_cli.json_of(done)
    assert (plan["now"]["largest_batch"] == 0) is is_told
    assert ("alone need 256 MiB" in plan["basis_detail"]) is is_told
    assert ("AMP" in done.stderr) is not is_told
