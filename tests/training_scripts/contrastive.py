"""A contrastive loss: its logits grow with the square of the batch size."""

import argparse

import torch
from torch.utils.data import DataLoader

parser = argparse.ArgumentParser()
parser.add_argument("--batch_size", type=int, default=256)
options = parser.parse_args()

model = torch.nn.Linear(64, 64).cuda()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for batch in DataLoader(torch.randn(100_000, 64), options.batch_size):
    features = torch.nn.functional.normalize(model(batch.cuda()), dim=-1)
    targets = torch.arange(len(features), device="cuda")
    torch.nn.functional.cross_entropy(features @ features.T, targets).backward()
    optimizer.step()
    optimizer.zero_grad()
