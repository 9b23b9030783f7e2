"""What ``torch.nn.parallel.comm`` and ``torch.cuda.nccl`` call: one process with several GPUs.

As ``torch/csrc/cuda/comm.cpp`` and ``nccl.cpp`` have it: parts are copied one after another, what
all GPUs get or add up goes by one collective of NCCL's on their current streams.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any, Final

import torch

from trainfit.results.gpus import Kernel
from trainfit.simgpu.device.engine import Engine
from trainfit.simgpu.device.tensor import CPU, GPUS, DeviceTensor, gpu_number, gpu_of, plain
from trainfit.simgpu.operators.kernel_rules import dtype_of
from trainfit.simgpu.operators.launch_log import KernelLog
from trainfit.simgpu.patching import PatchSet
from trainfit.torch_private import cuda as private
from trainfit.torch_private.cuda import PARALLEL_THREADS

#: ``_broadcast`` and ``_gather`` name the host so.
_HOST: Final = -1


class OneProcess:
    """Functions of ``torch._C`` for the GPUs of this process."""

    def __init__(self, engine: Engine, kernels: KernelLog) -> None:
        self._engine, self._kernels = engine, kernels

    def install(self, patches: PatchSet) -> None:
        functions: dict[str, Callable[..., Any]] = {
            "scatter": self._scatter,
            "scatter_out": self._scatter_out,
            "gather": self._gather,
            "gather_out": self._gather_out,
            "broadcast": self._broadcast,
            "broadcast_out": self._broadcast_out,
            "broadcast_coalesced": self._broadcast_coalesced,
            "nccl_reduce": self._reduce,
            "nccl_all_reduce": self._all_reduce,
        }
        for name, function in functions.items():
            patches.set(*private.c_function(name), function)

    # -- parts of a tensor -----------------------------------------------------------------------

    def _scatter(
        self, tensor: Any, devices: Any, sizes: Any, dim: int = 0, streams: Any = None
    ) -> list[torch.Tensor]:
        parts = tensor.chunk(len(devices), dim) if sizes is None else tensor.split(sizes, dim)
        made, memory = [], self._engine.memory
        for place, part in enumerate(parts):
            stream = streams[place] if streams else None
            gpu = gpu_number(devices[place])
            with memory.on(gpu):
                before = memory.stream
                if stream is not None and stream.device_index == gpu:
                    memory.stream = stream.stream_id
                try:
                    made.append(part.to(GPUS[gpu], non_blocking=True))
                finally:
                    memory.stream = before
        return made

    @staticmethod
    def _scatter_out(tensor: Any, out: Any, dim: int = 0, streams: Any = None) -> Any:
        for part, target in zip(tensor.split([e.size(dim) for e in out], dim), out, strict=True):
            target.copy_(part, non_blocking=True)
        return out

    def _gather(self, tensors: Any, dim: int, destination: int | None = None) -> torch.Tensor:
        size = list(tensors[0].shape)
        size[dim] = sum(tensor.size(dim) for tensor in tensors)
        host = destination == _HOST
        device = CPU if host else GPUS[gpu_number(destination)]
        target = torch.empty(size, dtype=tensors[0].dtype, device=device)
        return self._gather_out(tensors, target, dim)

    @staticmethod
    def _gather_out(tensors: Any, out: torch.Tensor, dim: int = 0) -> torch.Tensor:
        parts = out.split([tensor.size(dim) for tensor in tensors], dim)
        for part, source in zip(parts, tensors, strict=True):
            part.copy_(source, non_blocking=True)
        return out

    # -- the whole -------------------------------------------------------------------------------

    def _broadcast(self, tensor: Any, devices: Sequence[int]) -> list[torch.Tensor]:
        first = tensor if tensor.is_cuda else tensor.to(GPUS[devices[0]], non_blocking=True)
        others = [torch.empty_like(first, device=GPUS[device]) for device in devices[1:]]
        return [first, *self._broadcast_out(first, others)]

    def _broadcast_out(self, tensor: Any, out: Sequence[Any]) -> Sequence[Any]:
        source = tensor if tensor.is_cuda else tensor.to(out[0].device)
        self._together("broadcast", source, [source, *out])
        return out

    def _broadcast_coalesced(
        self, tensors: Sequence[Any], devices: Sequence[int], buffer_size: int
    ) -> list[list[torch.Tensor]]:
        """Tensors of one dtype, and of so many bytes, go together; each is a view of that."""
        made: list[list[torch.Tensor]] = [[] for _ in devices]
        made[0] = list(tensors)
        for chunk in private.take_tensors(tensors, buffer_size):
            flat = chunk[0].contiguous().view(-1) if len(chunk) == 1 else private.flatten(chunk)
            copies = self._broadcast(flat, devices)[1:]
            for place, copy in enumerate(copies, start=1):
                made[place] += private.unflatten(copy, chunk)
        for place in range(1, len(devices)):
            made[place] = list(private.in_order_of(made[place], tensors))
        return made

    def _reduce(
        self,
        inputs: Sequence[Any],
        output: Any,
        root: int = 0,
        op: int = 0,
        streams: Any = None,
        comms: Any = None,
    ) -> None:
        self._together("reduce", output, [inputs[root], *inputs])
        self._engine.values.forget(plain(output)._life)

    def _all_reduce(
        self,
        inputs: Sequence[Any],
        outputs: Sequence[Any],
        op: int = 0,
        streams: Any = None,
        comms: Any = None,
    ) -> None:
        self._together("all_reduce", inputs[0], inputs)
        for output in outputs:
            self._engine.values.forget(plain(output)._life)

    def _together(self, kind: str, whole: Any, tensors: Sequence[Any]) -> None:
        """A collective of ``whole``'s bytes among the GPUs of ``tensors``, begun on its own."""
        gpus = list(dict.fromkeys(gpu_of(tensor) for tensor in tensors if _on_device(tensor)))
        nbytes = whole.numel() * whole.element_size()
        if len(gpus) < 2 or not nbytes:
            return
        self._engine.use_library("nccl")
        kernel = Kernel(kind, dtype_of(plain(whole)), 0, nbytes, nbytes, len(gpus))
        self._kernels.together(kernel, gpu_of(whole), gpus)


