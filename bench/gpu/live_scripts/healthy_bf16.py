import time

import torch
from torch import nn

torch.manual_seed(0)
model = nn.TransformerEncoder(
    nn.TransformerEncoderLayer(1024, 16, 4096, batch_first=True, dropout=0.0), 8
).cuda()
head = nn.Linear(1024, 1024).cuda()
optimizer = torch.optim.AdamW([*model.parameters(), *head.parameters()], lr=1e-4, fused=True)
data = torch.randn(64, 512, 1024, device="cuda")
start = time.time()
for step in range(400):
    x = data[torch.randperm(64, device="cuda")[:32]]
    with torch.autocast("cuda", dtype=torch.bfloat16):
        loss = nn.functional.mse_loss(head(model(x)).float(), x)
    optimizer.zero_grad(set_to_none=True)
    loss.backward()
    optimizer.step()
    if step % 25 == 24:
        print(step, loss.item())
        if time.time() - start > 3:
            break
