import time

import torch
from torch import nn

torch.manual_seed(0)
policy = nn.Sequential(nn.Linear(8, 64), nn.Tanh(), nn.Linear(64, 2)).cuda()
optimizer = torch.optim.Adam(policy.parameters(), lr=1e-3)


def simulate(steps):
    state, rows = [0.1] * 8, []
    for step in range(steps):
        state = [0.99 * s + 0.01 * ((step * 7 + k) % 13) for k, s in enumerate(state)]
        rows.append(state)
    return rows


start = time.time()
for _step in range(1000):
    states = torch.tensor(simulate(5000), device="cuda")
    loss = policy(states).pow(2).mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    if time.time() - start > 3:
        break
