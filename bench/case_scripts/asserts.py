import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

data = TensorDataset(torch.randn(1024, 64), torch.randint(0, 10, (1024,)))
model = nn.Linear(64, 10).cuda()
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
for x, y in DataLoader(data, 32):
    x, y = x.cuda(), y.cuda()
    assert (y >= 0).all() and y.max() < 10
    assert torch.isfinite(x).all(), "bad data"
    loss = nn.functional.cross_entropy(model(x), y)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    assert loss.item() < 1e4 and not torch.isnan(loss)
    if loss < 0.01:
        break
