import torch
from torch import nn


class Attention(nn.Module):
    def __init__(self):
        super().__init__()
        self.qkv = nn.Linear(256, 768)

    def forward(self, x):
        q, k, v = self.qkv(x).chunk(3, -1)
        scores = q @ k.transpose(-2, -1) / 16
        return scores.softmax(-1) @ v


model = Attention().cuda()
optimizer = torch.optim.AdamW(model.parameters())
for length in [512] * 30 + [65536]:
    x = torch.randn(8, length, 256, device="cuda")
    loss = model(x).pow(2).mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
