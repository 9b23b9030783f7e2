import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

data = TensorDataset(torch.randn(1024, 64), torch.randint(0, 10, (1024,)))


def network():
    return nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 10)).cuda()


model = network()
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
model = network()
for x, y in DataLoader(data, 16, shuffle=True):
    optimizer.zero_grad()
    nn.functional.cross_entropy(model(x.cuda()), y.cuda()).backward()
    optimizer.step()
