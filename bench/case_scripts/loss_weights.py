import torch
import torch.nn as nn
from torch.utils.data import DataLoader, TensorDataset

dev = torch.device("cuda" if torch.cuda.is_available() else "cpu")
counts = torch.tensor([900.0, 80.0, 20.0])
criterion = nn.CrossEntropyLoss(weight=counts.sum() / counts)
net = nn.Sequential(nn.Linear(32, 128), nn.ReLU(), nn.Linear(128, 3)).to(dev)
opt = torch.optim.SGD(net.parameters(), 0.1)
train = DataLoader(
    TensorDataset(torch.randn(640, 32), torch.randint(0, 3, (640,))), 64, shuffle=True
)
for _ in range(3):
    for x, y in train:
        loss = criterion(net(x.to(dev)), y.to(dev))
        opt.zero_grad()
        loss.backward()
        opt.step()
