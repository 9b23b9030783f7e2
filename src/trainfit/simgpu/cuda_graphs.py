"""CUDA graphs: capture records kernels without running them, replay runs them with one launch.

Memory follows ``CUDAGraph::capture_begin`` (ATen/cuda/CUDAGraph.cpp) and the caching allocator's
private pools: what capturing streams allocate comes from the graph's pool, blocks that are freed
stay there, and the pool's segments go back to the device only after its last graph is gone. What
CUDA itself takes for an instantiated graph, outside of PyTorch's memory, is not modelled.

Streams and events of the simulated device.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import weakref
from collections import Counter, OrderedDict
from collections.abc import Callable
from typing import Any, ClassVar, Final

import torch
from torch.utils.hooks import RemovableHandle

from trainfit.results.runs.recording import gpu_of, stream_on
from trainfit.simgpu.cuda_clocks import ScriptTime
from trainfit.simgpu.device.device_memory import DeviceMemory
from trainfit.simgpu.device.engine import Engine
from trainfit.simgpu.device.recorder import REPLAY, KernelRow
from trainfit.simgpu.device.tensor import CUDA, GPUS, current_engine, gpu_number
from trainfit.simgpu.operators.launch_log import KernelLog
from trainfit.simgpu.patching import PatchSet

# ---
# What others hang on CUDA graphs, since PyTorch 2.14: hooks, callbacks, objects kept alive.
#
# ``torch/cuda/graphs.py`` has them in Python, around a graph that only a build with CUDA can make.


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


_NOT_COUNTED: Final = "memory that CUDA uses for instantiated graphs is not counted"

Handle = tuple[int, int]


class _Capture:
    """What a graph captured: kernels, steps of the main optimizer, and whether random numbers
    were drawn."""

    def __init__(self, handle: Handle, pool: int) -> None:
        self.handle, self.pool = handle, pool
        self.kernels: list[KernelRow] = []
        self.stepped: list[weakref.ref[Any]] = []
        self.random = False


class Graphs:
    """The captures of one simulation."""

    def __init__(
        self, engine: Engine, kernels: KernelLog, count_step: Callable[[Any], None]
    ) -> None:
        self._engine, self._kernels, self._count_step = engine, kernels, count_step
        self._memory = engine.memory
        self._numbers = itertools.count(1)
        #: By handle: the number of the allocator's private pool, and how many graphs use it.
        self._pools: dict[Handle, int] = {}
        self._uses: dict[Handle, int] = {}
        self._present: _Capture | None = None
        #: Seed and offset of the random generator, which graphs read from the device.
        self._seeds: list[torch.Tensor] = []
        self._awaited: weakref.WeakSet[Any] = weakref.WeakSet()
        #: Steps before the latest capture's end, and whether the latest ran alongside the default
        #: stream.
        self._warm_up = 0
        self._beside = False
        #: For every graph.
        self.hooks = GraphHooks()
        #: Is a step over because its graph was replayed?
        self.replaying = False

    @property
    def capturing(self) -> bool:
        """Is a graph being captured?"""
        return self._present is not None

    @property
    def awaited(self) -> bool:
        """Is a capture to come? A graph was made for which nothing was captured yet, or the latest
        step ran on a stream of its own, as a warm-up does (which PyTorch asks for)."""
        return bool(self._awaited) or (self._beside and not self._pools)

    @property
    def warm_up_steps(self) -> int:
        """Steps before the latest capture; all so far where one is to come."""
        return self._engine.recorder.step if self.awaited else self._warm_up

    def step_ended(self) -> None:
        """A training step is over."""
        self._beside = self._memory.stream != 0

    def await_capture(self, graph: Any) -> None:
        """A graph was made."""
        self._awaited.add(graph)

    def handle(self, *, shared: bool) -> Handle:
        """``graph_pool_handle``: of a pool for several graphs, or of one graph's own."""
        number = next(self._numbers)
        return (0, number) if shared else (number, 0)

    def stream_captures(self) -> bool:
        """``is_current_stream_capturing``."""
        return self._memory.stream in self._memory.capturing

    def begin(self, graph: Any, handle: Handle | None) -> _Capture:
        """Raises ``RuntimeError`` as CUDA does where there is nothing to capture on."""
        if self._present is not None:
            raise RuntimeError("CUDA error: a graph is being captured already")
        if self._memory.stream == 0:
            raise RuntimeError(
                "CUDA graphs must be captured on a non-default stream. (However, after capture, "
                "it's ok to replay them on the default stream.)"
            )
        self._awaited.discard(graph)
        if not self._seeds:
            self._seeds = [torch.empty(1, dtype=torch.int64, device=CUDA) for _ in range(2)]
        handle = self.handle(shared=False) if handle is None else handle
        pool = self._pools.setdefault(handle, len(self._pools) + 1)
        self._uses[handle] = self._uses.get(handle, 0) + 1
        self._present = _Capture(handle, pool)
        self._memory.begin_capture(pool)
        self._kernels.captured = self._present.kernels
        self._engine.on_random = self._draw
        return self._present

    def end(self) -> None:
        """The capture is over."""
        if self._present is None:
            raise RuntimeError("CUDA error: no graph is being captured")
        self._present = None
        self._memory.end_capture()
        self._kernels.captured = None
        self._engine.on_random = _nothing
        self._warm_up = self._engine.recorder.step
        self._engine.assumptions.setdefault(_NOT_COUNTED, 1)

    def _draw(self) -> None:
        if self._present is not None:
            self._present.random = True

    def note_step(self, optimizer: Any) -> None:
        """An optimizer made a step, which is captured."""
        if self._present is not None:
            self._present.stepped.append(weakref.ref(optimizer))

    def replay(self, capture: _Capture) -> None:
        """Launch all captured kernels with one launch, and count the steps among them."""
        entered = self._engine.enter()
        try:
            if capture.random:
                with torch.no_grad():
                    for seed in self._seeds:
                        seed.fill_(0)
            engine = self._engine
            phase = engine.phase()
            engine.recorder.op(engine.recorder.string(REPLAY), phase, engine.modules.current(False))
            self._kernels.replay(capture.kernels)
        finally:
            if entered:
                self._engine.leave()
        self.replaying = True
        try:
            for stepped in capture.stepped:
                optimizer = stepped()
                if optimizer is not None:
                    self._count_step(optimizer)
        finally:
            self.replaying = False

    def release(self, capture: _Capture) -> None:
        """A graph let go of its pool."""
        self._uses[capture.handle] -= 1
        if not self._uses[capture.handle]:
            self._memory.allocator.release_pool(capture.pool)


