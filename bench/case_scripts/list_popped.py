import random

import torch
import torch.nn as nn
import torch.nn.functional as F

dev = torch.device("cuda" if torch.cuda.is_available() else "cpu")
net = nn.Sequential(nn.Flatten(), nn.Linear(84 * 84 * 4, 256), nn.ReLU(), nn.Linear(256, 4)).to(dev)
opt = torch.optim.Adam(net.parameters())
memory = []
for step in range(100_000):
    s = torch.rand(4, 84, 84).to(dev)
    memory.append((s, step % 4))
    if len(memory) > 1_000_000:
        memory.pop(0)
    if len(memory) < 32:
        continue
    b = random.sample(memory, 32)
    x = torch.stack([t[0] for t in b])
    a = torch.tensor([t[1] for t in b]).to(dev)
    loss = F.cross_entropy(net(x), a)
    opt.zero_grad()
    loss.backward()
    opt.step()
