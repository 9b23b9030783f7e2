import os
from pathlib import Path

from common import Images, batches, train

LOG = Path("log.txt")


def write(number, model, loss):
    for name, value in model.named_parameters():
        with LOG.open("a") as log:
            log.write(f"{number} {name} {value.detach().flatten().tolist()}\n" * 20)
            log.flush()
            os.fsync(log.fileno())


if __name__ == "__main__":
    train(batches(Images(), num_workers=1), steps=150, each=write)
