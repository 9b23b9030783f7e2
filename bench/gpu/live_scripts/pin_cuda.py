import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

x = torch.randn(1000, 64).cuda()
model = nn.Linear(64, 10).cuda()
optimizer = torch.optim.AdamW(model.parameters())
for (batch,) in DataLoader(TensorDataset(x), batch_size=8, pin_memory=True):
    loss = model(batch).pow(2).mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
