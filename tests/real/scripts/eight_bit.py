"""bitsandbytes: AdamW with its state in eight bits, on a transformer of PyTorch's own."""

import bitsandbytes
import torch
from common import device, options
from torch import nn

args = options(8)
gpu = device()
layer = nn.TransformerEncoderLayer(256, 4, 1024, batch_first=True)
model = nn.Sequential(
    nn.Embedding(1000, 256), nn.TransformerEncoder(layer, 3), nn.Linear(256, 1000)
).to(gpu)
optimizer = bitsandbytes.optim.AdamW8bit(model.parameters(), lr=1e-4)
data = torch.utils.data.TensorDataset(torch.randint(1000, (1024, 64)))
for (rows,) in torch.utils.data.DataLoader(data, args.batch_size, shuffle=True):
    rows = rows.to(gpu)
    loss = nn.functional.cross_entropy(model(rows).transpose(1, 2), rows)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
