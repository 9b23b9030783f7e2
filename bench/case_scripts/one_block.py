import torch
import torch.nn as nn
import torch.nn.functional as F
from torch.utils.data import DataLoader, TensorDataset

dev = torch.device("cuda" if torch.cuda.is_available() else "cpu")


class Block(nn.Module):
    def __init__(self, d):
        super().__init__()
        self.a, self.b = nn.Linear(d, 4 * d), nn.Linear(4 * d, d)

    def forward(self, x):
        return x + self.b(F.gelu(self.a(x)))


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.inp = nn.Linear(32, 256)
        self.blocks = nn.ModuleList([Block(256)] * 6)
        self.out = nn.Linear(256, 10)

    def forward(self, x):
        x = self.inp(x)
        for b in self.blocks:
            x = b(x)
        return self.out(x)


net = Net().to(dev)
opt = torch.optim.AdamW(net.parameters())
dl = DataLoader(
    TensorDataset(torch.randn(640, 32), torch.randint(0, 10, (640,))), batch_size=64, shuffle=True
)
for _ in range(3):
    for x, y in dl:
        opt.zero_grad()
        F.cross_entropy(net(x.to(dev)), y.to(dev)).backward()
        opt.step()
