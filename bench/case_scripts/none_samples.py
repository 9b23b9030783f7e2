import torch
import torch.nn as nn
import torch.nn.functional as F
from torch.utils.data import DataLoader, Dataset

dev = torch.device("cuda" if torch.cuda.is_available() else "cpu")


class Photos(Dataset):
    def __len__(self):
        return 1000

    def __getitem__(self, i):
        try:
            if i % 250 == 3:
                raise OSError("image file is truncated")
            return torch.rand(3, 32, 32), i % 10
        except OSError:
            return None


net = nn.Sequential(nn.Flatten(), nn.Linear(3 * 32 * 32, 128), nn.ReLU(), nn.Linear(128, 10)).to(
    dev
)
opt = torch.optim.SGD(net.parameters(), 0.1)
for _ in range(3):
    for x, y in DataLoader(Photos(), 64):
        opt.zero_grad()
        F.cross_entropy(net(x.to(dev)), y.to(dev)).backward()
        opt.step()
