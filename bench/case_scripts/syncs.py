import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

data = TensorDataset(torch.randn(4096, 64), torch.randint(0, 10, (4096,)))
model = nn.Sequential(nn.Linear(64, 512), nn.ReLU(), nn.Linear(512, 10)).cuda()
opt = torch.optim.Adam(model.parameters())
losses, right = [], 0
for _epoch in range(3):
    for x, y in DataLoader(data, 64):
        x, y = x.cuda(), y.cuda()
        out = model(x)
        loss = nn.functional.cross_entropy(out, y)
        opt.zero_grad()
        loss.backward()
        opt.step()
        torch.cuda.synchronize()
        losses.append(loss.item())
        right += (out.argmax(1).cpu() == y.cpu()).sum()
        torch.cuda.empty_cache()
