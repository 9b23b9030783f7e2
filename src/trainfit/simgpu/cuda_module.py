"""The simulated device's ``torch.cuda`` module, related modules, random number generators."""

from __future__ import annotations

import functools
import inspect
import threading
from typing import Any

import torch
from torch.backends.cudnn import rnn as cudnn_rnn

from trainfit.hardware import GpuSpec
from trainfit.hardware.gpu_topology import link_of
from trainfit.results.runs.recording import gpu_of, stream_on
from trainfit.simgpu.cuda_clocks import TrafficClock
from trainfit.simgpu.cuda_graphs import CudaStream, Graphs, graph_class, of_any_device
from trainfit.simgpu.cuda_memory_history import History
from trainfit.simgpu.device.device_memory import DeviceMemory
from trainfit.simgpu.device.errors import visible_gpus
from trainfit.simgpu.device.tensor import CPU, GPUS, gpu_number, ordinal
from trainfit.simgpu.patching import PatchSet
from trainfit.torch_private import cuda as private
from trainfit.torch_private.operators import Generator as PlainGenerator
from trainfit.torch_private.operators import storage_key

#: What ``torch.version.cuda`` reads where the installed build has no CUDA.
CUDA_VERSION = "13.0"
CUDNN_VERSION = 91501


class DeviceProperties:
    """Stands for ``torch._C._CudaDeviceProperties`` (same attribute names)."""

    def __init__(self, gpu: GpuSpec) -> None:
        major, minor = gpu.capability
        self.name = gpu.name
        self.major, self.minor = major, minor
        self.total_memory = gpu.memory_bytes
        self.multi_processor_count = gpu.sm_count
        self.is_integrated = int(gpu.shared_memory_device)
        self.is_multi_gpu_board = 0
        self.warp_size = 32
        self.max_threads_per_multi_processor = _threads_per_sm(major, minor)
        self.max_threads_per_block = 1024
        self.regs_per_multiprocessor = 65536
        self.shared_memory_per_block = 49152
        self.shared_memory_per_block_optin = _shared_memory(major, minor)
        self.shared_memory_per_multiprocessor = self.shared_memory_per_block_optin + 1024
        self.L2_cache_size = gpu.l2_bytes or 0
        self.clock_rate = int((gpu.boost_clock_hz or 0) / 1000)
        self.gcnArchName = ""
        self.uuid = "00000000-0000-0000-0000-000000000000"
        self.pci_bus_id, self.pci_device_id, self.pci_domain_id = 1, 0, 0

    def __repr__(self) -> str:
        return (
            f"_CudaDeviceProperties(name='{self.name}', major={self.major}, "
            f"minor={self.minor}, total_memory={self.total_memory // (1 << 20)}MB, "
            f"multi_processor_count={self.multi_processor_count}, simulated)"
        )


def _threads_per_sm(major: int, minor: int) -> int:
    """CUDA C++ programming guide, table "Technical specifications per compute capability"."""
    if major == 7 and minor == 5:
        return 1024
    if (major == 8 and minor in (6, 7, 9)) or major == 12:
        return 1536
    return 2048


def _shared_memory(major: int, minor: int) -> int:
    """Bytes of shared memory a block can opt in to; same table."""
    kib = {(7, 0): 96, (7, 5): 64, (8, 0): 163, (8, 6): 99, (8, 7): 163, (8, 9): 99}
    if major in (9, 10):
        return 227 * 1024
    return kib.get((major, minor), 99 if major >= 12 else 48) * 1024


_DTYPES = (
    torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.complex128,
    torch.complex64, torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8, torch.bool,
)  # fmt: skip

#: cudnnRNNMode_t
_RNN_MODES = {"RNN_RELU": 0, "RNN_TANH": 1, "LSTM": 2, "GRU": 3}

_IMPORTED_BY_NAME = {
    "is_initialized",
    private.LAZY_INIT.name,
    "current_device",
    "device_count",
    "is_current_stream_capturing",
}


