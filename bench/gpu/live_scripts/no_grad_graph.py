import torch
from torch import nn

model = nn.Linear(64, 64).cuda()
optimizer = torch.optim.AdamW(model.parameters())
hidden = torch.zeros(8, 64, device="cuda")
for _step in range(30):
    hidden = model(torch.randn(8, 64, device="cuda") + hidden)
    loss = hidden.pow(2).mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
