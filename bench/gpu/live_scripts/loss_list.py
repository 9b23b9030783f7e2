import time

import torch
from torch import nn

torch.manual_seed(0)
model = nn.Sequential(*[m for _ in range(10) for m in (nn.Linear(1024, 1024), nn.GELU())]).cuda()
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
losses = []
start = time.time()
for _step in range(300):
    x = torch.randn(512, 1024, device="cuda")
    loss = nn.functional.mse_loss(model(x), x)
    losses.append(loss)
    optimizer.zero_grad()
    loss.backward(retain_graph=True)
    optimizer.step()
    time.sleep(0.005)
    if time.time() - start > 3:
        break
print(sum(losses).item() / len(losses))
