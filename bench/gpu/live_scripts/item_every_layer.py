import time

import torch
from torch import nn

torch.manual_seed(0)
layers = nn.ModuleList([nn.Linear(1024, 1024) for _ in range(24)]).cuda()
optimizer = torch.optim.AdamW(layers.parameters(), lr=1e-4)
norms = []


def forward(x):
    for layer in layers:
        x = x + torch.relu(layer(x))
        norms.append(x.norm().item())
        del norms[:-100]
    return x


start = time.time()
for _step in range(3000):
    x = torch.randn(512, 1024, device="cuda")
    loss = nn.functional.mse_loss(forward(x), x)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    if loss.item() > 1e4:
        print("large loss")
    if time.time() - start > 3:
        break
