import os

import torch
import torch.distributed as dist
import torch.nn as nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

dist.init_process_group("nccl")
rank = dist.get_rank()
torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
data = TensorDataset(torch.randn(640, 3, 16, 16), torch.randint(0, 10, (640,)))
loader = DataLoader(data, batch_size=32, sampler=DistributedSampler(data))
valid = DataLoader(
    TensorDataset(torch.randn(320, 3, 16, 16), torch.randint(0, 10, (320,))), batch_size=32
)
net = nn.Sequential(
    nn.Conv2d(3, 32, 3, padding=1),
    nn.BatchNorm2d(32),
    nn.ReLU(),
    nn.Flatten(),
    nn.Linear(32 * 256, 10),
).cuda()
model = DDP(net, device_ids=[int(os.environ["LOCAL_RANK"])])
optimizer = torch.optim.Adam(model.parameters(), 1e-3)
for _epoch in range(5):
    model.train()
    for x, y in loader:
        loss = nn.functional.cross_entropy(model(x.cuda()), y.cuda())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    if rank == 0:
        model.eval()
        right = torch.zeros((), device="cuda")
        with torch.no_grad():
            for x, y in valid:
                right += (model(x.cuda()).argmax(1) == y.cuda()).sum()
        dist.all_reduce(right)
        print(right)
dist.destroy_process_group()
