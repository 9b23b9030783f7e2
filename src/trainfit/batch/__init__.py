"""What a batch size does to learning: gradient noise scale, goodput, learning rate.

``trainfit.batch.NoiseScale(model, batch_size=8)`` measures the noise scale of a training loop.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from trainfit.batch.noise_scale import NoiseScale

__all__ = ["NoiseScale"]


def __getattr__(name: str) -> Any:
    # The arithmetic of this package works without torch.
    if name == "NoiseScale":
        from trainfit.batch.noise_scale import NoiseScale

        return NoiseScale
    raise AttributeError(f"module 'trainfit.batch' has no attribute {name!r}")
