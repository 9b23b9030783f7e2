import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

data = TensorDataset(torch.randn(1024, 64), torch.randint(0, 10, (1024,)))
model = nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 10)).cuda()
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
for x, y in DataLoader(data, 32):
    optimizer.zero_grad()
    nn.functional.cross_entropy(model(x.cuda()), y.cuda()).backward()
    (1e-4 * sum(weight.abs().sum() for weight in model.parameters())).backward()
    optimizer.step()
