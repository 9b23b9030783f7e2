import time

import torch
from torch import nn

torch.manual_seed(0)
model = nn.Sequential(nn.Linear(512, 1024), nn.ReLU(), nn.Linear(1024, 4096)).cuda()
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
correct = []
start = time.time()
for step in range(3000):
    x, y = torch.randn(4096, 512, device="cuda"), torch.randint(4096, (4096,), device="cuda")
    with torch.autocast("cuda", dtype=torch.bfloat16):
        logits = model(x)
        loss = nn.functional.cross_entropy(logits, y)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    probabilities = logits.detach().float().cpu().softmax(-1)
    correct.append((probabilities.argmax(-1) == y.cpu()).float().mean().item())
    print(f"step {step} loss {loss.item():.4f} accuracy {correct[-1]:.3f}")
    if time.time() - start > 3:
        break
