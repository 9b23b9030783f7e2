"""Generates with a cache that grows by a token a call; --tokens, --rounds."""

import argparse

import torch

parser = argparse.ArgumentParser()
parser.add_argument("--tokens", type=int, default=150)
parser.add_argument("--rounds", type=int, default=2)
parser.add_argument("--batch_size", type=int, default=4)
options = parser.parse_args()


class Model(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(256, 256)
        self.cache: torch.Tensor | None = None

    def forward(self, x: torch.Tensor) -> None:
        x = self.layer(x)
        self.cache = x if self.cache is None else torch.cat([self.cache, x], 1)


model = Model().cuda().eval()
with torch.no_grad():
    for _ in range(options.rounds):
        model.cache = None
        model(torch.zeros(options.batch_size, 32, 256, device="cuda"))
        for _ in range(options.tokens):
            model(torch.zeros(options.batch_size, 1, 256, device="cuda"))
