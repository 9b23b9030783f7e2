"""Runs a user's script on the CPU for a few steps and measures how long each takes.

Runs in a process of its own (``main``), whose environment shows PyTorch no GPU. Steps end with
the optimizer's step, or with a call of the model; how long the script waits for its DataLoader is
measured separately.
"""

from __future__ import annotations

import contextlib
import itertools
import sys
import time
import types
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

import psutil
import torch
from torch.overrides import TorchFunctionMode

from trainfit.results.real_runs import CpuRunOutcome
from trainfit.results.runs.spec import RunSpec
from trainfit.results.runs.trace import ScriptOutcome
from trainfit.scripts.real_run import ScriptRun
from trainfit.simgpu.patching import PatchSet
from trainfit.torch_private import compiled
from trainfit.torch_private.data_loading import LoaderIterator

# ---
# Redirects a script's hard-coded GPU to the CPU: scripts with ``.cuda()`` or ``device="cuda"``
# written into them, which shall run on the CPU for real. They are told that there is a GPU, and get
# tensors of the CPU; autocast for CUDA does nothing to those: they are computed with in the type
# that they have. Nothing is slowed but by a look at each call's device.


_CPU: Final = torch.device("cpu")
_NAME: Final = "CPU"


def on_cpu(device: Any) -> Any:
    """The CPU where a GPU is meant; anything else (a dtype, a tensor, another device) as it is."""
    if isinstance(device, str) and device.partition(":")[0] == "cuda":
        return _CPU
    if isinstance(device, torch.device) and device.type == "cuda":
        return _CPU
    return _CPU if type(device) is int else device


class _OnCpu(TorchFunctionMode):
    """Sends what names a GPU to the CPU."""

    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func in (torch.Tensor.cuda, torch.Tensor.pin_memory):
            return args[0]
        if func is torch.Tensor.to:
            args = (args[0], *map(on_cpu, args[1:]))
        if kwargs.get("device") is not None:
            kwargs = {**kwargs, "device": on_cpu(kwargs["device"])}
        if kwargs.get("pin_memory"):
            kwargs = {**kwargs, "pin_memory": False}
        return func(*args, **kwargs)


class _Stream:
    """Everything is done when it was asked for."""

    def __init__(self, *_: Any, **__: Any) -> None:
        self.device = _CPU

    def query(self) -> bool:
        return True

    def record_event(self, event: Any = None) -> Any:
        event = event or _Event()
        event.record()
        return event

    def synchronize(self, *_: Any) -> None:
        return None

    wait_stream = wait_event = synchronize

    def __enter__(self) -> _Stream:
        return self

    def __exit__(self, *_: Any) -> None:
        return None


class _Event:
    """An event on the machine's clock."""

    def __init__(self, *_: Any, **__: Any) -> None:
        self._at = time.perf_counter()

    def record(self, *_: Any) -> None:
        self._at = time.perf_counter()

    def query(self) -> bool:
        return True

    def synchronize(self, *_: Any) -> None:
        return None

    wait = synchronize

    def elapsed_time(self, end_event: _Event) -> float:
        """Milliseconds between the two."""
        return 1e3 * (end_event._at - self._at)


class _Generator(torch.Generator):
    def __new__(cls, device: Any = _CPU) -> Any:
        return super().__new__(cls, on_cpu(device))  # type: ignore[call-arg]


@contextlib.contextmanager
def cpu_for_cuda() -> Iterator[None]:
    """Inside, scripts find one GPU, which is the CPU."""
    # Every optimizer imports torch._dynamo; it must see PyTorch as it is, not patched.
    compiled.import_compiler()
    patches = PatchSet()
    try:
        for name, value in _surface().items():
            patches.set(torch.cuda, name, value)
        patches.set(torch, "Generator", _Generator)
        patches.hook(torch, "load", _loads)
        with _OnCpu():
            yield
    finally:
        patches.restore()


