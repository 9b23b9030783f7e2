"""Trains LeRobot's own ACT policy, and the example's, on a simulated GPU.

Run as a script by test_peers.py, in a process of its own: LeRobot is installed without its
dependencies, so what its ACT policy imports but never calls (data sets, videos, simulators)
is replaced by stand-ins, which other tests must not meet. Prints one JSON document.

    python tests/helpers_lerobot.py fp32|bf16
"""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import importlib.util
import json
import sys
import types
from collections.abc import Sequence
from pathlib import Path
from typing import Any
from unittest.mock import MagicMock

import torch

import trainfit
from trainfit.memory.replay import Stream, replay
from trainfit.simgpu.operators.torchvision_operators import define_torchvision_operators

EXAMPLE = Path(__file__).parents[1] / "examples" / "act"
STEPS = 3
BATCH = 8
CHUNK = 30
STATE = ACTION = 26
CAMERAS = {"head": (360, 640), "wrist_left": (480, 640), "wrist_right": (480, 640)}

#: Dependencies of LeRobot's data sets and robots; the ACT policy calls none of them.
NEVER_CALLED = frozenset(
    {
        "cv2", "datasets", "deepdiff", "diffusers", "gymnasium", "imageio", "jsonlines", "pandas",
        "pyarrow", "rerun", "serial", "termcolor", "torchcodec", "wandb",
    }
)  # fmt: skip


class StandIns(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Finds an empty module for every absent dependency; comes after the real finders."""

    def find_spec(
        self, name: str, path: Sequence[str] | None = None, target: Any = None
    ) -> importlib.machinery.ModuleSpec | None:
        if name.partition(".")[0] in NEVER_CALLED:
            return importlib.machinery.ModuleSpec(name, self, is_package=True)
        return None

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> Any:
        return MagicMock(name=spec.name, __path__=[], __spec__=spec, __name__=spec.name)

    def exec_module(self, module: types.ModuleType) -> None:
        return None


def lerobot_policy() -> torch.nn.Module:
    """LeRobot's ACT policy, as published, for the example's cameras, state and chunk."""
    define_torchvision_operators()
    sys.meta_path.append(StandIns())
    # Its __init__ imports every policy there is, and with them robots and simulators.
    package = types.ModuleType("lerobot.policies")
    found = importlib.util.find_spec("lerobot")
    assert found is not None and found.origin is not None
    package.__path__ = [str(Path(found.origin).parent / "policies")]
    sys.modules["lerobot.policies"] = package
    from lerobot.configs.types import FeatureType, PolicyFeature
    from lerobot.policies.act.configuration_act import ACTConfig
    from lerobot.policies.act.modeling_act import ACTPolicy

    cameras = {
        f"observation.images.{name}": PolicyFeature(FeatureType.VISUAL, (3, *size))
        for name, size in CAMERAS.items()
    }
    state = PolicyFeature(FeatureType.STATE, (STATE,))
    action = PolicyFeature(FeatureType.ACTION, (ACTION,))
    config = ACTConfig(
        chunk_size=CHUNK,
        n_action_steps=CHUNK,
        device="cpu",
        pretrained_backbone_weights=None,
        input_features={"observation.state": state, **cameras},
        output_features={"action": action},
    )
    return ACTPolicy(config)


def lerobot_batch() -> dict[str, torch.Tensor]:
    images = {
        f"observation.images.{name}": torch.rand(BATCH, 3, *size) for name, size in CAMERAS.items()
    }
    return {
        "observation.state": torch.randn(BATCH, STATE),
        "action": torch.randn(BATCH, CHUNK, ACTION),
        "action_is_pad": torch.zeros(BATCH, CHUNK, dtype=torch.bool),
        **images,
    }


def example_policy() -> torch.nn.Module:
    """The policy of examples/act, with its defaults."""
    sys.path.insert(0, str(EXAMPLE))
    from model import ACTPolicy

    return ACTPolicy()


def example_batch() -> dict[str, torch.Tensor]:
    return {
        "state": torch.randn(BATCH, STATE),
        "action": torch.randn(BATCH, CHUNK, ACTION),
        "is_pad": torch.zeros(BATCH, CHUNK, dtype=torch.bool),
        **{name: torch.rand(BATCH, 3, *size) for name, size in CAMERAS.items()},
    }


MAKERS = {"lerobot": (lerobot_policy, lerobot_batch), "example": (example_policy, example_batch)}


def train(which: str, bf16: bool) -> dict[str, Any]:
    """Figures of a few steps with LeRobot's optimizer and gradient clipping."""
    make_policy, make_batch = MAKERS[which]
    with trainfit.simulate("RTX 4090") as simulation:
        policy = make_policy().cuda().train()
        optimizer = torch.optim.AdamW(policy.parameters(), lr=1e-5, weight_decay=1e-4)
        for _ in range(STEPS):
            batch = {name: value.cuda() for name, value in make_batch().items()}
            with torch.autocast("cuda", dtype=torch.bfloat16, enabled=bf16):
                loss, _ = policy(batch)
            loss.backward()
            torch.nn.utils.clip_grad_norm_(policy.parameters(), 10.0)
            optimizer.step()
            optimizer.zero_grad()
        seen = torch.cuda.max_memory_allocated()
    outcome = replay(Stream.of(simulation.recording))
    return {
        "parameters": sum(parameter.numel() for parameter in policy.parameters()),
        "steps": simulation.steps,
        "peak_allocated_bytes": outcome.peak_allocated,
        "peak_allocated_seen_bytes": seen,
    }


if __name__ == "__main__":
    print(json.dumps({which: train(which, sys.argv[1] == "bf16") for which in MAKERS}))
