import time

import torch
from torch import nn

torch.manual_seed(0)
backbone = nn.Sequential(*[m for _ in range(16) for m in (nn.Linear(512, 512), nn.GELU())]).cuda()
heads = nn.ModuleList([nn.Linear(512, 1) for _ in range(20)]).cuda()
optimizer = torch.optim.AdamW([*backbone.parameters(), *heads.parameters()], lr=1e-4)


def detection_loss(features, labels):
    loss = 0.0
    for index, head in enumerate(heads):
        chosen = features[labels == index]
        if len(chosen):
            loss = loss + head(chosen).pow(2).mean()
    return loss


start = time.time()
for _step in range(3000):
    x = torch.randn(1024, 512, device="cuda")
    labels = torch.randint(20, (1024,), device="cuda")
    loss = detection_loss(backbone(x), labels)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    if time.time() - start > 3:
        break
