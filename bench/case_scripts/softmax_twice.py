import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

data = TensorDataset(torch.randn(2000, 1, 28, 28), torch.randint(0, 10, (2000,)))
loader = DataLoader(data, batch_size=50, shuffle=True)


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv = nn.Conv2d(1, 16, 5)
        self.fc = nn.Linear(16 * 24 * 24, 10)

    def forward(self, x):
        x = torch.relu(self.conv(x)).flatten(1)
        return torch.softmax(self.fc(x), dim=1)


model = Net().cuda()
criterion = nn.CrossEntropyLoss()
optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
for _epoch in range(10):
    for x, y in loader:
        optimizer.zero_grad()
        loss = criterion(model(x.cuda()), y.cuda())
        loss.backward()
        optimizer.step()
