"""What the scripts that run have in common: a small network, a data set, a loop."""

import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset

torch.manual_seed(0)
torch.set_num_threads(1)


IMAGES = torch.rand(100, 3, 32, 32)


class Images(Dataset):
    """A sample costs some microseconds."""

    def __len__(self):
        return 100_000

    def __getitem__(self, index):
        return IMAGES[index % 100], index % 10


def network(width=32):
    return nn.Sequential(
        nn.Conv2d(3, width, 3, padding=1), nn.ReLU(),
        nn.Conv2d(width, width, 3, padding=1), nn.ReLU(),
        nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(width, 10),
    )  # fmt: skip


def train(loader, steps=80, rate=0.01, each=None, model=None):
    """So many steps; ``each`` is called after each, with its number, the model and the loss."""
    model = model or network()
    optimizer = torch.optim.SGD(model.parameters(), lr=rate)
    for number, (x, y) in enumerate(loader, 1):
        loss = nn.functional.cross_entropy(model(x), y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if each is not None:
            each(number, model, loss)
        if number == steps:
            return


def batches(data, size=16, **options):
    return DataLoader(data, size, **options)
