import torch
from torch import nn
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader, TensorDataset

data = TensorDataset(torch.randn(1024, 64), torch.randint(0, 10, (1024,)))

embed = nn.Linear(64, 128).cuda().requires_grad_(False)
blocks = nn.ModuleList(nn.Sequential(nn.Linear(128, 128), nn.ReLU()) for _ in range(4)).cuda()
head = nn.Linear(128, 10).cuda()
parameters = [*blocks.parameters(), *head.parameters()]
optimizer = torch.optim.SGD(parameters, lr=0.01)
for x, y in DataLoader(data, 32):
    x = embed(x.cuda())
    for block in blocks:
        x = checkpoint(block, x, use_reentrant=True)
    loss = nn.functional.cross_entropy(head(x), y.cuda())
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
