"""``torch.cuda`` and what it calls in ``torch._C``."""

from __future__ import annotations

import contextlib
import ctypes
import importlib
from typing import Any, Final

import torch

from trainfit.torch_private.needed import PrivateName, needed, place


def _names(text: str) -> frozenset[str]:
    return frozenset(text.split())


#: Functions of ``torch._C`` behind ``torch.cuda`` and ``torch.accelerator``, without their
#: underscore. A build without CUDA lacks those of the first list.
_CUDA: Final = _names(
    """
    cuda_canDeviceAccessPeer cuda_emptyCache cuda_getAllocatorBackend cuda_getArchFlags
    cuda_getCurrentRawStream cuda_getDevice cuda_getDeviceCount cuda_get_cudnn_benchmark_limit
    cuda_hostMemoryStats cuda_ipc_collect cuda_isCurrentStreamCapturing cuda_isInBadFork
    cuda_memorySnapshot cuda_memoryStats cuda_record_memory_history
    cuda_record_memory_history_legacy cuda_resetAccumulatedHostMemoryStats
    cuda_resetAccumulatedMemoryStats cuda_resetPeakHostMemoryStats cuda_resetPeakMemoryStats
    cuda_setDevice cuda_set_cudnn_benchmark_limit cuda_sleep cuda_synchronize host_emptyCache
    broadcast broadcast_coalesced broadcast_out gather gather_out nccl_all_reduce nccl_reduce
    scatter scatter_out
    """
)
_ACCELERATOR: Final = _names(
    """
    accelerator_exchangeDevice accelerator_getAccelerator accelerator_getDeviceIndex
    accelerator_getStream accelerator_hooks_device_count accelerator_maybeExchangeDevice
    accelerator_setDeviceIndex accelerator_setStream accelerator_synchronizeDevice
    get_accelerator
    """
)
#: Those that only some of the tested versions have.
_SOME_VERSIONS: Final = _names(
    """
    accelerator_emptyCache accelerator_getDeviceCapability accelerator_getDeviceStats
    accelerator_getMemoryInfo accelerator_isAllocatorInitialized
    accelerator_resetAccumulatedStats accelerator_resetPeakStats
    accelerator_setAllocatorSettings cuda_cudaCachingAllocator_set_allocator_settings
    """
)
#: ``c10::DeviceType::CUDA``.
_CUDA_TYPE: Final = 1
#: Functions of C that the simulated device supplies.
_C_FUNCTIONS: Final = _CUDA | _ACCELERATOR | _SOME_VERSIONS

with needed():
    from torch import _utils
    from torch.nn.parallel import _functions as _parallel_functions

    #: Tensors of one dtype and of so many bytes together; they as one, and it as views again.
    take_tensors: Any = _utils._take_tensors
    flatten: Any = _utils._flatten_dense_tensors
    unflatten: Any = _utils._unflatten_dense_tensors
    in_order_of: Any = _utils._reorder_tensors_as

    #: Turns in circles for so many cycles.
    sleep: Any = torch.cuda._sleep
    #: Calls a function once CUDA is initialized, at once where it is.
    when_initialized: Any = torch.cuda._lazy_call
    record_memory_history: Any = torch.cuda.memory._record_memory_history
    dump_snapshot: Any = torch.cuda.memory._dump_snapshot

LAZY_INIT = place(torch.cuda, "_lazy_init")
EXCHANGE_DEVICE = place(torch.cuda, "_exchange_device")
MAYBE_EXCHANGE_DEVICE = place(torch.cuda, "_maybe_exchange_device")
GRAPH_POOL_HANDLE = place(torch.cuda.graphs, "_graph_pool_handle")
#: Streams for copies to each GPU, made when they are first asked for.
PARALLEL_STREAMS = place(_parallel_functions, "_streams")
#: The module ``threading`` as ``parallel_apply`` knows it.
PARALLEL_THREADS = place(importlib.import_module("torch.nn.parallel.parallel_apply"), "threading")
CUDNN_INIT = place(torch.backends.cudnn.m, "_init")  # type: ignore[attr-defined]


def c_function(name: str) -> PrivateName:
    """The place of a function that the simulated device supplies, or that a build with CUDA would
    have."""
    assert name in _C_FUNCTIONS, name
    return PrivateName(torch._C, f"_{name}")


def initialize_anew() -> None:
    """Let C++ call ``torch.cuda._lazy_init`` before the next tensor on a GPU, as if none had been
    made (``torch::utils::set_requires_device_init``); nothing where the build hides that."""
    with contextlib.suppress(OSError, AttributeError):
        library = ctypes.PyDLL(torch._C.__file__)
        ask = library._ZN5torch5utils24set_requires_device_initEN3c1010DeviceTypeEb
        ask(ctypes.c_int8(_CUDA_TYPE), ctypes.c_bool(True))


def missing_functions() -> tuple[str, ...]:
    """Functions of C that the tested versions have and this one has not: what a script asks of
    what has come in their place is not simulated."""
    built = _ACCELERATOR if torch.version.cuda is None else _ACCELERATOR | _CUDA
    return tuple(f"torch._C._{name}" for name in sorted(built) if not hasattr(torch._C, f"_{name}"))
