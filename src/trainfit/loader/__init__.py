"""The DataLoader: what batches cost, which settings suit them, and what else would help."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from trainfit.loader.api import probe, tune

__all__ = ["probe", "tune"]


def __getattr__(name: str) -> Any:
    # PyTorch is imported only by those who measure.
    if name in __all__:
        from trainfit.loader import api

        return getattr(api, name)
    raise AttributeError(f"module 'trainfit.loader' has no attribute {name!r}")
