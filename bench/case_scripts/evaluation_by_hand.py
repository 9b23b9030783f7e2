import torch
from torch import nn

X, Y = torch.randn(2048, 64), torch.randint(0, 10, (2048,))
XV = torch.randn(20000, 64).cuda()
model = nn.Sequential(nn.Linear(64, 1024), nn.ReLU(), nn.Linear(1024, 100_000)).cuda()
opt = torch.optim.SGD(model.parameters(), lr=0.01)
batch_size = 64
for epoch in range(5):
    perm = torch.randperm(len(X))
    for i in range(0, len(X), batch_size):
        idx = perm[i : i + batch_size]
        opt.zero_grad()
        nn.functional.cross_entropy(model(X[idx].cuda()), Y[idx].cuda()).backward()
        opt.step()
    with torch.no_grad():
        out = model(XV)
        print(epoch, out.argmax(1).float().mean().item())
