import time

import torch
from torch import nn

torch.manual_seed(0)
model = nn.Sequential(nn.Linear(256, 1024), nn.ReLU(), nn.Linear(1024, 256)).cuda().half()
optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
start = time.time()
for step in range(2000):
    x = torch.randn(512, 256, device="cuda", dtype=torch.float16) * 100
    loss = (model(x) - x).pow(2).mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    if step % 100 == 99:
        print(step, loss.item())
    if time.time() - start > 2.5:
        break
