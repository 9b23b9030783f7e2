"""Adapters of :func:`trainfit.watch` for training loops of Lightning, Transformers and Accelerate.

A loop's own package is imported with the adapter that is named, not with trainfit.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from trainfit.integrations.accelerate import AccelerateTracker
    from trainfit.integrations.lightning import LightningCallback
    from trainfit.integrations.transformers import TransformersCallback

__all__ = ["AccelerateTracker", "LightningCallback", "TransformersCallback"]

_MODULES: Final = {
    "AccelerateTracker": "accelerate",
    "LightningCallback": "lightning",
    "TransformersCallback": "transformers",
}


def __getattr__(name: str) -> Any:
    if name in _MODULES:
        return getattr(importlib.import_module(f"{__name__}.{_MODULES[name]}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
