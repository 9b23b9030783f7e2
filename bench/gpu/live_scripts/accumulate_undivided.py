import time

import torch
from torch import nn

torch.manual_seed(0)
model = nn.Sequential(
    *[m for _ in range(6) for m in (nn.Linear(1024, 1024), nn.GELU())], nn.Linear(1024, 10)
).cuda()
optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
start = time.time()
for step in range(3000):
    x, y = torch.randn(2048, 1024, device="cuda"), torch.randint(10, (2048,), device="cuda")
    with torch.autocast("cuda", dtype=torch.bfloat16):
        loss = nn.functional.cross_entropy(model(x), y)
    loss.backward()
    if (step + 1) % 4 == 0:
        optimizer.step()
        optimizer.zero_grad()
    if time.time() - start > 3:
        break
