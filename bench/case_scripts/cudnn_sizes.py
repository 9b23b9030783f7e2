import random

import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset

torch.backends.cudnn.benchmark = True


class Photos(Dataset):
    def __len__(self):
        return 2000

    def __getitem__(self, i):
        side = random.Random(i).randrange(160, 320)
        return torch.rand(3, side, side + i % 50), i % 10


def collate(batch):
    h, w = max(x.shape[1] for x, _ in batch), max(x.shape[2] for x, _ in batch)
    out = torch.zeros(len(batch), 3, h, w)
    for o, (x, _) in zip(out, batch, strict=False):
        o[:, : x.shape[1], : x.shape[2]] = x
    return out, torch.tensor([y for _, y in batch])


model = nn.Sequential(
    nn.Conv2d(3, 32, 3, padding=1),
    nn.ReLU(),
    nn.Conv2d(32, 32, 3, padding=1),
    nn.AdaptiveAvgPool2d(1),
    nn.Flatten(),
    nn.Linear(32, 10),
).cuda()
opt = torch.optim.SGD(model.parameters(), lr=0.1)
for _epoch in range(3):
    for x, y in DataLoader(Photos(), 8, shuffle=True, collate_fn=collate):
        opt.zero_grad()
        nn.functional.cross_entropy(model(x.cuda()), y.cuda()).backward()
        opt.step()
