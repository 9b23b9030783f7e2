import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

data = TensorDataset(torch.randn(1024, 64), torch.randint(0, 10, (1024,)))
body = nn.Sequential(nn.Linear(64, 2048), nn.ReLU(), nn.Linear(2048, 2048)).cuda()
head = nn.Linear(2048, 10).cuda()
body.requires_grad_(False)
optimizer = torch.optim.SGD([*body.parameters(), *head.parameters()], lr=0.01)
for x, y in DataLoader(data, 32):
    loss = nn.functional.cross_entropy(head(body(x.cuda())), y.cuda())
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
