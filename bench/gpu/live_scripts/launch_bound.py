import time

import torch
from torch import nn

torch.manual_seed(0)
model = nn.Sequential(
    *[m for _ in range(60) for m in (nn.Linear(64, 64), nn.LayerNorm(64), nn.ReLU())]
).cuda()
optimizer = torch.optim.Adam(model.parameters(), lr=1e-3, foreach=False)
x = torch.randn(32, 64, device="cuda")
start = time.time()
for step in range(4000):
    loss = nn.functional.mse_loss(model(x), x)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    if step % 50 == 49:
        print(step, loss.item())
        if time.time() - start > 3:
            break
