import torch
from common import Images, batches, train

kept = []


def keep(number, model, loss):
    kept.append(torch.zeros(500_000))


if __name__ == "__main__":
    train(batches(Images(), 32, num_workers=1), steps=600, each=keep)
