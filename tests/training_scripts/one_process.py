"""One process and the GPUs that it uses: a model split over two, copies, or one."""

import argparse
import os

import torch
from torch import nn

parser = argparse.ArgumentParser()
parser.add_argument("--batch-size", type=int, default=256)
parser.add_argument("--use", choices=("split", "copies", "first"), default="split")
args = parser.parse_args()
rank = int(os.environ.get("LOCAL_RANK", "0"))


class Split(nn.Module):
    def __init__(self):
        super().__init__()
        self.first = nn.Sequential(nn.Linear(512, 4096), nn.ReLU()).to("cuda:0")
        self.second = nn.Linear(4096, 512).to("cuda:1")

    def forward(self, x):
        return self.second(self.first(x.to("cuda:0")).to("cuda:1"))


if args.use == "split":
    model = Split()
else:
    layers = nn.Sequential(nn.Linear(512, 4096), nn.ReLU(), nn.Linear(4096, 512))
    model = layers.to(rank)
    if args.use == "copies":
        model = nn.DataParallel(model)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for _ in range(4):
    found = model(torch.randn(args.batch_size, 512).to(rank))
    loss = nn.functional.mse_loss(found, torch.zeros_like(found))
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
