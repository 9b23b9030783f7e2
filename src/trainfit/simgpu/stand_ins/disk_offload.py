"""Weights that Accelerate keeps on the disk: their files are holes, and nothing is read from them.

A model that is offloaded would be written in full, and read with each call
(``accelerate/utils/offload.py``); what it computes on the simulated GPU depends on no weight. Small
tensors are written and read: a script may look at one. What comes from there or from the host with
each call (``accelerate/hooks.py``) are parameters, as it is told here.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Mapping
from pathlib import Path
from types import ModuleType
from typing import Any, Final

import torch

from trainfit.results.text import dtype_name
from trainfit.simgpu.device.host_fills import unwritten
from trainfit.simgpu.patching import PatchSet

_OFFLOAD: Final = "accelerate.utils.offload"
_HOOKS: Final = "accelerate.hooks"
#: Bytes of the smallest weight that is not written.
_LARGE: Final = 1 << 20


class DiskOffload:
    """Takes over Accelerate's functions that write and read one weight.

    Args:
        assume: notes what the figures lack.
        loaded: is told of each module whose weights were brought to the GPU for its call.
    """

    def __init__(
        self, assume: Callable[[str], object], loaded: Callable[[torch.nn.Module], None]
    ) -> None:
        self._assume, self._loaded = assume, loaded

    def install(self, patches: PatchSet) -> None:
        """Patch its functions when they are imported, if they ever are."""

        def seen(module: ModuleType) -> None:
            if hasattr(module, "offload_weight") and hasattr(module, "load_offloaded_weight"):
                patches.hook(module, "offload_weight", self._writing)
                patches.hook(module, "load_offloaded_weight", self._reading)
            if hasattr(module, "OffloadedWeightsLoader"):
                patches.hook(module.OffloadedWeightsLoader, "__getitem__", self._noting)

        def calling(module: ModuleType) -> None:
            if hasattr(module, "AlignDevicesHook"):
                patches.hook(module.AlignDevicesHook, "pre_forward", self._loading)

        patches.when_imported(_OFFLOAD, seen)
        patches.when_imported(_HOOKS, calling)

    def _loading(self, load: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(load)
        def pre_forward(hook: Any, module: torch.nn.Module, *args: Any, **kwargs: Any) -> Any:
            found = load(hook, module, *args, **kwargs)
            if getattr(hook, "offload", False):
                inner = getattr(hook, "place_submodules", False)
                for each in module.modules() if inner else (module,):
                    self._loaded(each)
            return found

        return pre_forward

    def _writing(self, write: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(write)
        def offload_weight(
            weight: Any, weight_name: str, offload_folder: Any, index: Any = None
        ) -> Any:
            if weight.is_meta or weight.nbytes < _LARGE:
                return write(weight, weight_name, offload_folder, index)
            if index is not None:
                shape = list(weight.shape)
                index[weight_name] = {"dtype": dtype_name(weight.dtype), "shape": shape}
            with Path(offload_folder, f"{weight_name}.dat").open("wb") as file:
                file.truncate(weight.nbytes)
            return index

        return offload_weight

    def _reading(self, read: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(read)
        def load_offloaded_weight(weight_file: Any, weight_info: Mapping[str, Any]) -> Any:
            dtype, shape = getattr(torch, weight_info["dtype"]), weight_info["shape"]
            if math.prod(shape) * dtype.itemsize < _LARGE:
                return read(weight_file, weight_info)
            return unwritten(torch.empty(shape, dtype=dtype, device="meta"))

        return load_offloaded_weight

    def _noting(self, find: Callable[..., Any]) -> Callable[..., Any]:
        """Note what is on the disk, in a file of its own or in the model's checkpoint."""

        @functools.wraps(find)
        def __getitem__(weights: Any, key: str) -> Any:
            found = find(weights, key)
            if key not in weights.state_dict and found.nbytes >= _LARGE:
                self._assume(
                    "weights that Accelerate keeps on the disk are read from it with each call: "
                    "that is in no time, their way over PCIe is"
                )
            return found

        return __getitem__
