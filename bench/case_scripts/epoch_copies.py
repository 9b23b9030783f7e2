import copy

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

data = TensorDataset(torch.randn(256, 1024), torch.randint(0, 10, (256,)))
model = nn.Sequential(nn.Linear(1024, 4096), nn.ReLU(), nn.Linear(4096, 10)).cuda()
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
snapshots = []
for _ in range(2000):
    model.train()
    for x, y in DataLoader(data, 32, shuffle=True):
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(x.cuda()), y.cuda()).backward()
        optimizer.step()
    model.eval()
    with torch.no_grad():
        right = sum((model(x.cuda()).argmax(1).cpu() == y).sum() for x, y in DataLoader(data, 32))
    snapshots.append((int(right), copy.deepcopy(model.state_dict())))
