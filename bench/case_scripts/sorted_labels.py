import torch
import torch.nn as nn
import torch.nn.functional as F
from torch.utils.data import DataLoader, TensorDataset

dev = torch.device("cuda" if torch.cuda.is_available() else "cpu")
x = torch.cat([torch.randn(400, 3, 32, 32) + c / 10 for c in range(10)])
y = torch.arange(10).repeat_interleave(400)
net = nn.Sequential(nn.Flatten(), nn.Linear(3 * 32 * 32, 128), nn.ReLU(), nn.Linear(128, 10)).to(
    dev
)
opt = torch.optim.SGD(net.parameters(), 0.1)
train = DataLoader(TensorDataset(x, y), batch_size=32)
for _ in range(10):
    for x, y in train:
        opt.zero_grad()
        F.cross_entropy(net(x.to(dev)), y.to(dev)).backward()
        opt.step()
