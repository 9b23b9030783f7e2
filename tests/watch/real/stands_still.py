"""A training that stands still in step 30: in a worker, or in the main thread; or that sleeps."""

import sys
import time

import torch
from torch.utils.data import DataLoader, Dataset

WHERE = sys.argv[1]


class Samples(Dataset):
    def __len__(self):
        return 10**6

    def __getitem__(self, index):
        if WHERE == "worker" and index == 8 * 30:
            time.sleep(1e6)  # the worker never returns
        return torch.ones(8)


def pause(step):
    if WHERE == "main" and step == 30:
        time.sleep(1e6)  # the main thread never returns
    if WHERE == "sleeps":
        time.sleep(0.05)  # in each step


def main():
    model = torch.nn.Linear(8, 1)
    optimizer = torch.optim.SGD(model.parameters(), 0.01)
    for step, batch in enumerate(DataLoader(Samples(), 8, num_workers=WHERE == "worker")):
        model(batch).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
        pause(step)
        if step == 60:
            break


if __name__ == "__main__":
    main()
