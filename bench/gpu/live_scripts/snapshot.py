import sys

import torch
from torch import nn

torch.cuda.memory._record_memory_history(max_entries=100_000)
torch.cuda.set_per_process_memory_fraction(0.03)
model = nn.Sequential(*[m for _ in range(10) for m in (nn.Linear(1024, 1024), nn.GELU())]).cuda()
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
outputs = []
try:
    for _step in range(3000):
        x = torch.randn(1024, 1024, device="cuda")
        out = model(x)
        outputs.append(out)
        loss = nn.functional.mse_loss(out, x)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
except torch.cuda.OutOfMemoryError:
    torch.cuda.memory._dump_snapshot(sys.argv[1])
