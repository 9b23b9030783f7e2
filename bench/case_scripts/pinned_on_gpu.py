import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

data = TensorDataset(torch.randn(4096, 64).cuda(), torch.randint(0, 10, (4096,)).cuda())
model = nn.Sequential(nn.Linear(64, 512), nn.ReLU(), nn.Linear(512, 10)).cuda()
opt = torch.optim.Adam(model.parameters())
for x, y in DataLoader(data, 64, pin_memory=True):
    loss = nn.functional.cross_entropy(model(x), y)
    opt.zero_grad()
    loss.backward()
    opt.step()
