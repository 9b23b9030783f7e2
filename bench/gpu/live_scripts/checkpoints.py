import os
import tempfile
import time

import torch
from torch import nn

torch.manual_seed(0)
model = nn.Sequential(*[m for _ in range(6) for m in (nn.Linear(2048, 2048), nn.GELU())]).cuda()
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
path = os.path.join(tempfile.gettempdir(), f"checkpoint-{os.getpid()}.pt")
start = time.time()
for step in range(2000):
    x = torch.randn(2048, 2048, device="cuda")
    with torch.autocast("cuda", dtype=torch.bfloat16):
        loss = nn.functional.mse_loss(model(x).float(), x)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    if step % 10 == 9:
        torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, path)
    if time.time() - start > 4:
        break
os.remove(path)
