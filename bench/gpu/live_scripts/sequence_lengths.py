import random
import time

import torch
from torch import nn

torch.manual_seed(0)
random.seed(0)
model = nn.TransformerEncoder(nn.TransformerEncoderLayer(512, 8, 2048, batch_first=True), 4).cuda()
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
start = time.time()
for _step in range(3000):
    x = torch.randn(16, random.randrange(32, 2048), 512, device="cuda")
    with torch.autocast("cuda", dtype=torch.bfloat16):
        loss = nn.functional.mse_loss(model(x).float(), x)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    if time.time() - start > 3.5:
        break
