import torch
from torch import nn


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(64, 64)
        self.scale = torch.ones(64)

    def forward(self, x):
        return self.layer(x) * self.scale


model = Net().cuda()
optimizer = torch.optim.AdamW(model.parameters())
for _step in range(10):
    x = torch.randn(256, 64, device="cuda")
    loss = model(x).pow(2).mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
