import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, TensorDataset


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.fc1 = nn.Linear(784, 128)
        self.fc2 = nn.Linear(128, 10)

    def forward(self, x):
        return F.log_softmax(self.fc2(F.relu(self.fc1(x))), dim=0)


data = TensorDataset(torch.rand(6400, 784), torch.randint(0, 10, (6400,)))
model = Net().cuda()
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
for _epoch in range(5):
    for x, y in DataLoader(data, batch_size=64, shuffle=True):
        optimizer.zero_grad()
        F.nll_loss(model(x.cuda()), y.cuda()).backward()
        optimizer.step()
