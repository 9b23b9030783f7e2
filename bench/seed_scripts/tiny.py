"""Train a network that is too small for a GPU to gain much by it."""

import torch
from torch import nn
from torch.utils.data import DataLoader

device = "cuda" if torch.cuda.is_available() else "cpu"
model = nn.Sequential(nn.Linear(32, 64), nn.ReLU(), nn.Linear(64, 1)).to(device)
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
for _ in range(20):
    for batch in DataLoader(torch.randn(2048, 32), batch_size=32):
        model(batch.to(device)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
