"""Train a small CNN on JPEGs that OpenCV decodes, warps and normalises."""

import argparse
from pathlib import Path

import cv2
import numpy as np
import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset


def parse_args():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--data", required=True, help="folder of *.jpg")
    parser.add_argument("--batch-size", "-b", type=int, default=8)
    parser.add_argument("--num-workers", "-j", type=int, default=2)
    parser.add_argument("--prefetch-factor", type=int, default=2)
    parser.add_argument("--size", type=int, default=160)
    parser.add_argument("--epochs", type=int, default=10)
    parser.add_argument("--max-steps", type=int, default=0)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    return parser.parse_args()


class ImageFolder(Dataset):
    def __init__(self, root, size):
        self.paths = sorted(Path(root).glob("*.jpg"))
        if not self.paths:
            raise SystemExit(f"no *.jpg in {root}")
        self.size = size

    def __len__(self):
        return len(self.paths)

    def __getitem__(self, index):
        image = cv2.cvtColor(cv2.imread(str(self.paths[index])), cv2.COLOR_BGR2RGB)
        height, width = image.shape[:2]
        angle, scale = np.random.uniform(-15, 15), np.random.uniform(0.8, 1.2)
        matrix = cv2.getRotationMatrix2D((width / 2, height / 2), angle, scale)
        image = cv2.warpAffine(image, matrix, (width, height), flags=cv2.INTER_CUBIC)
        image = cv2.GaussianBlur(image, (5, 5), 0)
        image = cv2.resize(image, (self.size, self.size), interpolation=cv2.INTER_AREA)
        if np.random.rand() < 0.5:
            image = cv2.flip(image, 1)
        pixels = image.astype(np.float32) / 255.0 - 0.45
        return torch.from_numpy(pixels.transpose(2, 0, 1).copy()), index % 10


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.features = nn.Sequential(
            *self.block(3, 32), *self.block(32, 64), *self.block(64, 128), *self.block(128, 256)
        )
        self.head = nn.Linear(256, 10)

    @staticmethod
    def block(inputs, outputs):
        return (
            nn.Conv2d(inputs, outputs, 3, stride=2, padding=1, bias=False),
            nn.BatchNorm2d(outputs),
            nn.ReLU(inplace=True),
        )

    def forward(self, x):
        return self.head(self.features(x).mean((2, 3)))


def main():
    args = parse_args()
    workers = args.num_workers
    loader = DataLoader(
        ImageFolder(args.data, args.size),
        batch_size=args.batch_size,
        shuffle=True,
        num_workers=workers,
        prefetch_factor=args.prefetch_factor if workers else None,
        drop_last=True,
    )
    net = Net().to(args.device)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.05, momentum=0.9)
    steps = 0
    for epoch in range(args.epochs):
        for images, labels in loader:
            images = images.to(args.device, non_blocking=True)
            loss = nn.functional.cross_entropy(net(images), labels.to(args.device))
            optimizer.zero_grad(set_to_none=True)
            loss.backward()
            optimizer.step()
            steps += 1
            if steps == args.max_steps:
                return
        print(f"epoch {epoch}: loss {loss.item():.3f}")


if __name__ == "__main__":
    main()
