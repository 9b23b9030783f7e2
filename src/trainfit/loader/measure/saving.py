"""Time of saving a checkpoint while workers are busy with their next batches.

The main process saves, and takes no batch meanwhile; each worker goes on until its queue is full.
"""

from __future__ import annotations

import tempfile
import time
from typing import Final

import torch

from trainfit.results.loader.candidates import SAVE_BYTES
from trainfit.results.loader.settings import LoaderSettings

#: Of the consumer's time, what it waits at least where batches are not ready ahead of it.
_WAITS: Final = 0.02


def save_seconds(nbytes: int = SAVE_BYTES) -> float | None:
    """Save so many bytes with ``torch.save`` to a temporary file; ``None`` where that fails."""
    state = {"weight": torch.ones(nbytes // 4)}
    try:
        with tempfile.TemporaryFile(prefix="trainfit-save-") as file:
            began = time.monotonic()
            torch.save(state, file)
            file.flush()
            return time.monotonic() - began
    except (OSError, RuntimeError):  # PyTorch's writer raises the latter, on a full disk
        return None


def predicted_save_s(
    alone_s: float, settings: LoaderSettings, waiting_share: float, batch_s: float, cores: float
) -> float:
    """What takes ``alone_s`` seconds of a core without workers.

    A loader that the consumer waits for has all of its batches still to make, ``batch_s`` of work
    each; the workers share the cores with the main process until these are made. One that is
    waited for by nobody has them ready, and its workers idle.
    """
    if not settings.num_workers or waiting_share < _WAITS:
        return alone_s
    at_once = min(float(settings.num_workers), cores)
    busy_s = settings.tokens * batch_s / at_once
    share = min(1.0, cores / (settings.num_workers + 1))
    return alone_s / share if alone_s <= share * busy_s else alone_s + busy_s * (1 - share)
