"""Pads each batch to its longest sequence and takes long batches in parts: no law holds."""

import argparse

import torch
from torch.nn.utils.rnn import pad_sequence
from torch.utils.data import DataLoader

parser = argparse.ArgumentParser()
parser.add_argument("--batch_size", type=int, default=4)
options = parser.parse_args()

lengths = torch.randint(100, 1000, (400,), generator=torch.Generator().manual_seed(0))
sequences = [torch.randn(int(length), 128) for length in lengths]
loader = DataLoader(sequences, options.batch_size, collate_fn=lambda s: pad_sequence(s, True))
model = torch.nn.Sequential(*(torch.nn.Linear(128, 128) for _ in range(6))).cuda()
optimizer = torch.optim.Adam(model.parameters())
for batch in loader:
    outputs = [model(part.cuda()) for part in batch.split(3)]
    torch.cat(outputs).pow(2).mean().backward()
    optimizer.step()
    optimizer.zero_grad()
