"""A variational autoencoder of fully connected layers on flattened images."""

import torch
from common import device, options
from torch import nn

args = options(128)
gpu = device()


class VAE(nn.Module):
    def __init__(self):
        super().__init__()
        self.inward, self.mean, self.spread = (
            nn.Linear(784, 400), nn.Linear(400, 20), nn.Linear(400, 20),
        )  # fmt: skip
        self.outward, self.pixels = nn.Linear(20, 400), nn.Linear(400, 784)

    def forward(self, x):
        hidden = torch.relu(self.inward(x))
        mean, spread = self.mean(hidden), self.spread(hidden)
        code = mean + torch.randn_like(spread) * torch.exp(0.5 * spread)
        return torch.sigmoid(self.pixels(torch.relu(self.outward(code)))), mean, spread


model = VAE().to(gpu)
optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
data = torch.utils.data.TensorDataset(torch.rand(6400, 1, 28, 28), torch.zeros(6400))
for x, _ in torch.utils.data.DataLoader(data, args.batch_size, shuffle=True, pin_memory=True):
    x = x.to(gpu).view(-1, 784)
    guess, mean, spread = model(x)
    apart = -0.5 * torch.sum(1 + spread - mean.pow(2) - spread.exp())
    loss = nn.functional.binary_cross_entropy(guess, x, reduction="sum") + apart
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
