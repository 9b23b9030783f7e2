import random
from collections import deque

import torch
import torch.nn.functional as F
from torch import nn

policy = nn.Sequential(nn.Flatten(), nn.Linear(4 * 84 * 84, 64), nn.ReLU(), nn.Linear(64, 6)).cuda()
optimizer = torch.optim.Adam(policy.parameters(), lr=1e-4)
memory = deque(maxlen=1_000_000)
state = torch.rand(1, 4, 84, 84).cuda()
for _ in range(10_000_000):
    following = torch.rand(1, 4, 84, 84).cuda()
    memory.append((state, torch.zeros(1, 1, dtype=torch.long).cuda(), following))
    state = following
    if len(memory) < 8:
        continue
    s, a, n = map(torch.cat, zip(*random.sample(memory, 8), strict=True))
    with torch.no_grad():
        goal = 0.99 * policy(n).max(1).values
    loss = F.smooth_l1_loss(policy(s).gather(1, a).squeeze(1), goal)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
