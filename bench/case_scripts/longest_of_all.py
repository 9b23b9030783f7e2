import random

import torch
import torch.nn as nn
import torch.nn.functional as F
from torch.utils.data import DataLoader

dev = torch.device("cuda" if torch.cuda.is_available() else "cpu")

texts = [torch.randint(1, 8000, (random.randint(20, 60),)) for _ in range(3999)] + [
    torch.randint(1, 8000, (512,))
]
MAX = max(len(t) for t in texts)


def collate(rows):
    out = torch.zeros(len(rows), MAX, dtype=torch.long)
    for k, t in enumerate(rows):
        out[k, : len(t)] = t
    return out


class Clf(nn.Module):
    def __init__(self):
        super().__init__()
        self.e = nn.Embedding(8000, 256, padding_idx=0)
        self.t = nn.TransformerEncoder(
            nn.TransformerEncoderLayer(256, 8, 1024, batch_first=True),
            4,
            enable_nested_tensor=False,
        )
        self.h = nn.Linear(256, 2)

    def forward(self, x):
        return self.h(self.t(self.e(x), src_key_padding_mask=x == 0).mean(1))


net = Clf().to(dev)
opt = torch.optim.AdamW(net.parameters(), 1e-4)
for _ in range(3):
    for x in DataLoader(texts, 32, shuffle=True, collate_fn=collate):
        y = torch.randint(0, 2, (len(x),)).to(dev)
        opt.zero_grad()
        F.cross_entropy(net(x.to(dev)), y).backward()
        opt.step()
