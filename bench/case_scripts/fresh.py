import torch
import torch.nn as nn
import torch.nn.functional as F
from torch.utils.data import DataLoader, TensorDataset


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv = nn.Conv2d(3, 32, 3, padding=1)
        self.drop = nn.Dropout2d(0.3)
        self.norm = nn.BatchNorm2d(32)
        self.head = nn.Linear(32 * 64, 10)

    def forward(self, x):
        x = F.max_pool2d(torch.relu(self.norm(self.conv(x))), 2)
        x = nn.Dropout2d(0.3)(x)
        return self.head(x.flatten(1))


train = DataLoader(
    TensorDataset(torch.randn(3200, 3, 16, 16), torch.randint(0, 10, (3200,))),
    batch_size=32,
    shuffle=True,
)
valid = DataLoader(
    TensorDataset(torch.randn(640, 3, 16, 16), torch.randint(0, 10, (640,))), batch_size=32
)
model = Net().cuda()
optimizer = torch.optim.Adam(model.parameters(), 1e-3)
for _epoch in range(5):
    model.train()
    for x, y in train:
        loss = F.cross_entropy(model(x.cuda()), y.cuda())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    model.eval()
    right = 0
    with torch.no_grad():
        for x, y in valid:
            right += (model(x.cuda()).argmax(1) == y.cuda()).sum()
