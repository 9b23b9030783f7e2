"""Two ways to end before the first optimizer step: too few samples for a batch, or a dry run."""

import sys

import torch
from common import device, options

kind = sys.argv.pop(1)
args = options(64)
gpu = device()
model = torch.nn.Linear(32, 4).to(gpu)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
data = torch.utils.data.TensorDataset(torch.randn(40, 32), torch.randint(0, 4, (40,)))
for x, y in torch.utils.data.DataLoader(data, args.batch_size, drop_last=kind == "few"):
    loss = torch.nn.functional.cross_entropy(model(x.to(gpu)), y.to(gpu))
    loss.backward()
    if kind == "dry":
        print(f"dry run: one batch, loss {loss.item():.3f}")
        break
    optimizer.step()
