"""What others hang on CUDA graphs, since PyTorch 2.14: hooks, callbacks, objects kept alive.

``torch/cuda/graphs.py`` has them in Python, around a graph that only a build with CUDA can make.
"""

from __future__ import annotations

import contextlib
import functools
import weakref
from collections import OrderedDict
from collections.abc import Callable
from typing import Any, Final

import torch
from torch.utils.hooks import RemovableHandle

from trainfit.simgpu.patching import PatchSet

Hook = Callable[[Any], None]

#: The functions that register a hook for every graph, by when it runs.
_FOR_ALL: Final = {
    "register_graph_capture_start_hook": "capture start",
    "register_graph_capture_end_hook": "capture end",
    "register_graph_instantiate_hook": "instantiation",
    "register_graph_replay_start_hook": "replay start",
    "register_graph_replay_end_hook": "replay end",
}


class GraphHooks:
    """Hooks by when they run, in the order of their registration."""

    def __init__(self) -> None:
        self._hooks: dict[str, OrderedDict[int, Hook]] = {
            moment: OrderedDict() for moment in _FOR_ALL.values()
        }

    def register(self, moment: str, fn: Hook) -> RemovableHandle:
        """The handle takes the hook out again."""
        return _register(self._hooks[moment], fn)

    def run(self, moment: str, graph: Any) -> None:
        """What a hook raises is the caller's."""
        for hook in list(self._hooks[moment].values()):
            hook(graph)

    def install(self, patches: PatchSet) -> None:
        """Take the hooks for every graph, where PyTorch has such."""
        for name, moment in _FOR_ALL.items():
            if hasattr(torch.cuda.graphs, name):
                patches.set(torch.cuda.graphs, name, functools.partial(self.register, moment))


class _Kept:
    """What is released with a graph's capture; it does not know the graph, which it would keep."""

    def __init__(self) -> None:
        self.callbacks: OrderedDict[int, Callable[[], None]] = OrderedDict()
        self.objects: OrderedDict[int, object] = OrderedDict()

    def release(self) -> None:
        callbacks = list(self.callbacks.values())
        self.callbacks.clear()
        for callback in callbacks:
            with contextlib.suppress(Exception):
                callback()
        self.objects.clear()


class HookedGraph:
    """The methods of a graph that register."""

    def __init__(self, for_all: GraphHooks) -> None:
        self._for_all = for_all
        self._hooks = GraphHooks()
        self._keep()

    def _keep(self) -> None:
        self._kept = _Kept()
        self._release_kept = weakref.finalize(self, self._kept.release)

    def _run(self, moment: str) -> None:
        with contextlib.suppress(Exception):
            self._for_all.run(moment, self)
        self._hooks.run(moment, self)

    def _let_go(self) -> None:
        """The capture is dropped."""
        self._release_kept()
        self._keep()

    def register_capture_start_hook(self, hook: Hook) -> RemovableHandle:
        return self._hooks.register("capture start", hook)

    def register_capture_end_hook(self, hook: Hook) -> RemovableHandle:
        return self._hooks.register("capture end", hook)

    def register_post_instantiate_hook(self, hook: Hook) -> RemovableHandle:
        return self._hooks.register("instantiation", hook)

    def register_replay_start_hook(self, hook: Hook) -> RemovableHandle:
        return self._hooks.register("replay start", hook)

    def register_replay_end_hook(self, hook: Hook) -> RemovableHandle:
        return self._hooks.register("replay end", hook)

    # Nothing that a simulated graph does is still going on: there is nothing to wait for.

    def register_destroy_callback(
        self, cb: Callable[[], None], *, synchronize_before_release: bool = False
    ) -> RemovableHandle:
        return _register(self._kept.callbacks, cb)

    def retain_object(
        self, obj: object, *, synchronize_before_release: bool = False
    ) -> RemovableHandle:
        return _register(self._kept.objects, obj)


def _register(registered: OrderedDict[int, Any], value: Any) -> RemovableHandle:
    handle = RemovableHandle(registered)
    registered[handle.id] = value
    return handle
