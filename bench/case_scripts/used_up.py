import torch
import torch.nn as nn
import torch.nn.functional as F
from torch.utils.data import DataLoader, TensorDataset

dev = torch.device("cuda" if torch.cuda.is_available() else "cpu")
net = nn.Sequential(nn.Linear(32, 128), nn.ReLU(), nn.Linear(128, 3)).to(dev)
opt = torch.optim.SGD(net.parameters(), 0.1)
loader = DataLoader(
    TensorDataset(torch.randn(640, 32), torch.randint(0, 3, (640,))), 64, shuffle=True
)
batches = ((x.to(dev), y.to(dev)) for x, y in loader)
for epoch in range(30):
    total = 0.0
    for x, y in batches:
        loss = F.cross_entropy(net(x), y)
        opt.zero_grad()
        loss.backward()
        opt.step()
        total += loss.item()
    print(epoch, total)
