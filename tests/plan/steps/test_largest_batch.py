"""Memory that depends on the data: a plan is sized for the data set's largest batch."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.helpers_cli import json_of, trainfit

_SCRIPT = """
import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset, IterableDataset
MANY = {many}

class Boxes(Dataset):
    def __len__(self):
        return 400

    def __getitem__(self, i):
        return torch.zeros(64), torch.rand(MANY if i == 399 else 2, 4), "a" * (i % 9)

class Stream(IterableDataset):
    def __iter__(self):
        return (Boxes()[i] for i in range(400))

def padded(samples):
    images, boxes, _ = zip(*samples)
    boxes = nn.utils.rnn.pad_sequence(list(boxes), batch_first=True)
    return torch.stack(images), boxes

def stacked(samples):
    images, boxes, names = zip(*samples)
    return torch.stack(images), torch.stack(boxes), names

net = nn.Linear(64, 4 * 1000).cuda()
opt = torch.optim.SGD(net.parameters(), lr=0.01)
for images, boxes, *_ in DataLoader({data}, batch_size=16, collate_fn={collate}):
    predicted = net(images.cuda()).view(len(images), 1000, 1, 4)
    loss = (predicted - boxes.cuda()[:, None]).abs().sum(-1).min(2).values.mean()
    opt.zero_grad()
    loss.backward()
    opt.step()
"""


def _planned(folder: Path, **values: Any) -> dict[str, Any]:
    script = folder / "train.py"
    text = _SCRIPT
    for name, value in {"many": 2, "data": "Boxes()", "collate": "padded", **values}.items():
        text = text.replace(f"{{{name}}}", str(value))
    script.write_text(text)
    arguments = ["plan", "--no-loader", "--gpu", "RTX 3060 8GB", "--json", "--", "python"]
    return json_of(trainfit(*arguments, script, cwd=folder))


@pytest.mark.usefixtures("brief")
def test_the_densest_batch(tmp_path: Path) -> None:
    """The last image of 400 has 500 boxes: 16 × 1,000 × 500 × 4 numbers, and more of their size."""
    found = _planned(tmp_path, many=500)
    assert found["shapes"]["longest_elements"] >= 2000
    assert found["now"]["memory"]["allocated_bytes"] > 2 * 16 * 1000 * 500 * 4 * 4
    assert 100 < found["now"]["largest_batch"] < 400  # some 24 MB a sample
    # Steps are timed with usual batches.
    assert found["shapes"]["typical_step_s"] < found["shapes"]["longest_step_s"] / 5


@pytest.mark.parametrize("collate", ["padded", "stacked"])
@pytest.mark.usefixtures("brief")
def test_names_of_different_length_are_no_reason(tmp_path: Path, collate: str) -> None:
    assert _planned(tmp_path, collate=collate)["shapes"] is None


@pytest.mark.usefixtures("brief")
def test_a_stream_tells_nothing_of_what_comes(tmp_path: Path) -> None:
    found = _planned(tmp_path, data="Stream()")
    assert found["shapes"]["reason"].startswith("its data set is iterable")
    assert found["now"]["largest_batch"] > 1000  # as far as is known
