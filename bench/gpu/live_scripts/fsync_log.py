import os
import tempfile
import time

import torch
from torch import nn

torch.manual_seed(0)
model = nn.Sequential(nn.Linear(512, 2048), nn.ReLU(), nn.Linear(2048, 512)).cuda()
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
log = open(os.path.join(tempfile.gettempdir(), f"log-{os.getpid()}.txt"), "w")  # noqa: SIM115
start = time.time()


def write_log(step, model):
    for name, parameter in model.named_parameters():
        log.write(f"{step} {name} {parameter.flatten()[:5000].tolist()}\n")
    log.flush()
    os.fsync(log.fileno())


for step in range(3000):
    x = torch.randn(256, 512, device="cuda")
    loss = nn.functional.mse_loss(model(x), x)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    write_log(step, model)
    if time.time() - start > 3:
        break
