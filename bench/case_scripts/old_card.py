import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

data = TensorDataset(torch.zeros(64, 3, 256, 256), torch.zeros(64, dtype=torch.long))
layers = [layer for _ in range(6) for layer in (nn.Conv2d(64, 64, 3, padding=1), nn.ReLU())]
model = nn.Sequential(nn.Conv2d(3, 64, 3, padding=1), *layers, nn.Conv2d(64, 10, 1)).cuda()
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
scaler = torch.amp.GradScaler("cuda")
for _ in range(2):
    for x, y in DataLoader(data, 4, shuffle=True):
        with torch.autocast("cuda", dtype=torch.float16):
            loss = nn.functional.cross_entropy(model(x.cuda()).mean((2, 3)), y.cuda())
        optimizer.zero_grad()
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
