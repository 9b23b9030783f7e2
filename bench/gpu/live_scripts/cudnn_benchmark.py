import random
import time

import torch
from torch import nn

torch.manual_seed(0)
random.seed(0)
torch.backends.cudnn.benchmark = True
model = nn.Sequential(
    nn.Conv2d(3, 64, 3),
    nn.ReLU(),
    *[m for _ in range(5) for m in (nn.Conv2d(64, 64, 3), nn.ReLU())],
    nn.AdaptiveAvgPool2d(1),
    nn.Flatten(),
    nn.Linear(64, 10),
).cuda()
optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
start = time.time()
for _step in range(3000):
    side = random.randrange(96, 288)
    x = torch.randn(16, 3, side, random.randrange(96, 288), device="cuda")
    y = torch.randint(10, (16,), device="cuda")
    with torch.autocast("cuda", dtype=torch.bfloat16):
        loss = nn.functional.cross_entropy(model(x), y)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    if time.time() - start > 4:
        break
