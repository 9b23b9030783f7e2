"""Rebuilds its DataLoader around the same batch sampler, as Accelerate's prepare() does."""

import torch
from torch.utils.data import DataLoader


def prepare(loader):
    return DataLoader(
        loader.dataset, batch_sampler=loader.batch_sampler, num_workers=loader.num_workers
    )


loader = prepare(DataLoader(torch.randn(512, 64, 256), batch_size=16, shuffle=True))
model = torch.nn.Sequential(*(torch.nn.Linear(256, 256) for _ in range(6))).cuda()
optimizer = torch.optim.Adam(model.parameters())
for batch in loader:
    model(batch.cuda()).pow(2).mean().backward()
    optimizer.step()
    optimizer.zero_grad()
