import time

import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset


class Texts(Dataset):
    def __len__(self):
        return 50000

    def __getitem__(self, index):
        return [(index * 31 + k * 17) % 997 for k in range(200 + index % 300)]


def collate(rows):
    longest = max(len(row) for row in rows)
    padded = torch.zeros(len(rows), longest, dtype=torch.long)
    for i, row in enumerate(rows):
        for j, token in enumerate(row):
            padded[i, j] = token
    return padded


def main():
    embedding = nn.Embedding(1000, 128).cuda()
    head = nn.Linear(128, 1000).cuda()
    optimizer = torch.optim.AdamW([*embedding.parameters(), *head.parameters()], lr=1e-3)
    loader = DataLoader(
        Texts(), batch_size=32, shuffle=True, num_workers=2, collate_fn=collate, pin_memory=True
    )
    start = time.time()
    for tokens in loader:
        tokens = tokens.cuda(non_blocking=True)
        loss = nn.functional.cross_entropy(
            head(embedding(tokens[:, :-1])).flatten(0, 1), tokens[:, 1:].flatten()
        )
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if time.time() - start > 4:
            break


if __name__ == "__main__":
    main()
