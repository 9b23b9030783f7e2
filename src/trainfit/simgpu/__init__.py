"""The simulated CUDA device: dispatch, autocast, allocator, clock, torch.cuda's surface."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from trainfit.simgpu.session import Simulation, simulate

__all__ = ["Simulation", "simulate"]


def __getattr__(name: str) -> Any:
    # Who only replays recordings (allocator, workspaces) does not wait for torch.
    if name in __all__:
        from trainfit.simgpu import session

        return getattr(session, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
