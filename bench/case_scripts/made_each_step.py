import torch
import torch.nn as nn
import torch.nn.functional as F
from torch.utils.data import DataLoader, TensorDataset

dev = torch.device("cuda" if torch.cuda.is_available() else "cpu")
net = nn.Sequential(nn.Linear(32, 128), nn.ReLU(), nn.Linear(128, 3)).to(dev)


def train_step(x, y, lr):
    optimizer = torch.optim.Adam(net.parameters(), lr=lr)
    optimizer.zero_grad()
    loss = F.cross_entropy(net(x), y)
    loss.backward()
    optimizer.step()
    return loss.item()


train = DataLoader(
    TensorDataset(torch.randn(6400, 32), torch.randint(0, 3, (6400,))), 64, shuffle=True
)
for _ in range(4):
    for x, y in train:
        train_step(x.to(dev), y.to(dev), 1e-3)
