"""pytorch-metric-learning: triplets mined on the GPU (their number depends on the data)."""

import torch
from common import device, options
from pytorch_metric_learning import losses, miners
from torch import nn

args = options(32)
gpu = device()
model = nn.Sequential(
    nn.Conv2d(3, 32, 3, 2), nn.ReLU(), nn.Conv2d(32, 64, 3, 2), nn.ReLU(),
    nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(64, 64),
).to(gpu)  # fmt: skip
miner, loss_of = miners.MultiSimilarityMiner(), losses.TripletMarginLoss()
optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
data = torch.utils.data.TensorDataset(torch.rand(1024, 3, 32, 32), torch.randint(8, (1024,)))
for images, labels in torch.utils.data.DataLoader(data, args.batch_size, shuffle=True):
    points, labels = model(images.to(gpu)), labels.to(gpu)
    loss = loss_of(points, labels, miner(points, labels))
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
