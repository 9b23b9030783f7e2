"""A data set of 64 samples, smaller than the batches that a GPU would like."""

import argparse

import torch
from torch.utils.data import DataLoader

parser = argparse.ArgumentParser()
parser.add_argument("--batch_size", type=int, default=8)
parser.add_argument("--drop_last", action="store_true")
options = parser.parse_args()

model = torch.nn.Sequential(torch.nn.Linear(64, 256), torch.nn.GELU(), torch.nn.Linear(256, 8))
model.cuda()
optimizer = torch.optim.AdamW(model.parameters())
for _ in range(100):
    for batch in DataLoader(torch.randn(64, 64), options.batch_size, drop_last=options.drop_last):
        model(batch.cuda()).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
