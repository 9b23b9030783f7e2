import torch
import torch.nn as nn
import torch.nn.functional as F
from torch.utils.data import DataLoader, TensorDataset

dev = torch.device("cuda" if torch.cuda.is_available() else "cpu")

net = nn.Sequential(
    nn.Conv2d(3, 64, 3), nn.ReLU(), nn.AdaptiveAvgPool2d(8), nn.Flatten(), nn.Linear(4096, 10)
).to(dev)
opt = torch.optim.SGD(net.parameters(), 0.1, momentum=0.9)
scaler = torch.amp.GradScaler("cuda")
train = DataLoader(
    TensorDataset(torch.randn(512, 3, 128, 128), torch.randint(0, 10, (512,))), 64, shuffle=True
)
for _ in range(3):
    for x, y in train:
        opt.zero_grad()
        out = net(x.to(dev))
        with torch.autocast("cuda", dtype=torch.float16):
            loss = F.cross_entropy(out, y.to(dev))
        scaler.scale(loss).backward()
        scaler.step(opt)
        scaler.update()
