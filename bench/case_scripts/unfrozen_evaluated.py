import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

valid = DataLoader(TensorDataset(torch.zeros(64, 3, 256, 256)), 32)
data = TensorDataset(torch.zeros(256, 3, 256, 256), torch.randint(0, 10, (256,)))
body = nn.Sequential(
    *[nn.Sequential(nn.Conv2d(3 if i == 0 else 64, 64, 3, padding=1), nn.ReLU()) for i in range(16)]
)
head = nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(64, 10))
model = nn.Sequential(body, head).cuda()
for p in body.parameters():
    p.requires_grad = False
opt = torch.optim.AdamW(model.parameters())
for epoch in range(20):
    if epoch == 5:
        for p in body.parameters():
            p.requires_grad = True
    for x, y in DataLoader(data, 32, shuffle=True):
        loss = nn.functional.cross_entropy(model(x.cuda()), y.cuda())
        opt.zero_grad()
        loss.backward()
        opt.step()
    with torch.no_grad():
        for (x,) in valid:
            model(x.cuda())
