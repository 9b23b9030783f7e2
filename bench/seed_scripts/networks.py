"""Train a network of torchvision on images that are made up: the seeds' VGG16, ResNets and more.

--evaluate calls the network instead, with gradients recorded, as a first script does;
--keep holds on to every output, as a script does whose memory grows.
"""

from __future__ import annotations

import argparse

import torch
import torchvision
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset


def switch(text: str) -> bool:
    return text in ("true", "1", "yes")


parser = argparse.ArgumentParser()
parser.add_argument("--model", default="resnet18")
parser.add_argument("--batch_size", type=int, default=32)
parser.add_argument("--size", type=int, default=224, help="of images, pixels")
parser.add_argument("--samples", type=int, default=50_000)
parser.add_argument("--optimizer", choices=("sgd", "momentum", "adam"), default="adam")
parser.add_argument("--amp", type=switch, default=False)
parser.add_argument("--keep", action="store_true")
parser.add_argument("--evaluate", action="store_true")


class Images(Dataset[tuple[Tensor, int]]):
    """Grey images, each with a class."""

    def __init__(self, samples: int, size: int) -> None:
        self.samples, self.size = samples, size

    def __len__(self) -> int:
        return self.samples

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        return torch.full((3, self.size, self.size), 0.5), index % 1000


def make_optimizer(name: str, model: nn.Module) -> torch.optim.Optimizer:
    if name == "adam":
        return torch.optim.Adam(model.parameters())
    return torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9 if name == "momentum" else 0)


def main() -> None:
    options = parser.parse_args()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    model = getattr(torchvision.models, options.model)().to(device)
    optimizer = None if options.evaluate else make_optimizer(options.optimizer, model)
    scaler = torch.amp.GradScaler(device.type, enabled=options.amp)
    loader = DataLoader(Images(options.samples, options.size), options.batch_size, drop_last=True)
    kept = []
    if options.evaluate:
        model.eval()
    for images, labels in loader:
        with torch.autocast(device.type, dtype=torch.float16, enabled=options.amp):
            output = model(images.to(device))
        if optimizer is None:
            print(output.argmax(1).sum().item())
            continue
        loss = nn.functional.cross_entropy(output, labels.to(device))
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        if options.keep:
            kept.append((images.to(device), output.detach()))


if __name__ == "__main__":
    main()
