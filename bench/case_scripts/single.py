import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

data = TensorDataset(torch.rand(6400, 30), torch.zeros(6400, dtype=torch.long))
model = nn.Sequential(nn.Linear(30, 64), nn.ReLU(), nn.Linear(64, 1)).cuda()
criterion = nn.CrossEntropyLoss()
optimizer = torch.optim.Adam(model.parameters())
for _epoch in range(5):
    for x, y in DataLoader(data, batch_size=64, shuffle=True):
        optimizer.zero_grad()
        loss = criterion(model(x.cuda()), y.cuda())
        loss.backward()
        optimizer.step()
