"""Streams and events of the simulated device."""

from __future__ import annotations

from collections import Counter
from typing import Any, ClassVar

import torch

from trainfit.results.runs.recording import gpu_of, stream_on
from trainfit.simgpu.cuda.clocks import ScriptTime
from trainfit.simgpu.device.device_memory import DeviceMemory
from trainfit.simgpu.device.tensor import CUDA, GPUS, current_engine, gpu_number
from trainfit.simgpu.operators.launch_log import KernelLog

#: PyTorch hands out streams from pools of so many, round robin (c10/cuda/CUDAStream.cpp).
_STREAMS_IN_POOL = 32


class CudaStream:
    """A CUDA stream of the simulated device; streams have separate allocator pools."""

    #: Streams made so far, by GPU and whether they have high priority.
    _counts: ClassVar[Counter[tuple[int, bool]]] = Counter()

    def __init__(self, device: Any = None, priority: int = 0, **kwargs: Any) -> None:
        number = kwargs.get("stream_id")
        if number is None:
            gpu, high = gpu_number(device), priority < 0
            made = self._counts[gpu, high] % _STREAMS_IN_POOL
            number = stream_on(gpu, 1 + made + high * _STREAMS_IN_POOL)
            self._counts[gpu, high] += 1
        self.stream_id: int = number
        self.device_index = gpu_of(number)
        self.device = GPUS[self.device_index]
        self.device_type = 1
        self.priority = priority
        self._previous: tuple[Any, ...] = ()

    @property
    def cuda_stream(self) -> int:
        return self.stream_id

    def query(self) -> bool:
        return True

    def synchronize(self) -> None:
        current_engine().memory.synchronize(self.stream_id)

    def is_capturing(self) -> bool:
        return self.stream_id in current_engine().memory.capturing

    @classmethod
    def count_anew(cls) -> None:
        """The first stream of each pool is the next that is made."""
        cls._counts.clear()

    def wait_stream(self, stream: Any) -> None:
        self.wait_event(stream.record_event())

    def wait_event(self, event: Any) -> None:
        event.wait(self)

    def record_event(self, event: Any = None) -> Any:
        event = torch.cuda.Event() if event is None else event
        event.record(self)
        return event

    def __enter__(self) -> CudaStream:
        # Of its own GPU, then of the current one, which set_stream changes.
        self._previous = torch.cuda.current_stream(self.device), torch.cuda.current_stream()
        torch.cuda.set_stream(self)  # type: ignore[arg-type]
        return self

    def __exit__(self, *_: Any) -> None:
        for each in self._previous:
            torch.cuda.set_stream(each)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, CudaStream) and other.stream_id == self.stream_id

    def __hash__(self) -> int:
        return hash((CudaStream, self.stream_id))

    def __repr__(self) -> str:
        return f"<torch.cuda.Stream device={self.device} cuda_stream={self.stream_id:#x} simulated>"


def event_class(memory: DeviceMemory, kernels: KernelLog, script_time: ScriptTime) -> type:
    """The class of a simulation's events."""

    class Event:
        """A CUDA event on the simulated clock."""

        def __init__(self, enable_timing: bool = False, blocking: bool = False, **_: Any) -> None:
            self.enable_timing = enable_timing
            self.device = CUDA
            self._at: float | None = None
            #: Its number and stream, and how many operators were submitted before.
            self._recorded: tuple[int, int, int] | None = None
            #: What the stream had waited for by then.
            self._after: dict[int, int] = {}

        def record(self, stream: Any = None) -> None:
            on = memory.stream if stream is None else stream.stream_id
            with script_time.simulating():
                self._recorded = kernels.event(on), on, memory.recorder.op_count
                self._at = script_time.now(on) if self.enable_timing else None
            self._after = memory.after(on)

        def query(self) -> bool:
            return True

        def synchronize(self) -> None:
            if self._recorded is not None:
                number, stream, submitted = self._recorded
                with script_time.simulating():
                    kernels.host_waits_for_event(number, stream)
                memory.synchronize(stream, submitted, self._after)

        def wait(self, stream: Any = None) -> None:
            if self._recorded is not None:
                number, recorded_on, submitted = self._recorded
                waiting = memory.stream if stream is None else stream.stream_id
                kernels.stream_waits(waiting, number, recorded_on)
                memory.comes_after(waiting, {**self._after, recorded_on: submitted})

        def elapsed_time(self, end_event: Any) -> float:
            """Milliseconds of simulated device time between the two events."""
            if not (self.enable_timing and end_event.enable_timing):
                raise ValueError("Both events must be created with argument 'enable_timing=True'.")
            if self._at is None or end_event._at is None:
                raise ValueError("Both events must be recorded before calculating elapsed time.")
            return float((end_event._at - self._at) * 1e3)

    return Event


def of_any_device(event: type) -> Any:
    """``torch.Event``, whose first argument is a device."""

    def make(device: Any = None, *, enable_timing: bool = False, **_: Any) -> Any:
        return event(enable_timing=enable_timing)

    return make