def _nothing() -> None:
    return None


def graph_class(graphs: Graphs) -> type:
    """The class of a simulation's CUDA graphs."""

    class CUDAGraph(HookedGraph):
        """``torch.cuda.CUDAGraph`` on the simulated GPU."""

        def __init__(self, keep_graph: bool = False) -> None:
            super().__init__(graphs.hooks)
            self._keep_graph = keep_graph
            self._instantiated = False
            self._capture: _Capture | None = None
            self._release: Any = None
            graphs.await_capture(self)

        def capture_begin(self, pool: Handle | None = None, *_: Any, **__: Any) -> None:
            if self._capture is not None:
                raise RuntimeError(
                    "This CUDAGraph instance already owns a captured graph. "
                    "To capture a new graph, create a new instance."
                )
            self._capture = graphs.begin(self, pool)
            self._release = weakref.finalize(self, graphs.release, self._capture)
            self._release.atexit = False
            self._run("capture start")

        def capture_end(self) -> None:
            graphs.end()
            self._run("capture end")
            if not self._keep_graph:
                self.instantiate()

        def instantiate(self) -> None:
            self._captured("instantiate")
            self._instantiated = True
            self._run("instantiation")

        def replay(self) -> None:
            capture = self._captured("replay")
            if not self._instantiated:
                self.instantiate()
            self._run("replay start")
            try:
                graphs.replay(capture)
            finally:
                self._run("replay end")

        def reset(self) -> None:
            self._let_go()
            self._instantiated = False
            if self._release is not None:
                self._release()
            self._capture = self._release = None

        def pool(self) -> Handle:
            return self._captured("pool()").handle

        def pools(self) -> list[Handle]:
            return [self.pool()]

        def register_generator_state(self, generator: Any) -> None:
            """The default generator's tensors stand for all."""

        def enable_debug_mode(self) -> None:
            """There is nothing to dump."""

        def debug_dump(self, debug_path: str, *, verbose: bool = True) -> None:
            """There is nothing to dump."""

        def _captured(self, name: str) -> _Capture:
            if self._capture is None:
                raise RuntimeError(
                    f"Called CUDAGraph::{name} without a preceding successful capture."
                )
            return self._capture

    return CUDAGraph


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
