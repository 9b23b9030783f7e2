import torch
from torch import nn

model = nn.Linear(64, 10).cuda()
optimizer = torch.optim.AdamW(model.parameters())
for step in range(60):
    x, y = (
        torch.randn(256, 64, device="cuda"),
        torch.randint(11 if step == 40 else 10, (256,), device="cuda"),
    )
    y[0] = 10 if step == 40 else 0
    loss = nn.functional.cross_entropy(model(x), y)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
print(loss.item())
