"""trainfit: fits a PyTorch training or inference job to the hardware it runs on."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

if TYPE_CHECKING:
    from trainfit.simgpu import simulate

__all__ = ["__version__", "simulate"]


def __getattr__(name: str) -> Any:
    # torch is imported only by those who simulate.
    if name == "simulate":
        from trainfit.simgpu import simulate

        return simulate
    raise AttributeError(f"module 'trainfit' has no attribute {name!r}")
