import time

import torch
from torch import nn

torch.manual_seed(0)
net = nn.GRU(64, 256, num_layers=4, batch_first=True).cuda()
optimizer = torch.optim.Adam(net.parameters(), lr=1e-3, fused=True)
start = time.time()
for _step in range(3000):
    x = torch.randn(4, 1000, 64, device="cuda")
    out, _ = net(x)
    loss = out.pow(2).mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    if time.time() - start > 3:
        break
