"""Stores of keys that ranks share (``TCPStore``, ``FileStore``), for the one that is simulated.

A store that waits for other processes would wait for its whole timeout: none of them is started.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from datetime import timedelta
from typing import Any, Final

import torch

from trainfit.simgpu.device.errors import UnsupportedOperatorError
from trainfit.simgpu.device.user_location import user_frame
from trainfit.simgpu.patching import PatchSet

#: Its functions and classes are not all declared.
distributed: Any = torch.distributed

#: A key that only another rank would set is never there.
_TIMEOUT: Final = timedelta(seconds=1)
#: Methods that wait for keys, which are their first argument.
_WAITS: Final = ("get", "wait", "multi_get", "queue_pop")
#: Stores that other processes come to, with the names of what a script may read of them.
_SHARED: Final = ("TCPStore", "FileStore")


def make_store() -> Any:
    """One that waits for nobody: ``init_process_group`` would give it the group's timeout."""
    store = type("HashStore", (distributed.HashStore,), {"set_timeout": lambda *_: None})()
    distributed.HashStore.set_timeout(store, _TIMEOUT)
    return store


class _Alone(type):
    """Makes stores without other processes in the place of ``original``'s, and knows both."""

    original: Any = ()

    def __call__(cls, *args: Any, **kwargs: Any) -> Any:
        return make_store()

    def __instancecheck__(cls, instance: object) -> bool:
        return isinstance(instance, (cls.original, distributed.HashStore))


def install(patches: PatchSet) -> None:
    """Let stores be this process's own, and name a key that only another rank has."""
    for name in _SHARED:
        if (original := getattr(distributed, name, None)) is None:
            continue
        alone = _Alone(name, (), {})
        alone.original = original
        for module in ("torch.distributed", "torch.distributed.rendezvous"):
            if hasattr(sys.modules.get(module), name):
                patches.set(sys.modules[module], name, alone)
    for name in _WAITS:
        if hasattr(distributed.Store, name):
            patches.hook(distributed.Store, name, _named)
    if hasattr(distributed.Store, "barrier"):
        patches.set(distributed.Store, "barrier", lambda *_, **__: None)


def _named(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def waits(store: Any, keys: Any, *args: Any, **kwargs: Any) -> Any:
        try:
            return original(store, keys, *args, **kwargs)
        except distributed.DistStoreError:
            raise _only_elsewhere(keys, waits.__name__) from None

    return waits


def _only_elsewhere(keys: Any, method: str) -> UnsupportedOperatorError:
    named = keys if isinstance(keys, str) else ", ".join(map(str, keys))
    rank = distributed.get_rank() if distributed.is_initialized() else 0
    return UnsupportedOperatorError(
        f'Store.{method}("{named}")',
        user_frame(),
        "not simulated",
        f"the script reads a value that only another rank has: rank {rank} runs, and nothing of it "
        "sets this key; let rank 0 set it, or have each rank make the value itself",
    )
