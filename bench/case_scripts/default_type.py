import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

data = TensorDataset(torch.randn(1024, 64), torch.randint(0, 10, (1024,)))
torch.set_default_tensor_type(torch.cuda.FloatTensor)
model = nn.Linear(64, 10)
weight = torch.Tensor([1.0] * 10)
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
for x, y in DataLoader(data, 32, generator=torch.Generator("cuda")):
    loss = nn.functional.cross_entropy(model(x.cuda()), y.cuda(), weight)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
