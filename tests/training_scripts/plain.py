"""No options at all: the batch size is written into the script."""

import torch
from torch.utils.data import DataLoader

validation = DataLoader(torch.randn(64, 64, 256), batch_size=2)
training = DataLoader(torch.randn(512, 64, 256), batch_size=16, shuffle=True)

model = torch.nn.Sequential(*(torch.nn.Linear(256, 256) for _ in range(6))).cuda()
optimizer = torch.optim.Adam(model.parameters())

with torch.no_grad():
    for batch in validation:
        model(batch.cuda())
for _ in range(10):
    for batch in training:
        optimizer.zero_grad()
        model(batch.cuda()).pow(2).mean().backward()
        optimizer.step()
