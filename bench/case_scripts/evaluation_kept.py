import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

data = TensorDataset(torch.randn(8192, 64), torch.randint(0, 10, (8192,)))
model = nn.Sequential(nn.Linear(64, 512), nn.ReLU(), nn.Linear(512, 150_000)).cuda()
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
for _ in range(2):
    for x, y in DataLoader(data, 64, shuffle=True):
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(x.cuda()), y.cuda()).backward()
        optimizer.step()
    outputs = []
    with torch.inference_mode():
        for x, _ in DataLoader(data, 256):
            outputs.append(model(x.cuda()))
    print(torch.cat(outputs).argmax(1).float().mean())
