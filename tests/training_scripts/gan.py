"""Two networks, two optimizers."""

import argparse

import torch
from torch.utils.data import DataLoader

parser = argparse.ArgumentParser()
parser.add_argument("--batch_size", type=int, default=16)
options = parser.parse_args()


def network(width_in, width_out):
    return torch.nn.Sequential(
        torch.nn.Linear(width_in, 512), torch.nn.LeakyReLU(), torch.nn.Linear(512, width_out)
    ).cuda()


generator, critic = network(64, 1024), network(1024, 1)
optimizers = [torch.optim.Adam(net.parameters()) for net in (critic, generator)]
for real in DataLoader(torch.randn(1000, 1024), options.batch_size):
    real = real.cuda()
    fake = generator(torch.randn(len(real), 64, device="cuda"))
    optimizers[0].zero_grad()
    (critic(fake.detach()) - critic(real)).mean().backward()
    optimizers[0].step()
    optimizers[1].zero_grad()
    (-critic(fake).mean()).backward()
    optimizers[1].step()
