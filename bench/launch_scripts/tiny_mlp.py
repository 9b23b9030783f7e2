"""Fit a tiny MLP to a table that is in memory: steps take microseconds."""

from argparse import ArgumentParser

import torch
from torch.utils.data import DataLoader, TensorDataset

parser = ArgumentParser()
parser.add_argument("--batch-size", default=32, type=int)
parser.add_argument("--num-workers", default=0, type=int)
parser.add_argument("--rows", default=20000, type=int)
parser.add_argument("--steps", default=5000, type=int)
parser.add_argument("--no-cuda", action="store_true")


def main(args):
    device = "cuda" if torch.cuda.is_available() and not args.no_cuda else "cpu"
    torch.manual_seed(0)
    table = torch.randn(args.rows, 16)
    target = table.square().sum(1, keepdim=True).sqrt()
    loader = DataLoader(
        TensorDataset(table, target),
        batch_size=args.batch_size,
        shuffle=True,
        num_workers=args.num_workers,
    )
    model = torch.nn.Sequential(
        torch.nn.Linear(16, 32), torch.nn.Tanh(), torch.nn.Linear(32, 1)
    ).to(device)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-2)
    step = 0
    while True:
        for x, y in loader:
            optimizer.zero_grad()
            error = (model(x.to(device)) - y.to(device)).pow(2).mean()
            error.backward()
            optimizer.step()
            step += 1
            if step >= args.steps:
                print(f"error {error.item():.4f}")
                return


if __name__ == "__main__":
    main(parser.parse_args())
