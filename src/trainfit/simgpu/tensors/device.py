"""The one GPU of the simulated machine, as PyTorch names devices."""

from __future__ import annotations

from typing import Any

import torch

from trainfit.simgpu.recording.user_location import user_frame
from trainfit.simgpu.tensors.errors import SeveralGpusError

CUDA = torch.device("cuda", 0)
META = torch.device("meta")
CPU = torch.device("cpu")


def check_ordinal(device: Any) -> None:
    """The simulated machine has one GPU; raises :class:`SeveralGpusError` for another."""
    index = device
    if isinstance(device, str):
        device = torch.device(device)
    if isinstance(device, torch.device):
        index = device.index
    if index not in (None, 0, -1):
        raise SeveralGpusError(f"cuda:{index} (invalid device ordinal)", user_frame())
