import torch
from common import Images, batches, network, train

if __name__ == "__main__":
    torch.set_num_threads(16)
    train(batches(Images(), 32, num_workers=1), steps=60, model=network(48))
