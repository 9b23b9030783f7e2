import time

import torch
from torch import nn

torch.manual_seed(0)
model = nn.Sequential(*[m for _ in range(10) for m in (nn.Linear(1024, 1024), nn.GELU())]).cuda()
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
start = time.time()
for epoch in range(100):
    for _step in range(20):
        x = torch.randn(1024, 1024, device="cuda")
        loss = nn.functional.mse_loss(model(x), x)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    model.eval()
    total = 0
    for _step in range(60):
        x = torch.randn(1024, 1024, device="cuda")
        total = total + nn.functional.mse_loss(model(x), x)
    model.train()
    print(epoch, loss.item(), total.item() / 60)
    if time.time() - start > 3:
        break
