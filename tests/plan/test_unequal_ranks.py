"""A job whose ranks have batches of different sizes."""

from __future__ import annotations

from pathlib import Path

import pytest

from helpers_cli import json_of, trainfit

pytestmark = pytest.mark.usefixtures("warm")

SCRIPT = """
import os, torch, torch.distributed as dist
torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
dist.init_process_group("nccl")
model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(512, 512).cuda())
optimizer = torch.optim.SGD(model.parameters())
batch = 32 if dist.get_rank() == 0 else 96
data = torch.utils.data.TensorDataset(torch.randn(batch * 10, 512))
for (x,) in torch.utils.data.DataLoader(data, batch):
    model(x.cuda().repeat(1000, 1)).square().mean().backward()
    optimizer.step()
"""


@pytest.mark.slow
@pytest.mark.usefixtures("brief")
def test_memory_is_that_of_the_rank_that_needs_the_most(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(SCRIPT)
    line = ("torchrun", "--nproc-per-node=2", "train.py")
    words = ("plan", "--no-loader", "--gpu=2x RTX 4090", "--json", "--", *line)
    result = json_of(trainfit(*words, cwd=tmp_path))
    rows = 96_000 * 512 * 4  # bytes of the output of rank 1
    assert result["now"]["memory"]["allocated_bytes"] > 3 * rows
    assert result["now"]["largest_batch"] is None and result["now"]["recommended_batch"] is None
    assert (result["now"]["rank"], result["now"]["batch_size"]) == (1, 96)
    assert "rank 1" in result["basis_detail"]
    assert any("those of rank 1" in each for each in result["notes"])
