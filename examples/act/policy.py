"""The policy as a robot calls it: one action a turn, the network once a chunk.

    trainfit pace examples/act/policy.py:act --setup examples/act/policy.py:load --hz 30

On the GPU if there is one. Weights are random: times do not depend on them. `every_turn` runs the
network in each call, as a policy does that blends overlapping chunks.
"""

from __future__ import annotations

import sys
from collections import deque
from pathlib import Path

import torch
from torch import Tensor, nn

sys.path.insert(0, str(Path(__file__).resolve().parent))
from dataset import CAMERAS, STATE_DIM
from model import ACTConfig, ACTPolicy


class Chunk(nn.Module):
    """A call of it is a call of the whole policy."""

    def __init__(self) -> None:
        super().__init__()
        self.policy = ACTPolicy(ACTConfig())

    def forward(self, batch: dict[str, Tensor]) -> Tensor:
        """Actions (K, action_dim) of a batch of one."""
        return self.policy.predict(batch)[0]


class Robot:
    """A policy with its queue of actions, and what its cameras see."""

    def __init__(self, scale: float = 1.0) -> None:
        torch.manual_seed(0)
        self.device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
        self.network = Chunk().to(self.device).eval()
        self.actions: deque[Tensor] = deque()
        self.seen = {
            name: torch.rand(1, 3, round(scale * height), round(scale * width))
            for name, (width, height) in CAMERAS.items()
        }
        self.state = torch.zeros(1, STATE_DIM)

    @torch.inference_mode()
    def chunk(self) -> Tensor:
        """Actions (K, action_dim) on the CPU, from what is seen now."""
        batch = {name: image.to(self.device) for name, image in self.seen.items()}
        batch["state"] = self.state.to(self.device)
        return self.network(batch).cpu()


def load() -> Robot:
    """The policy at the cameras' full size."""
    return Robot()


def load_small() -> Robot:
    """With images of a quarter of the width and height: for a machine without a GPU."""
    return Robot(0.25)


def act(robot: Robot) -> Tensor:
    """The next action: from the queue, or from a new chunk where that is empty."""
    if not robot.actions:
        robot.actions.extend(robot.chunk())
    return robot.actions.popleft()


def every_turn(robot: Robot) -> Tensor:
    """The next action of a new chunk."""
    return robot.chunk()[0]


def main() -> None:
    """Some chunks one after the other: `trainfit plan --gpu "RTX 4090" -- python policy.py`."""
    robot = load()
    for _ in range(5):
        robot.chunk()


if __name__ == "__main__":
    main()
