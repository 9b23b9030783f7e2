import time

import torch
from torch import nn

torch.manual_seed(0)
frames = torch.randn(256, 3, 512, 512)
model = nn.Sequential(
    nn.Conv2d(3, 32, 7, stride=4),
    nn.ReLU(),
    nn.AdaptiveAvgPool2d(1),
    nn.Flatten(),
    nn.Linear(32, 10),
).cuda()
optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
start = time.time()
for step in range(500):
    pick = (step % 2) * 128
    x = frames[pick : pick + 128].to("cuda", non_blocking=True)
    y = torch.randint(10, (128,), device="cuda")
    loss = nn.functional.cross_entropy(model(x), y)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    if time.time() - start > 3:
        break
