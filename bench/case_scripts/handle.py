import os

import h5py
import numpy as np
import torch
from common import Images, batches, train

FILE = "images.h5"


class Stored(Images):
    def __init__(self):
        self.file = h5py.File(FILE, "r")

    def __len__(self):
        return 2000

    def __getitem__(self, index):
        return torch.from_numpy(self.file["images"][index]).float() / 255, index % 10


if __name__ == "__main__":
    if not os.path.exists(FILE):
        with h5py.File(FILE, "w") as file:
            file["images"] = np.zeros((2000, 3, 32, 32), dtype=np.uint8)
    train(batches(Stored(), num_workers=2), steps=60)
