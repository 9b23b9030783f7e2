import torch
from torch import nn

model = nn.Linear(64, 10).cuda()
optimizer = torch.optim.AdamW(model.parameters())
for step in range(40):
    x = torch.randn(256, 64, device="cuda")
    loss = model(x).pow(2).mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    if step == 30:
        print(loss.detach().numpy())
