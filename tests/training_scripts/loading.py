"""Trains on a DataLoader of 8 batches, epoch after epoch."""

import torch
from torch.utils.data import DataLoader, Dataset


class Numbers(Dataset):
    def __len__(self):
        return 32

    def __getitem__(self, index):
        return torch.full((8,), float(index)), index % 2


def main():
    model = torch.nn.Linear(8, 2).cuda()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    loader = DataLoader(Numbers(), batch_size=4, shuffle=True, num_workers=2)
    for _ in range(100):
        for inputs, targets in loader:
            loss = torch.nn.functional.cross_entropy(model(inputs.cuda()), targets.cuda())
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()


if __name__ == "__main__":
    main()
