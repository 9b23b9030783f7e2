"""What the drivers share: the batch size's option and the device, as every training script has."""

import argparse

import torch


def options(batch_size=16, **more):
    """``--batch-size`` and whole numbers of other names."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--batch-size", type=int, default=batch_size)
    for name, value in more.items():
        parser.add_argument("--" + name.replace("_", "-"), type=int, default=value)
    torch.manual_seed(0)
    return parser.parse_args()


def device():
    """The GPU, where there is one."""
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")
