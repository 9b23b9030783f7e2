import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

data = TensorDataset(torch.randn(512, 64), torch.randint(0, 5, (512,)))
loader = DataLoader(data, batch_size=32, shuffle=True)
model = nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 1000))
optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
model[2] = nn.Linear(128, 5)
model = model.cuda()
for _epoch in range(10):
    for x, y in loader:
        loss = nn.functional.cross_entropy(model(x.cuda()), y.cuda())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