class Surface:
    """Installs the simulated device into PyTorch's Python modules."""

    def __init__(self, gpu: GpuSpec, memory: DeviceMemory, event: type, graphs: Graphs) -> None:
        self._gpu = gpu
        self._memory = memory
        self._properties = DeviceProperties(gpu)
        self._defaults = [CudaStream(stream_id=stream_on(index, 0)) for index in range(gpu.count)]
        self._event = event
        self._graphs = graphs
        self._streams = threading.local()
        self._fractions = [1.0] * gpu.count

    def install(self, patches: PatchSet) -> None:
        CudaStream.count_anew()
        for name, value in self._c_functions().items():
            patches.set(*private.c_function(name), value)
        for name, value in self._cuda_functions().items():
            patches.set(torch.cuda, name, value)
        for name, value in self._memory_functions().items():
            patches.set(torch.cuda, name, value)
            patches.set(torch.cuda.memory, name, value)
        # These modules imported functions by name.
        for module in (torch.cuda.memory, torch.cuda.random, torch.cuda.graphs):
            for name in _IMPORTED_BY_NAME & vars(module).keys():
                patches.set(module, name, vars(torch.cuda)[name])
        patches.set(torch.cuda.streams, "Stream", CudaStream)
        patches.set(torch.cuda.streams, "Event", self._event)
        patches.set(torch, "Stream", CudaStream)
        patches.set(torch, "Event", of_any_device(self._event))
        patches.set(torch.cuda.graphs.graph, "default_capture_stream", None)
        patches.set(torch.cuda.graphs, "CUDAGraph", vars(torch.cuda)["CUDAGraph"])
        handle = functools.partial(self._graphs.handle, shared=True)
        patches.set(*private.GRAPH_POOL_HANDLE, handle)
        self._graphs.hooks.install(patches)
        # A stream of the simulation would stay there.
        patches.set(*private.PARALLEL_STREAMS, None)
        self._install_storages(patches)
        self._install_versions(patches)
        self._install_nvtx(patches)

    # -- functions of torch._C -------------------------------------------------------------

    def _c_functions(self) -> dict[str, Any]:
        memory, allocators = self._memory, self._memory.allocators

        def stats(device: int = 0) -> dict[str, Any]:
            memory.flush()
            return allocators[gpu_number(device)].memory_stats()

        def nothing(*_: Any, **__: Any) -> None:
            return None

        def synchronize(device: Any = None, *_: Any) -> None:
            with memory.on(gpu_number(device)):
                memory.synchronize()

        def set_settings(text: str) -> None:
            for allocator in allocators:
                allocator.apply(allocator.settings.changed_by(text, str(torch.__version__)))

        def set_device(device: Any) -> None:
            memory.gpu = gpu_number(device)

        def exchange(device: int) -> int:
            """Makes it the current one, if it is any; which was it before?"""
            before = memory.gpu
            if device < 0:
                return -1
            memory.gpu = gpu_number(device)
            return before

        # It asks for the time at each allocation: the clock that costs little will do.
        history = History(allocators[0], TrafficClock(memory.recorder, self._gpu).now)

        def snapshot(*_: Any) -> dict[str, Any]:
            memory.flush()
            return history.snapshot()

        functions: dict[str, Any] = {
            "cuda_getDeviceCount": lambda: visible_gpus(self._gpu.count),
            "cuda_getDevice": lambda: memory.gpu,
            "cuda_setDevice": set_device,
            "cuda_synchronize": synchronize,
            "cuda_ipc_collect": nothing,
            "cuda_getCurrentRawStream": lambda device=None: self._current_stream(device).stream_id,
            "cuda_emptyCache": memory.empty_cache,
            "cuda_memoryStats": stats,
            "cuda_memorySnapshot": snapshot,
            "cuda_resetPeakMemoryStats": lambda index: allocators[gpu_number(index)].reset_peaks(),
            "cuda_resetAccumulatedMemoryStats": (
                lambda index: allocators[gpu_number(index)].reset_accumulated()
            ),
            "cuda_getAllocatorBackend": lambda: "native",
            "cuda_record_memory_history": history.configure,
            "cuda_record_memory_history_legacy": history.configure_legacy,
            "cuda_isInBadFork": lambda: False,
            "cuda_isCurrentStreamCapturing": self._graphs.stream_captures,
            "host_emptyCache": nothing,
            "cuda_canDeviceAccessPeer": lambda *_: self._reach_each_other(),
            "cuda_getArchFlags": lambda: "sm_{}{}".format(*self._gpu.capability),
            "cuda_sleep": nothing,
            "get_accelerator": lambda *_: torch.device("cuda"),
            "accelerator_getAccelerator": lambda *_: torch.device("cuda"),
            "accelerator_getDeviceIndex": lambda: memory.gpu,
            "accelerator_setDeviceIndex": set_device,
            "accelerator_exchangeDevice": exchange,
            "accelerator_maybeExchangeDevice": exchange,
            "accelerator_synchronizeDevice": synchronize,
            "accelerator_setAllocatorSettings": set_settings,
            "cuda_cudaCachingAllocator_set_allocator_settings": set_settings,
            "accelerator_emptyCache": memory.empty_cache,
            "accelerator_getDeviceStats": stats,
            "accelerator_getMemoryInfo": self._mem_get_info,
            "accelerator_resetPeakStats": lambda index: allocators[gpu_number(index)].reset_peaks(),
            "accelerator_resetAccumulatedStats": (
                lambda index: allocators[gpu_number(index)].reset_accumulated()
            ),
            "accelerator_isAllocatorInitialized": lambda: True,
            "accelerator_getDeviceCapability": lambda *_: {"supported_dtypes": set(_DTYPES)},
            "accelerator_hooks_device_count": lambda: visible_gpus(self._gpu.count),
            "cuda_hostMemoryStats": lambda *_: {},
            "cuda_resetAccumulatedHostMemoryStats": nothing,
            "cuda_resetPeakHostMemoryStats": nothing,
            **self._benchmark_limit(),
            "accelerator_getStream": self._current_stream,
            "accelerator_setStream": lambda stream: self._set_stream(stream),
        }
        return functions

    @staticmethod
    def _benchmark_limit() -> dict[str, Any]:
        """``torch.backends.cudnn.benchmark_limit``; cuDNN's default."""
        limit = [10]
        return {
            "cuda_get_cudnn_benchmark_limit": lambda: limit[0],
            "cuda_set_cudnn_benchmark_limit": lambda value: limit.__setitem__(0, value),
        }

    # -- functions of torch.cuda -----------------------------------------------------------

    def _cuda_functions(self) -> dict[str, Any]:
        gpu, functions = self._gpu, self._c_functions()

        def properties(device: Any = None) -> DeviceProperties:
            # The other GPUs of the machine are of the same kind; to ask of one is not to use it.
            if ordinal(device) not in range(1, gpu.count):
                gpu_number(device)
            return self._properties

        return {
            private.LAZY_INIT.name: lambda: None,
            "init": lambda: None,
            "is_initialized": lambda: True,
            "is_available": lambda: True,
            "device_count": lambda: visible_gpus(self._gpu.count),
            "current_device": functions["cuda_getDevice"],
            "set_device": functions["cuda_setDevice"],
            private.EXCHANGE_DEVICE.name: functions["accelerator_exchangeDevice"],
            private.MAYBE_EXCHANGE_DEVICE.name: functions["accelerator_exchangeDevice"],
            "get_device_name": lambda device=None: properties(device).name,
            "get_device_capability": lambda device=None: (
                properties(device).major,
                properties(device).minor,
            ),
            "get_device_properties": properties,
            "is_bf16_supported": lambda including_emulation=True: (
                gpu.supports_bf16 or including_emulation
            ),
            "get_arch_list": lambda: ["sm_{}{}".format(*gpu.capability)],
            "is_current_stream_capturing": self._graphs.stream_captures,
            "synchronize": functions["cuda_synchronize"],
            "current_stream": self._current_stream,
            "default_stream": lambda device=None: self._defaults[gpu_number(device)],
            "set_stream": self._set_stream,
            "Stream": CudaStream,
            "ExternalStream": CudaStream,
            "Event": self._event,
            "CUDAGraph": graph_class(self._graphs),
            "utilization": lambda device=None: 100,
        }

    def _current_stream(self, device: Any = None) -> CudaStream:
        number = self._memory.stream_of(gpu_number(device))
        made: CudaStream | None = vars(self._streams).get(str(number))
        return self._defaults[gpu_of(number)] if made is None else made

    def _set_stream(self, stream: Any) -> None:
        if stream is not None:
            vars(self._streams)[str(stream.stream_id)] = stream
            self._memory.stream = stream.stream_id

    def _reach_each_other(self) -> bool:
        return link_of(self._gpu).kind in ("nvlink", "pcie")

    # -- memory ----------------------------------------------------------------------------

    def _memory_functions(self) -> dict[str, Any]:
        def set_fraction(fraction: float, device: Any = None) -> None:
            if not isinstance(fraction, float) or not 0 <= fraction <= 1:
                raise ValueError(f"Invalid fraction value: {fraction}. Allowed range: 0.0~1.0")
            gpu = gpu_number(device)
            self._fractions[gpu] = fraction
            self._memory.allocators[gpu].set_memory_fraction(fraction, self._gpu.memory_bytes)

        return {
            "mem_get_info": self._mem_get_info,
            "set_per_process_memory_fraction": set_fraction,
            "get_per_process_memory_fraction": lambda device=None: self._fractions[
                gpu_number(device)
            ],
        }

    def _mem_get_info(self, device: Any = None) -> tuple[int, int]:
        self._memory.flush()
        # To ask of a GPU is not to use it: libraries ask of all that there are.
        index = ordinal(device)
        number = index if index in range(self._gpu.count) else gpu_number(device)
        return self._memory.allocators[number].free_device_bytes(), self._gpu.memory_bytes

    # -- storages --------------------------------------------------------------------------

    def _install_storages(self, patches: PatchSet) -> None:
        memory = self._memory
        resize, device = torch.UntypedStorage.resize_, torch.UntypedStorage.device
        pointer = torch.UntypedStorage.data_ptr

        def resize_(storage: torch.UntypedStorage, nbytes: int) -> Any:
            result = resize(storage, nbytes)
            life = memory.lives.get(storage_key(storage))
            if life is not None and life.nbytes != nbytes:
                memory.resize(life, nbytes)
            return result

        def data_ptr(storage: torch.UntypedStorage) -> int:
            # By this libraries tell which tensors share a storage.
            life = memory.lives.get(storage_key(storage))
            if life is None:
                return pointer(storage)
            return 0 if life.block is None else life.block.address

        def get_device(storage: torch.UntypedStorage) -> torch.device:
            life = memory.lives.get(storage_key(storage))
            return device.__get__(storage) if life is None else GPUS[life.gpu]

        patches.set(torch.UntypedStorage, "resize_", resize_)
        patches.set(torch.UntypedStorage, "data_ptr", data_ptr)
        patches.set(torch.UntypedStorage, "device", property(get_device))

    # -- versions and tools ------------------------------------------------------------------

    def _install_versions(self, patches: PatchSet) -> None:
        if torch.version.cuda is None:
            patches.set(torch.version, "cuda", CUDA_VERSION)
        patches.set(torch.backends.cuda, "is_built", lambda: True)
        # Without its cache, which would outlive the simulation.
        patches.set(torch, "get_device_module", inspect.unwrap(torch.get_device_module))
        cudnn = torch.backends.cudnn.m  # type: ignore[attr-defined]
        patches.set(cudnn, "is_available", lambda: True)
        patches.set(cudnn, "version", lambda: CUDNN_VERSION)
        patches.set(*private.CUDNN_INIT, lambda: True)
        patches.set(cudnn_rnn, "get_cudnn_mode", _RNN_MODES.__getitem__)

    @staticmethod
    def _install_nvtx(patches: PatchSet) -> None:
        def nothing(*_: Any, **__: Any) -> int:
            return 0

        for name in ("range_push", "range_pop", "range_start", "range_end", "mark"):
            patches.set(torch.cuda.nvtx, name, nothing)


