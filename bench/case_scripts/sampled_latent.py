import torch
import torch.nn as nn
import torch.nn.functional as F
from torch.utils.data import DataLoader, TensorDataset

dev = torch.device("cuda" if torch.cuda.is_available() else "cpu")


class VAE(nn.Module):
    def __init__(self):
        super().__init__()
        self.enc = nn.Sequential(nn.Linear(784, 256), nn.ReLU())
        self.mu = nn.Linear(256, 16)
        self.ls = nn.Linear(256, 16)
        self.dec = nn.Sequential(nn.Linear(16, 256), nn.ReLU(), nn.Linear(256, 784))

    def forward(self, x):
        h = self.enc(x)
        q = torch.distributions.Normal(self.mu(h), self.ls(h).exp())
        return self.dec(q.sample()), q


net = VAE().to(dev)
opt = torch.optim.Adam(net.parameters())
prior = torch.distributions.Normal(torch.zeros(16, device=dev), torch.ones(16, device=dev))
for _ in range(3):
    for (x,) in DataLoader(TensorDataset(torch.rand(2000, 784)), 100, shuffle=True):
        x = x.to(dev)
        out, q = net(x)
        loss = (
            F.binary_cross_entropy_with_logits(out, x, reduction="sum")
            + torch.distributions.kl_divergence(q, prior).sum()
        )
        opt.zero_grad()
        loss.backward()
        opt.step()
