import torch
import torch.nn as nn
from torch.utils.data import DataLoader, TensorDataset

device = "cuda" if torch.cuda.is_available() else "cpu"


class Net(nn.Module):
    def __init__(self, depth=4):
        super().__init__()
        self.layers = [nn.Linear(128, 128).to(device) for _ in range(depth)]
        self.head = nn.Linear(128, 10)

    def forward(self, x):
        for layer in self.layers:
            x = torch.relu(layer(x))
        return self.head(x)


loader = DataLoader(
    TensorDataset(torch.randn(6400, 128), torch.randint(0, 10, (6400,))),
    batch_size=32,
    shuffle=True,
)
model = Net().to(device)
optimizer = torch.optim.Adam(model.parameters(), 1e-3)
for _epoch in range(3):
    for x, y in loader:
        loss = nn.functional.cross_entropy(model(x.to(device)), y.to(device))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
