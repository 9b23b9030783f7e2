import torch
from common import Images, batches, train
from torch import nn


class Mixed(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(3072, 2048), nn.Parameter(torch.zeros(2048, 10))

    def forward(self, x):
        with torch.autocast("cpu", dtype=torch.bfloat16):
            hidden = self.first(x.flatten(1))
        return hidden @ self.second


if __name__ == "__main__":
    train(batches(Images(), num_workers=1), model=Mixed())
