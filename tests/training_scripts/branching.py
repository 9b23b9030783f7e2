"""A network that copies its input from a batch of 64 on, as diffusers' upsampling does, with a
gradient's worth of memory more for each sample then."""

import argparse

import torch
from torch.utils.data import DataLoader, TensorDataset

parser = argparse.ArgumentParser()
parser.add_argument("--batch_size", type=int, default=8)
parser.add_argument("--samples", type=int, default=8192)
options = parser.parse_args()

layers = torch.nn.ModuleList(torch.nn.Conv2d(16, 16, 3, padding=1) for _ in range(8)).cuda()
optimizer = torch.optim.AdamW(layers.parameters())
data = TensorDataset(torch.zeros(options.samples, 16, 16, 16))
for _ in range(4):
    for (images,) in DataLoader(data, options.batch_size):
        x = images.cuda()
        for layer in layers:
            if len(x) >= 64:
                x = x.exp().exp()
            x = layer(x)
        x.square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
