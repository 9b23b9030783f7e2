import os

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

dist.init_process_group("nccl")
rank = int(os.environ["LOCAL_RANK"])
torch.cuda.set_device(rank)
model = nn.parallel.DistributedDataParallel(nn.Linear(512, 10).cuda(), device_ids=[rank])
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
data = TensorDataset(torch.rand(6400, 512), torch.randint(0, 10, (6400,)))
sampler = DistributedSampler(data, shuffle=True)
loader = DataLoader(data, batch_size=64, sampler=sampler)
for epoch in range(30):
    print("epoch", epoch)
    for x, y in loader:
        optimizer.zero_grad()
        F.cross_entropy(model(x.cuda()), y.cuda()).backward()
        optimizer.step()
dist.destroy_process_group()
