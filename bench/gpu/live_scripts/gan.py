import time

import torch
from torch import nn

torch.manual_seed(0)
generator = nn.Sequential(
    nn.Linear(128, 2048), nn.ReLU(), nn.Linear(2048, 2048), nn.ReLU(), nn.Linear(2048, 3072)
).cuda()
critic = nn.Sequential(
    nn.Linear(3072, 2048), nn.LeakyReLU(), nn.Linear(2048, 2048), nn.LeakyReLU(), nn.Linear(2048, 1)
).cuda()
optimizer_g = torch.optim.Adam(generator.parameters(), lr=1e-4, fused=True)
optimizer_d = torch.optim.Adam(critic.parameters(), lr=1e-4, fused=True)
real = torch.randn(16384, 3072, device="cuda")
start = time.time()
for _step in range(3000):
    with torch.autocast("cuda", dtype=torch.bfloat16):
        fake = generator(torch.randn(16384, 128, device="cuda"))
        loss_d = (
            nn.functional.softplus(-critic(real)).mean()
            + nn.functional.softplus(critic(fake.detach())).mean()
        )
    optimizer_d.zero_grad()
    loss_d.backward()
    optimizer_d.step()
    with torch.autocast("cuda", dtype=torch.bfloat16):
        loss_g = nn.functional.softplus(-critic(fake)).mean()
    optimizer_g.zero_grad()
    loss_g.backward()
    optimizer_g.step()
    if time.time() - start > 3:
        break
