import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, TensorDataset


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv = nn.Conv2d(1, 16, 3)
        self.fc = nn.Linear(16 * 26 * 26, 10)

    def forward(self, x):
        x = F.relu(self.conv(x)).flatten(1)
        head = nn.Linear(x.shape[1], 10).to(x.device)
        return head(x)


data = TensorDataset(torch.rand(6400, 1, 28, 28), torch.randint(0, 10, (6400,)))
model = Net().cuda()
optimizer = torch.optim.SGD([*model.conv.parameters(), *model.fc.parameters()], lr=0.01)
for _epoch in range(5):
    for x, y in DataLoader(data, batch_size=64, shuffle=True):
        optimizer.zero_grad()
        F.cross_entropy(model(x.cuda()), y.cuda()).backward()
        optimizer.step()
