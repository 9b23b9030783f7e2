import torch
from common import Images, batches, train

kept = []


def keep(number, model, loss):
    kept.append(torch.zeros(1_000_000))


if __name__ == "__main__":
    train(batches(Images(), 32, num_workers=1), steps=300, each=keep)
