"""Evaluates a network on batches of samples; --mode: how gradients are (not) recorded."""

import argparse
import contextlib

import torch
from torch.utils.data import DataLoader, TensorDataset

parser = argparse.ArgumentParser()
parser.add_argument("--batch_size", type=int, default=64)
parser.add_argument("--mode", choices=["grad", "no_grad", "inference_mode"], default="grad")
options = parser.parse_args()

model = torch.nn.Sequential(
    *(layer for _ in range(8) for layer in (torch.nn.Linear(1024, 1024), torch.nn.Sigmoid()))
)
model.eval().cuda()
modes = {
    "grad": contextlib.nullcontext,
    "no_grad": torch.no_grad,
    "inference_mode": torch.inference_mode,
}
right = torch.zeros((), device="cuda")
for (batch,) in DataLoader(TensorDataset(torch.randn(4096, 1024)), options.batch_size):
    with modes[options.mode]():
        right += model(batch.cuda()).sum().detach()
print("sum", right.item())
