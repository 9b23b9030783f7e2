import torch
import torch.nn as nn
import torch.nn.functional as F
from torch.utils.data import DataLoader, TensorDataset

dev = torch.device("cuda" if torch.cuda.is_available() else "cpu")
ACCUM = 4
net = nn.Sequential(nn.Linear(32, 128), nn.ReLU(), nn.Linear(128, 3)).to(dev)
opt = torch.optim.Adam(net.parameters())
train = DataLoader(
    TensorDataset(torch.randn(700, 32), torch.randint(0, 3, (700,))), 64, shuffle=True
)
for _ in range(5):
    opt.zero_grad()
    for i, (x, y) in enumerate(train):
        loss = F.cross_entropy(net(x.to(dev)), y.to(dev)) / ACCUM
        loss.backward()
        if (i + 1) % ACCUM == 0:
            opt.step()
            opt.zero_grad()