def _on_device(tensor: Any) -> bool:
    return isinstance(tensor, DeviceTensor)


# ---
# Threads of ``DataParallel``'s replicas: they run their operators in turns.
#
# In which order threads run is chance, on a GPU as well, where it makes no difference to speak of.
# Two simulated runs have to launch the same operators in the same order to be compared.


#: So long a thread waits for its turn (s): another that has it may wait for a lock of the script's
#: that this one holds.
_PATIENCE: Final = 60.0


class Turns:
    """The turns of the threads that take part."""

    def __init__(self) -> None:
        self._change = threading.Condition()
        self._threads: deque[threading.Thread] = deque()

    def join(self, thread: threading.Thread) -> None:
        """It takes part from now on, whether it has started or not."""
        with self._change:
            self._threads.append(thread)

    def wait(self, thread: threading.Thread) -> None:
        """Wait until it is the turn of ``thread``; one that has waited too long takes part no
        more."""
        with self._change:
            self._change.wait_for(lambda: self._threads[0] is thread, _PATIENCE)
            if self._threads[0] is not thread:
                self._threads.remove(thread)

    def leave(self, thread: threading.Thread) -> None:
        """It has come to its end."""
        with self._change:
            if thread in self._threads:
                self._threads.remove(thread)
            self._change.notify_all()

    def pass_on(self) -> None:
        """The calling thread has run an operator; it goes on when its turn has come again."""
        thread = threading.current_thread()
        with self._change:
            if len(self._threads) < 2 or self._threads[0] is not thread:
                return
            self._threads.rotate(-1)
            self._change.notify_all()
        self.wait(thread)


def install(patches: PatchSet, engine: Engine) -> None:
    """Let the threads that ``parallel_apply`` makes take turns."""
    turns = Turns()
    engine.on_done = turns.pass_on

    class Replica(threading.Thread):
        """A thread of ``parallel_apply``, which makes all of them before it starts one."""

        def __init__(self, *args: Any, **kwargs: Any) -> None:
            super().__init__(*args, **kwargs)
            turns.join(self)

        def run(self) -> None:
            turns.wait(self)
            try:
                super().run()
            finally:
                turns.leave(self)

    patches.set(*PARALLEL_THREADS, SimpleNamespace(Thread=Replica, Lock=threading.Lock))
