"""What of a training run was among its simulated steps."""

from __future__ import annotations

import dataclasses


@dataclasses.dataclass(frozen=True)
class Coverage:
    """Whether the script evaluated its model and wrote a checkpoint while it was simulated.

    ``evaluated``: a model with trained parameters was called in evaluation mode or without
    gradients. ``saved``: ``torch.save`` or safetensors wrote something. ``epochs`` is how much of
    its data the DataLoader had given by the last step, ``steps_per_epoch`` how many optimizer
    steps an epoch has at that pace (``None``: not known).
    """

    evaluated: bool
    saved: bool
    epochs: float | None = None
    steps_per_epoch: int | None = None
