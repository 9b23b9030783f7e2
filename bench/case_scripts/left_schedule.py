import torch
import torch.nn as nn
import torch.nn.functional as F
from torch.utils.data import DataLoader, TensorDataset

dev = torch.device("cuda" if torch.cuda.is_available() else "cpu")
net = nn.Sequential(nn.Linear(32, 128), nn.ReLU(), nn.Linear(128, 3)).to(dev)
optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=2, gamma=0.1)
optimizer = torch.optim.AdamW(net.parameters(), lr=1e-2, weight_decay=0.01)
train = DataLoader(
    TensorDataset(torch.randn(192, 32), torch.randint(0, 3, (192,))), 64, shuffle=True
)
for _ in range(10):
    for x, y in train:
        optimizer.zero_grad()
        F.cross_entropy(net(x.to(dev)), y.to(dev)).backward()
        optimizer.step()
    scheduler.step()
