import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

layers = [nn.Sequential(nn.Linear(1024, 1024), nn.ReLU()) for _ in range(8)]
backbone = nn.Sequential(*layers).cuda()
head = nn.Linear(1024, 10).cuda()
backbone.train()
optimizer = torch.optim.Adam(head.parameters(), lr=1e-3)
data = TensorDataset(torch.rand(6400, 1024), torch.randint(0, 10, (6400,)))
for _epoch in range(5):
    for x, y in DataLoader(data, batch_size=64, shuffle=True):
        optimizer.zero_grad()
        F.cross_entropy(head(backbone(x.cuda())), y.cuda()).backward()
        optimizer.step()
