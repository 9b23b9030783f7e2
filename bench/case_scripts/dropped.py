import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

data = TensorDataset(torch.randn(1024, 64), torch.randint(0, 10, (1024,)))
model = nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 10)).cuda()
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
for _ in range(4):
    for number, (x, y) in enumerate(DataLoader(data, 16, shuffle=True), 1):
        optimizer.zero_grad()
        (nn.functional.cross_entropy(model(x.cuda()), y.cuda()) / 4).backward()
        if number % 4 == 0:
            optimizer.step()
