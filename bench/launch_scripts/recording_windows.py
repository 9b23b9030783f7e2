"""Train a 1-D convolutional net on windows of one long recording, read by np.memmap."""

import argparse

import numpy as np
import torch
from torch import nn, optim
from torch.utils.data import DataLoader, Dataset


class Windows(Dataset):
    def __init__(self, path, length, stride):
        self.recording = np.load(path, mmap_mode="r")
        self.length, self.stride = length, stride

    def __len__(self):
        return (len(self.recording) - self.length) // self.stride

    def __getitem__(self, index):
        begin = index * self.stride
        window = np.asarray(self.recording[begin : begin + self.length], dtype=np.float32)
        window = (window - window.mean(0)) / (window.std(0) + 1e-6)
        return torch.from_numpy(window.T.copy())


class AutoEncoder(nn.Module):
    def __init__(self, channels):
        super().__init__()
        self.down = nn.Sequential(
            nn.Conv1d(channels, 64, 9, stride=4, padding=4),
            nn.ReLU(),
            nn.Conv1d(64, 32, 9, stride=4, padding=4),
        )
        self.up = nn.Sequential(
            nn.ConvTranspose1d(32, 64, 4, stride=4),
            nn.ReLU(),
            nn.ConvTranspose1d(64, channels, 4, stride=4),
        )

    def forward(self, x):
        return self.up(self.down(x))


def get_args():
    parser = argparse.ArgumentParser()
    parser.add_argument("recording", help="a .npy file (time, channels)")
    parser.add_argument("--batch-size", type=int, default=32)
    parser.add_argument("--workers", type=int, default=0)
    parser.add_argument("--prefetch", type=int, default=2, help="batches a worker fetches ahead")
    parser.add_argument("--pin", action="store_true", help="page-locked batches")
    parser.add_argument("--length", type=int, default=1024)
    parser.add_argument("--stride", type=int, default=64)
    parser.add_argument("--steps", type=int, default=1000)
    parser.add_argument("--device", default=None)
    return parser.parse_args()


def run(args):
    device = args.device or ("cuda:0" if torch.cuda.is_available() else "cpu")
    dataset = Windows(args.recording, args.length, args.stride)
    options = {"num_workers": args.workers, "pin_memory": args.pin and device != "cpu"}
    if args.workers:
        options.update(prefetch_factor=args.prefetch, persistent_workers=True)
    loader = DataLoader(dataset, args.batch_size, shuffle=True, drop_last=True, **options)
    model = AutoEncoder(dataset.recording.shape[1]).to(device)
    optimizer = optim.AdamW(model.parameters(), lr=1e-3)
    batches = iter(loader)
    for step in range(args.steps):
        try:
            windows = next(batches)
        except StopIteration:
            batches = iter(loader)
            windows = next(batches)
        windows = windows.to(device, non_blocking=True)
        loss = (model(windows) - windows).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        if step % 100 == 0:
            print(f"step {step}: {loss.item():.4f}")


if __name__ == "__main__":
    run(get_args())
