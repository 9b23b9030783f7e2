"""Train a classifier on whitened covariance features: BLAS and LAPACK in the data set."""

import argparse

import numpy as np
import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset


class CovarianceDataset(Dataset):
    """Signals (channels, time); a sample is its covariance, whitened, and a label."""

    def __init__(self, samples, channels, length):
        self.samples, self.channels, self.length = samples, channels, length
        rng = np.random.default_rng(0)
        self.base = rng.normal(size=(channels, length + samples))
        self.mixing = rng.normal(size=(channels, channels)) / channels**0.5

    def __len__(self):
        return self.samples

    def __getitem__(self, index):
        signal = self.mixing @ self.base[:, index : index + self.length]
        covariance = signal @ signal.T / self.length
        u, values, vt = np.linalg.svd(covariance[:96, :96])
        whitening = (u / np.sqrt(values + 1e-3)) @ vt
        features = whitening @ covariance[:96, :96] @ whitening.T
        energy = np.log(np.diag(covariance @ covariance) + 1e-6)
        vector = np.concatenate([features[np.triu_indices(96)], energy])
        return torch.from_numpy(vector).float(), index % 4


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--batch-size", type=int, default=4)
    parser.add_argument("--num-workers", type=int, default=0)
    parser.add_argument("--prefetch-factor", type=int, default=None)
    parser.add_argument("--samples", type=int, default=512)
    parser.add_argument("--channels", type=int, default=160)
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--lr", type=float, default=1e-3)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    args = parser.parse_args()

    dataset = CovarianceDataset(args.samples, args.channels, 1024)
    loader = DataLoader(
        dataset,
        batch_size=args.batch_size,
        shuffle=True,
        num_workers=args.num_workers,
        prefetch_factor=args.prefetch_factor,
    )
    width = 96 * 97 // 2 + args.channels
    model = nn.Sequential(nn.Linear(width, 512), nn.ReLU(), nn.Linear(512, 4)).to(args.device)
    optimizer = torch.optim.Adam(model.parameters(), lr=args.lr)
    step = 0
    while step < args.steps:
        for features, labels in loader:
            features, labels = features.to(args.device), labels.to(args.device)
            loss = nn.functional.cross_entropy(model(features), labels)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            step += 1
            if step == args.steps:
                break
    print(f"{step} steps, loss {loss.item():.3f}")


if __name__ == "__main__":
    main()