def _surface() -> dict[str, Any]:
    """What scripts ask of ``torch.cuda``."""
    memory = psutil.virtual_memory()
    properties = types.SimpleNamespace(
        name=_NAME,
        major=8,
        minor=0,
        total_memory=memory.total,
        multi_processor_count=psutil.cpu_count() or 1,
    )

    def nothing(*_: Any, **__: Any) -> None:
        return None

    quiet = (
        *("init", "set_device", "synchronize", "set_stream", "empty_cache", "ipc_collect"),
        *("reset_peak_memory_stats", "reset_max_memory_allocated", "reset_max_memory_cached"),
        *("reset_accumulated_memory_stats", "set_per_process_memory_fraction"),
        *("manual_seed", "manual_seed_all", "seed", "seed_all"),
    )
    counters = (
        "memory_allocated",
        "max_memory_allocated",
        "memory_reserved",
        "max_memory_reserved",
    )
    return {
        **dict.fromkeys(quiet, nothing),
        **dict.fromkeys(counters, lambda *_, **__: 0),
        "is_available": lambda: True,
        "is_initialized": lambda: True,
        "is_bf16_supported": lambda *_, **__: True,
        "device_count": lambda: 1,
        "current_device": lambda: 0,
        "get_device_name": lambda *_: _NAME,
        "get_device_capability": lambda *_: (properties.major, properties.minor),
        "get_device_properties": lambda *_: properties,
        "mem_get_info": lambda *_: (psutil.virtual_memory().available, memory.total),
        "memory_stats": lambda *_: {},
        "memory_summary": lambda *_, **__: "",
        "current_stream": _Stream,
        "default_stream": _Stream,
        "stream": lambda stream: stream or _Stream(),
        "device": lambda *_: contextlib.nullcontext(),
        "Stream": _Stream,
        "Event": _Event,
    }


def _loads(load: Any) -> Any:
    """``torch.load``, to the CPU."""

    def loaded(file: Any, map_location: Any = None, *args: Any, **kwargs: Any) -> Any:
        return load(file, "cpu", *args, **kwargs)

    return loaded


# ---
# The run.


class CpuRun(ScriptRun):
    """One run of a script on the CPU."""

    def __init__(self, spec: RunSpec) -> None:
        super().__init__(spec)
        self._ended: list[float] = []
        self._waited: list[float] = []
        self._waits_s = 0.0

    def run(self) -> None:
        """Run the script to its stop or its end and write the outcome."""
        patches = PatchSet()
        self._watch_loaders(patches)
        try:
            with cpu_for_cuda() if self.spec.cpu_stands_in else contextlib.nullcontext():
                super().run()
        finally:
            patches.restore()

    def note(self) -> None:
        self._ended.append(time.perf_counter())
        self._waited.append(self._waits_s)

    def enough(self) -> bool:
        spec = self.spec
        if self.steps >= spec.steps or spec.enough_s is None:
            return self.steps >= spec.steps
        passed = time.perf_counter() - self._ended[0] if self._ended else 0.0
        return self.steps >= spec.least_steps and passed >= spec.enough_s

    def keep(self, end: ScriptOutcome) -> None:
        CpuRunOutcome(
            **vars(end),
            step_seconds=tuple(two - one for one, two in itertools.pairwise(self._ended)),
            waited_s=tuple(two - one for one, two in itertools.pairwise(self._waited)),
            threads=torch.get_num_threads(),
        ).save(self.spec.outcome)

    def _watch_loaders(self, patches: PatchSet) -> None:
        kind = LoaderIterator
        original = kind.__next__

        def __next__(iterator: Any) -> Any:
            began = time.perf_counter()
            try:
                return original(iterator)
            finally:
                with contextlib.suppress(Exception):
                    self._waits_s += time.perf_counter() - began

        patches.set(kind, "__next__", __next__)


def main() -> None:
    """The child process's entry point."""
    CpuRun(RunSpec.load(Path(sys.argv[1]))).run()
