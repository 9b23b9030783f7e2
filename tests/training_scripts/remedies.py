"""A little transformer on random data, for remedies; written like many a first script."""

import argparse

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

parser = argparse.ArgumentParser()
parser.add_argument("--batch_size", type=int, default=8)
parser.add_argument("--look", action="store_true", help="use the attention weights")
parser.add_argument("--fixed", action="store_true", help="accept one image size only")
options = parser.parse_args()
WIDTH, PATCH = 128, 8


class Layer(nn.Module):
    def __init__(self):
        super().__init__()
        self.attention = nn.MultiheadAttention(WIDTH, 4, batch_first=True)
        self.norm = nn.LayerNorm(WIDTH)
        self.mlp = nn.Sequential(
            nn.Linear(WIDTH, 4 * WIDTH), nn.ReLU(), nn.Linear(4 * WIDTH, WIDTH)
        )

    def forward(self, x):
        attended, weights = self.attention(x, x, x)
        if options.look:
            x = x + weights.mean()
        return x + self.mlp(self.norm(x + attended))


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.patches = nn.Conv2d(3, WIDTH, PATCH, PATCH)
        self.layers = nn.ModuleList(Layer() for _ in range(4))
        self.head = nn.Linear(WIDTH, 10)

    def forward(self, images):
        x = self.patches(images)
        if options.fixed and x.shape[-1] != 16:
            raise ValueError("images must be 128 pixels wide")
        x = x.flatten(2).transpose(1, 2)
        for layer in self.layers:
            x = layer(x)
        return self.head(x.mean(1))


net = Net().to("cuda" if torch.cuda.is_available() else "cpu")
optimizer = torch.optim.AdamW(net.parameters())
data = TensorDataset(torch.randn(256, 3, 128, 128), torch.zeros(256, dtype=torch.long))
loader = DataLoader(data, batch_size=options.batch_size)
for images, labels in loader:
    loss = nn.functional.cross_entropy(net(images.cuda()), labels.cuda())
    loss.backward()
    optimizer.step()
    optimizer.zero_grad(set_to_none=False)
