import time

import torch
from torch import nn

torch.manual_seed(0)
model = nn.DataParallel(
    nn.Sequential(*[m for _ in range(8) for m in (nn.Linear(2048, 2048), nn.GELU())]).cuda()
)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
start = time.time()
for _step in range(3000):
    x = torch.randn(8192, 2048, device="cuda")
    with torch.autocast("cuda", dtype=torch.bfloat16):
        loss = nn.functional.mse_loss(model(x).float(), x)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    if time.time() - start > 3:
        break
