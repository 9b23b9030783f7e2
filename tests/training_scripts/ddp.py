"""DistributedDataParallel, as its tutorial has it: a process for each GPU, started by torchrun."""

from __future__ import annotations

import argparse
import os

import torch
from torch import distributed, nn
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

parser = argparse.ArgumentParser()
parser.add_argument("--batch-size", type=int, default=32)
parser.add_argument("--width", type=int, default=1024)
arguments = parser.parse_args()

distributed.init_process_group("nccl")
local = int(os.environ["LOCAL_RANK"])
torch.cuda.set_device(local)
width = arguments.width
layers = [nn.Sequential(nn.Linear(width, width), nn.ReLU()) for _ in range(8)]
model = nn.Sequential(*layers, nn.Linear(width, 10)).cuda()
model = nn.parallel.DistributedDataParallel(model, device_ids=[local])
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
data = TensorDataset(torch.zeros(4096, width), torch.zeros(4096, dtype=torch.long))
sampler = DistributedSampler(data)
loader = DataLoader(data, batch_size=arguments.batch_size, sampler=sampler, drop_last=True)
for epoch in range(2):
    sampler.set_epoch(epoch)
    for inputs, labels in loader:
        loss = nn.functional.cross_entropy(model(inputs.cuda(local)), labels.cuda(local))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
distributed.destroy_process_group()
