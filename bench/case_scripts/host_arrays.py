import numpy as np
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

data = TensorDataset(torch.randn(1024, 64), torch.randint(0, 10, (1024,)))
model = nn.Linear(64, 10).cuda()
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
mean = np.zeros(64, dtype=np.float32)
for x, y in DataLoader(data, 32):
    with torch.inference_mode():
        shift = torch.tensor(mean, device="cuda").clone()
    x = x.cuda() - shift.clone()
    loss = nn.functional.cross_entropy(model(x), y.cuda())
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    losses = torch.tensor([loss.detach(), loss.detach()], device="cuda")
