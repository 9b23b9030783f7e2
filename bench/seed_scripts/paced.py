"""A small network, called as a robot's control loop calls its policy."""

from __future__ import annotations

import torch
from torch import Tensor, nn


def load() -> nn.Module:
    """The network; one thread, as a loop's own."""
    torch.set_num_threads(1)
    layers = [layer for _ in range(12) for layer in (nn.Linear(256, 256), nn.ReLU())]
    return nn.Sequential(*layers).eval()


@torch.inference_mode()
def act(network: nn.Module) -> Tensor:
    """One action of what is seen now."""
    return network(torch.zeros(8, 256))
