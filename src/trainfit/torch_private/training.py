"""What trains a model: optimizers, gradient scaling, autocast."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.amp import autocast_mode
from torch.optim import optimizer as optim

from trainfit.torch_private.needed import attribute, needed, place

with needed():
    from torch.utils import _foreach_utils

#: The types of tensors that optimizers take lists of, in each module that has the list.
FOREACH_TYPES = tuple(
    place(module, "_foreach_supported_types") for module in (_foreach_utils, optim)
)
GROUP_TENSORS = place(torch._C, "_group_tensors_by_device_and_dtype")
UNSCALE_GRADS = place(torch.amp.GradScaler, "_unscale_grads_")

attribute(torch.amp.GradScaler, "_scale")
#: Is a context of autocast switched on?
autocast_is_on: Callable[[Any], bool] = attribute(autocast_mode.autocast, "_enabled")


def scale_of(scaler: Any) -> Any:
    """A GradScaler's scale: a tensor on the device once it is used."""
    return getattr(scaler, "_scale", None)


def switch_off(context: Any) -> None:
    """Let a context of autocast change nothing."""
    context._enabled = False


def unscales_itself(optimizer: Any) -> None:
    """Let a GradScaler leave the gradients to the optimizer, as it does for fused ones."""
    optimizer._step_supports_amp_scaling = True
