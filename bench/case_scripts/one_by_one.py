import torch
import torch.nn as nn
import torch.nn.functional as F
from torch.utils.data import DataLoader, TensorDataset

dev = torch.device("cuda" if torch.cuda.is_available() else "cpu")


def augment(batch):
    out = []
    for image in batch:
        if torch.rand(1) < 0.5:
            image = image.flip(-1)
        image = image * (0.8 + 0.4 * torch.rand(1, device=dev)) + 0.1 * torch.randn_like(image)
        out.append(image.clamp(0, 1))
    return torch.stack(out)


net = nn.Sequential(
    nn.Conv2d(3, 16, 3, stride=2),
    nn.ReLU(),
    nn.AdaptiveAvgPool2d(1),
    nn.Flatten(),
    nn.Linear(16, 10),
).to(dev)
opt = torch.optim.SGD(net.parameters(), 0.1)
for _ in range(3):
    for x, y in DataLoader(
        TensorDataset(torch.rand(5120, 3, 32, 32), torch.randint(0, 10, (5120,))), 512, shuffle=True
    ):
        x = augment(x.to(dev))
        opt.zero_grad()
        F.cross_entropy(net(x), y.to(dev)).backward()
        opt.step()
