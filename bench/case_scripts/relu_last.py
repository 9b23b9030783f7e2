import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, TensorDataset


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.fc1, self.fc2 = nn.Linear(784, 128), nn.Linear(128, 10)

    def forward(self, x):
        return F.relu(self.fc2(F.relu(self.fc1(x))))


model = Net().to("cuda")
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
data = TensorDataset(torch.rand(6400, 784), torch.randint(0, 10, (6400,)))
for _ in range(5):
    for x, y in DataLoader(data, batch_size=64, shuffle=True):
        optimizer.zero_grad()
        nn.CrossEntropyLoss()(model(x.to("cuda")), y.to("cuda")).backward()
        optimizer.step()
