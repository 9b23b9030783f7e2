import torch
from torch import nn

model = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10)).cuda().half()
optimizer = torch.optim.AdamW(model.parameters())
for _step in range(10):
    x, y = torch.randn(256, 64, device="cuda"), torch.randint(10, (256,), device="cuda")
    loss = nn.functional.cross_entropy(model(x), y)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
