import argparse

import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset

parser = argparse.ArgumentParser()
parser.add_argument("--batch-size", type=int, default=16)
options = parser.parse_args()


class Texts(Dataset):
    """Most are short, one in 500 is 40 times as long."""

    def __len__(self):
        return 4000

    def __getitem__(self, index):
        length = 4096 if index % 500 == 250 else 100
        return torch.randint(1, 8000, (length,))


def padded(texts):
    return nn.utils.rnn.pad_sequence(texts, batch_first=True)


model = nn.Sequential(
    nn.Embedding(8000, 256), nn.Linear(256, 1024), nn.GELU(), nn.Linear(1024, 8000)
)
model.cuda()
optimizer = torch.optim.AdamW(model.parameters())
for _ in range(2):
    for tokens in DataLoader(Texts(), options.batch_size, shuffle=True, collate_fn=padded):
        tokens = tokens.cuda()
        logits = model(tokens[:, :-1])
        loss = nn.functional.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
