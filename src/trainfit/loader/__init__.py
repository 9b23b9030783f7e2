"""The DataLoader: what batches cost, which settings suit them, and what else would help."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from trainfit.loader.local_tuning import probe, tune

__all__ = ["probe", "tune"]


def __getattr__(name: str) -> Any:
    # PyTorch is imported only by those who measure.
    if name in __all__:
        from trainfit.loader import local_tuning

        return getattr(local_tuning, name)
    raise AttributeError(f"module 'trainfit.loader' has no attribute {name!r}")
