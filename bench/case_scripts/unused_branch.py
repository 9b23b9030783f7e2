import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

data = TensorDataset(torch.randn(1024, 64), torch.randint(0, 10, (1024,)))


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.head = nn.Linear(64, 64), nn.Linear(64, 10)
        self.second = nn.Linear(64, 64)

    def forward(self, x):
        x = self.first(x)
        with torch.no_grad():
            x = x + self.second(x)
        return self.head(x.relu())


model = Net().cuda()
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
for x, y in DataLoader(data, 32):
    loss = nn.functional.cross_entropy(model(x.cuda()), y.cuda())
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
