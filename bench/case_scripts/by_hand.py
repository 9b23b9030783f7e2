import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

device = "cuda" if torch.cuda.is_available() else "cpu"
data = TensorDataset(torch.randn(2000, 8), torch.randn(2000))
loader = DataLoader(data, batch_size=50, shuffle=True)
net = nn.Sequential(nn.Linear(8, 64), nn.ReLU(), nn.Linear(64, 1)).to(device)
optimizer = torch.optim.Adam(net.parameters(), lr=1e-3)
for _ in range(20):
    for x, y in loader:
        out = net(x.to(device))
        loss = torch.mean((out - y.to(device)) ** 2)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
