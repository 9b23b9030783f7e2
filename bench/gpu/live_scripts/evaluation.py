import time

import torch
from torch import nn

torch.manual_seed(0)
model = nn.Sequential(*[m for _ in range(8) for m in (nn.Linear(1024, 1024), nn.GELU())]).cuda()
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
held_out = torch.randn(200, 1024, 1024)


def evaluate():
    model.eval()
    total = 0.0
    with torch.no_grad():
        for batch in held_out:
            batch = batch.cuda()
            total += nn.functional.mse_loss(model(batch), batch).item()
    model.train()
    return total / len(held_out)


start = time.time()
for step in range(2000):
    x = torch.randn(1024, 1024, device="cuda")
    loss = nn.functional.mse_loss(model(x), x)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    if step % 25 == 24:
        print(step, evaluate())
        if time.time() - start > 4:
            break
