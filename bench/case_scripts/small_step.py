import argparse

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

data = TensorDataset(torch.randn(1024, 64), torch.randint(0, 10, (1024,)))
parser = argparse.ArgumentParser()
parser.add_argument("--batch-size", type=int, default=8)
options = parser.parse_args()
model = nn.Linear(64, 10).cuda()
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
for _ in range(2):
    for x, y in DataLoader(data, options.batch_size, shuffle=True):
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(x.cuda()), y.cuda()).backward()
        optimizer.step()
