"""A small training that tells its losses to the last bit; options make it fail in its own way."""

import argparse
import atexit
import gc
import os
import random
import signal
import sys
import time

import numpy as np
import torch
from torch.utils.data import DataLoader, Dataset

# At the end PyTorch is not taken apart, which takes longer than the training.
atexit.register(gc.freeze)


class Noisy(Dataset):
    """Samples that depend on every generator of random numbers in a worker."""

    def __len__(self):
        return 48

    def __getitem__(self, index):
        sample = torch.randn(8) + random.random() + float(np.random.rand())
        return sample, index % 2


def parse():
    parser = argparse.ArgumentParser()
    parser.add_argument("--workers", type=int, default=0)
    parser.add_argument("--method", default=None)
    parser.add_argument("--epochs", type=int, default=2)
    parser.add_argument("--end", default="", choices=["", "raise", "exit", "kill", "sleep"])
    return parser.parse_args()


def main(options):
    torch.manual_seed(1)
    random.seed(1)
    np.random.seed(1)
    model = torch.nn.Sequential(
        torch.nn.Linear(8, 16), torch.nn.Dropout(0.2), torch.nn.Linear(16, 2)
    )
    optimizer = torch.optim.Adam(model.parameters())
    loader = DataLoader(
        Noisy(),
        batch_size=8,
        shuffle=True,
        num_workers=options.workers,
        multiprocessing_context=options.method,
    )
    for _ in range(options.epochs):
        for samples, labels in loader:
            loss = torch.nn.functional.cross_entropy(model(samples), labels)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            print(loss.item().hex(), flush=True)
    print(random.random().hex(), float(torch.rand(())).hex(), float(np.random.rand()).hex())


def end(how):
    if how == "raise":
        raise ValueError("the user's own")
    if how == "exit":
        sys.exit(7)
    if how in ("kill", "sleep"):
        time.sleep(1.2)  # longer than between two writes
    if how == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    if how == "sleep":
        print("ready", flush=True)
        time.sleep(60)


if __name__ == "__main__":
    OPTIONS = parse()
    main(OPTIONS)
    end(OPTIONS.end)
