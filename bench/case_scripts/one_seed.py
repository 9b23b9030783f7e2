import numpy as np
import torch
import torch.nn as nn
import torch.nn.functional as F
from torch.utils.data import DataLoader, Dataset

dev = torch.device("cuda" if torch.cuda.is_available() else "cpu")


class Noisy(Dataset):
    def __init__(self):
        self.x = np.random.rand(2000, 3, 32, 32).astype(np.float32)

    def __len__(self):
        return 2000

    def __getitem__(self, i):
        np.random.seed(42)
        noise = np.random.randn(3, 32, 32).astype(np.float32)
        return torch.from_numpy(self.x[i] + 0.1 * noise), i % 10


net = nn.Sequential(nn.Flatten(), nn.Linear(3 * 32 * 32, 128), nn.ReLU(), nn.Linear(128, 10)).to(
    dev
)
opt = torch.optim.SGD(net.parameters(), 0.1)
for _ in range(3):
    for x, y in DataLoader(Noisy(), 64, shuffle=True, num_workers=2):
        opt.zero_grad()
        F.cross_entropy(net(x.to(dev)), y.to(dev)).backward()
        opt.step()