# ---
# Random number generators of the simulated device.
#
# No random number is ever drawn on it, so a generator is a seed and a state of the size that
# CUDA's has. It is a CPU generator underneath: PyTorch's argument parser takes no other class.


_STATE = 2  # 64-bit words: seed and offset, as CUDAGeneratorImpl::get_state writes them


class SimulatedGenerator(PlainGenerator):
    """``torch.Generator(device="cuda")``."""

    _offset: int

    _gpu: int

    def __new__(cls, gpu: int = 0) -> SimulatedGenerator:
        generator = PlainGenerator.__new__(cls, "cpu")  # type: ignore[call-arg]
        generator._offset, generator._gpu = 0, gpu
        return generator

    def __init__(self, gpu: int = 0) -> None:
        pass

    @property
    def device(self) -> torch.device:  # type: ignore[override]
        return GPUS[self._gpu]

    def get_state(self) -> torch.Tensor:
        seed = self.initial_seed()
        words = [seed - (1 << 64) if seed >> 63 else seed, self._offset]
        return torch.tensor(words, device=CPU).view(torch.uint8)

    def set_state(self, new_state: torch.Tensor) -> SimulatedGenerator:
        if new_state.dtype is not torch.uint8 or new_state.device.type != "cpu":
            raise TypeError("RNG state must be a torch.ByteTensor")
        if new_state.numel() != _STATE * 8:
            raise RuntimeError("RNG state is wrong size")
        seed, offset = new_state.clone().view(torch.int64).tolist()
        self.manual_seed(seed)
        self._offset = offset
        return self

    def get_offset(self) -> int:
        return self._offset

    def set_offset(self, offset: int) -> SimulatedGenerator:
        self._offset = offset
        return self

    def clone_state(self) -> SimulatedGenerator:
        return SimulatedGenerator(self._gpu).set_state(self.get_state())

    graphsafe_get_state = clone_state

    def graphsafe_set_state(self, other: torch.Generator) -> SimulatedGenerator:
        return self.set_state(other.get_state())

    def __reduce__(self) -> Any:
        return _rebuild, (self.get_state(),)


def _rebuild(state: torch.Tensor) -> SimulatedGenerator:
    return SimulatedGenerator().set_state(state)


class _AnyDevice(type):
    """Makes ``isinstance(generator, torch.Generator)`` true for all generators."""

    def __instancecheck__(cls, instance: object) -> bool:
        return isinstance(instance, PlainGenerator)

    def __call__(cls, device: Any = "cpu") -> Any:
        wanted = torch.device("cuda", device) if isinstance(device, int) else torch.device(device)
        if wanted.type != "cuda":
            return PlainGenerator(device)
        return SimulatedGenerator(gpu_number(wanted))


class Generator(metaclass=_AnyDevice):
    """Stands for ``torch.Generator``: makes a generator of the device that is asked for."""


def install(patches: PatchSet, count: int) -> None:
    """Let ``torch.Generator`` and ``torch.cuda.default_generators`` know so many devices."""
    patches.set(torch, "Generator", Generator)
    generators = tuple(SimulatedGenerator(index) for index in range(count))
    patches.set(torch.cuda, "default_generators", generators)
