import time

import torch
from torch import nn

torch.manual_seed(0)
model = nn.Sequential(*[m for _ in range(30) for m in (nn.Linear(512, 512), nn.GELU())]).cuda()
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
times = {"forward": 0.0, "backward": 0.0}
start = time.time()
for _step in range(3000):
    x = torch.randn(1024, 512, device="cuda")
    t0 = time.time()
    loss = nn.functional.mse_loss(model(x), x)
    torch.cuda.synchronize()
    t1 = time.time()
    optimizer.zero_grad()
    loss.backward()
    torch.cuda.synchronize()
    times["forward"] += t1 - t0
    times["backward"] += time.time() - t1
    optimizer.step()
    torch.cuda.synchronize()
    if time.time() - start > 3:
        break
print(times)
