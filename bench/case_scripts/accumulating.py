import argparse

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

data = TensorDataset(torch.randn(1024, 64), torch.randint(0, 10, (1024,)))
parser = argparse.ArgumentParser()
parser.add_argument("--batch-size", type=int, default=8)
parser.add_argument("--accumulate", type=int, default=4)
options = parser.parse_args()
model = nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 10)).cuda()
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
for _ in range(2):
    for number, (x, y) in enumerate(DataLoader(data, options.batch_size, shuffle=True), 1):
        loss = nn.functional.cross_entropy(model(x.cuda()), y.cuda())
        loss.backward()
        if number % options.accumulate == 0:
            optimizer.step()
            optimizer.zero_grad()
