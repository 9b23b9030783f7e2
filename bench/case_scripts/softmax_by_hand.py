import torch
import torch.nn as nn
from torch.utils.data import DataLoader, TensorDataset

dev = torch.device("cuda" if torch.cuda.is_available() else "cpu")


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.body = nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 10))

    def forward(self, x):
        e = torch.exp(self.body(x))
        return e / e.sum(1, keepdim=True)


net = Net().to(dev)
opt = torch.optim.SGD(net.parameters(), 0.1)
for _ in range(3):
    for x, y in DataLoader(
        TensorDataset(torch.randn(640, 64), torch.randint(0, 10, (640,))), 64, shuffle=True
    ):
        p = net(x.to(dev))
        loss = -torch.log(p[torch.arange(len(x), device=dev), y.to(dev)]).mean()
        opt.zero_grad()
        loss.backward()
        opt.step()
