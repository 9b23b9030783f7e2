"""Neither options nor a DataLoader: batches are drawn by hand, of a size that is a constant."""

import torch

steps = 1000
batch_size = 24
rate = 1e-3

model = torch.nn.Sequential(torch.nn.Linear(256, 1024), torch.nn.GELU(), torch.nn.Linear(1024, 256))
model.cuda()
optimizer = torch.optim.AdamW(model.parameters(), rate)
data = torch.randn(100_000, 256)


def batch():
    return data[torch.randint(len(data), (batch_size,))].cuda()


for _ in range(steps):
    given = batch()
    loss = (model(given) - given).square().mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
