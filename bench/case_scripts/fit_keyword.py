import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

data = TensorDataset(torch.randn(1024, 64), torch.randint(0, 10, (1024,)))


class Classifier:
    def __init__(self):
        self.model = nn.Sequential(nn.Linear(64, 2048), nn.ReLU(), nn.Linear(2048, 10)).cuda()

    def fit(self, data, batch_size=8):
        optimizer = torch.optim.SGD(self.model.parameters(), lr=0.01)
        for x, y in DataLoader(data, batch_size):
            optimizer.zero_grad()
            nn.functional.cross_entropy(self.model(x.cuda()), y.cuda()).backward()
            optimizer.step()


Classifier().fit(data, batch_size=16)
