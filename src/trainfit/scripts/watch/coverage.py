"""Detects an evaluation or a checkpoint among the simulated steps.

Both can need memory that no training step does. Nothing that goes wrong while watching reaches
the script.
"""

from __future__ import annotations

import contextlib
import functools
import math
from collections.abc import Callable
from types import ModuleType
from typing import Any

import torch

from trainfit.results.runs.coverage import Coverage
from trainfit.results.runs.trace import LoaderInfo
from trainfit.simgpu.import_hook import ImportHook
from trainfit.simgpu.patching import PatchSet


class CoverageWatch:
    """Follows models, optimizers and checkpoints of a script.

    Args:
        feeding: tells of the DataLoader that feeds the training, and how far it has come.
    """

    def __init__(self, feeding: Callable[[], LoaderInfo | None]) -> None:
        self._feeding = feeding
        self._trained: set[int] = set()
        self._evaluated = self._saved = False
        #: Steps made and batches given, at the first step and at the last.
        self._progress: list[tuple[int, int]] = []
        self._imports: ImportHook | None = None

    def install(self, patches: PatchSet) -> None:
        """Watch from now on, until ``patches`` is restored and :meth:`remove` is called."""
        self._watch_parameters(patches)
        patches.hook(torch, "save", self._noting)

        def safetensors(module: ModuleType) -> None:
            # What its save_file and save_model call, whoever has imported them by name.
            if hasattr(module, "serialize_file"):
                patches.hook(module, "serialize_file", self._noting)

        self._imports = ImportHook("safetensors.torch", safetensors)
        self._imports.install()

    def remove(self) -> None:
        """Take the import hook away; the patches are their owner's to restore."""
        if self._imports is not None:
            self._imports.remove()

    def called(self, module: torch.nn.Module) -> None:
        """An outermost module with parameters is about to be called."""
        if self._evaluated or module.training:
            return
        with contextlib.suppress(Exception):
            self._evaluated = any(id(each) in self._trained for each in module.parameters())

    def stepped(self, steps: int) -> None:
        """An optimizer step is over, the ``steps``-th."""
        loader = self._feeding()
        if loader is not None:
            self._progress = [*self._progress[:1], (steps, loader.batches)]

    def result(self) -> Coverage:
        """What was seen so far."""
        epochs, steps = self._epoch()
        return Coverage(self._evaluated, self._saved, epochs, steps)

    def _epoch(self) -> tuple[float | None, int | None]:
        """Epochs that were done, and optimizer steps in one, where the data set's size is known.

        Batches are counted between the first step and the last: some loaders read ahead.
        """
        loader = self._feeding()
        if loader is None or not loader.samples or not loader.batch_size or not self._progress:
            return None, None
        batches = math.ceil(loader.samples / loader.batch_size)
        (first, before), (last, after) = self._progress[0], self._progress[-1]
        for_each = after / last if first == last else (after - before) / (last - first)
        if for_each <= 0:
            return None, None
        steps = max(1, math.ceil(batches / for_each))
        return last / steps, steps

    def _watch_parameters(self, patches: PatchSet) -> None:
        add = torch.optim.Optimizer.add_param_group
        trained = self._trained

        @functools.wraps(add)
        def add_param_group(optimizer: Any, param_group: dict[str, Any]) -> None:
            add(optimizer, param_group)
            with contextlib.suppress(Exception):
                trained.update(map(id, optimizer.param_groups[-1]["params"]))

        patches.set(torch.optim.Optimizer, "add_param_group", add_param_group)

    def _noting(self, write: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(write)
        def wrapper(*args: Any, **kwargs: Any) -> Any:
            self._saved = True
            return write(*args, **kwargs)

        return wrapper
