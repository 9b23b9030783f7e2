import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

data = TensorDataset(torch.randn(4096, 64), torch.randint(0, 10, (4096,)))
model = nn.Sequential(nn.Linear(64, 512), nn.ReLU(), nn.Linear(512, 10)).cuda()
opt = torch.optim.SGD(model.parameters(), lr=0.1)
scaler = torch.amp.GradScaler("cuda")
fp16 = True
for x, y in DataLoader(data, 64):
    opt.zero_grad()
    if fp16:
        with torch.autocast("cuda", torch.float16):
            loss = nn.functional.cross_entropy(model(x.cuda()), y.cuda())
        scaler.scale(loss).backward()
        scaler.step(opt)
        scaler.update()
    else:
        loss = nn.functional.cross_entropy(model(x.cuda()), y.cuda())
        loss.backward()
    opt.step()
