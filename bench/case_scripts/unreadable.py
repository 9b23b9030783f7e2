import io

import torch
from common import Images, train
from PIL import Image
from torch.utils.data import DataLoader


class Files(Images):
    def __getitem__(self, index):
        if index == 500:
            Image.open(io.BytesIO(b"<html>404</html>"))
        return super().__getitem__(index)


if __name__ == "__main__":
    torch.manual_seed(0)
    train(DataLoader(Files(), 16, num_workers=1))
