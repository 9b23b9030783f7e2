"""A data set whose samples each take a product of matrices: every worker starts BLAS' threads."""

from __future__ import annotations

import argparse

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset

parser = argparse.ArgumentParser()
parser.add_argument("--num_workers", type=int, default=2)
parser.add_argument("--width", type=int, default=400)


class Products(Dataset[Tensor]):
    """Rows of a matrix's square."""

    def __init__(self, width: int) -> None:
        self.matrix = np.random.default_rng(0).random((width, width))

    def __len__(self) -> int:
        return 100_000

    def __getitem__(self, index: int) -> Tensor:
        product = self.matrix @ self.matrix + index
        return torch.from_numpy(product[0].astype("float32"))


def main() -> None:
    options = parser.parse_args()
    model = nn.Linear(options.width, 8).cuda()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    loader = DataLoader(Products(options.width), batch_size=8, num_workers=options.num_workers)
    for batch in loader:
        model(batch.cuda()).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()


if __name__ == "__main__":
    main()
