"""Log of every operator's launches on the simulated GPU, with the dependencies between streams."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any, Final

from trainfit.results.gpus import Kernel
from trainfit.results.runs.steps import DTYPES, KINDS
from trainfit.results.text import count
from trainfit.simgpu.device.engine import Engine
from trainfit.simgpu.device.geometry import COPIES
from trainfit.simgpu.device.recorder import KernelRow
from trainfit.simgpu.device.registry import OperatorInfo
from trainfit.simgpu.operators import library_kernels as _library  # noqa: F401  (registers)
from trainfit.simgpu.operators import native_kernels as _native  # noqa: F401  (registers)
from trainfit.simgpu.operators.flops import by_name, flops_of
from trainfit.simgpu.operators.kernel_rules import RULES, makes_kernel, may_round
from trainfit.simgpu.operators.native_kernels import by_operands
from trainfit.torch_private.operators import short_name

_KIND: Final = {name: code for code, name in enumerate(KINDS)}
_UNKNOWN: Final = _KIND["unknown"]
#: Operators that are named in the note.
_NAMED: Final = 6
#: Where the FLOPs of a row are.
_FLOPS: Final = 2
#: How operators are timed that no rule knows, without their FLOPs and with them.
_UNKNOWN_TIMES: Final = {
    False: "without a FLOPs rule, timed by the bytes of their operands alone",
    True: "of which no time on a GPU is known, timed by their FLOPs and bytes",
}
_DTYPE: Final = {name: code for code, name in enumerate(DTYPES)}


def kernels_of(
    func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any], result: Any
) -> list[Kernel]:
    """What ``func`` launches; nothing for empty tensors. Views are not to be asked for."""
    if not makes_kernel(func):
        return []
    flops = flops_of(func, args, kwargs, result)
    rule = RULES.get(short_name(func))
    if rule is not None:
        found = rule(by_name(func, args, kwargs), result, flops)
    else:
        found = [by_operands(func, args, kwargs, result, flops)]
    return [each for each in found if each.read_bytes + each.written_bytes > 0]


class KernelLog:
    """Writes the engine's kernels to its recorder.

    Operators with operands of the same geometry launch the same kernels: they are worked out
    once.
    """

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._known: dict[Any, list[KernelRow]] = {}
        self._events = 0
        #: Operators of others than PyTorch without a rule, and how often each ran in a step: those
        #: without FLOPs, and with them.
        self._unknown: dict[bool, dict[str, Counter[int]]] = {False: {}, True: {}}
        #: Where kernels of capturing streams go while a graph is captured.
        self.captured: list[KernelRow] | None = None

    def operator(
        self, info: OperatorInfo, key: Any, args: tuple[Any, ...], kwargs: Any, result: Any
    ) -> None:
        """An operator ran; ``key`` is its geometry, ``None`` where the engine did not need it."""
        source = self._engine.source_gpu
        if key is not None and source is None:
            key = (key, _rounding())
            rows = self._known.get(key)
            if rows is None:
                rows = self._known[key] = _rows(kernels_of(info.func, args, kwargs, result))
        else:
            rows = _rows(kernels_of(info.func, args, kwargs, result))
        if copied := self._engine.copied:
            rows = [*_rows([_copy(*each) for each in copied]), *rows]
            self._engine.copied = []
        if rows and rows[0][0] == _UNKNOWN:
            of_kind = self._unknown[rows[0][_FLOPS] > 0]
            each = of_kind.setdefault(info.func.name(), Counter())
            each[self._engine.recorder.step] += 1
        if rows and source is not None:
            self._from_another(rows, source)
        elif rows:
            self._write(rows, self._engine.memory.stream)

    def _from_another(self, rows: list[KernelRow], gpu: int) -> None:
        """A copy from a GPU runs on its stream, between what is there and what comes here
        (copy_kernel_cuda in ATen/native/cuda/Copy.cu)."""
        here, there = self._engine.memory.stream, self._engine.memory.stream_of(gpu)
        self.stream_waits(there, self.event(here), here)
        self._write(rows, there)
        self.stream_waits(here, self.event(there), there)

    def assumption(self) -> str | None:
        """What the result has to state of operators that no rule knows."""
        parts = [
            f"{count(len(each), 'operator')} {_UNKNOWN_TIMES[has_flops]}: {_named(each)}"
            for has_flops, each in self._unknown.items()
            if each
        ]
        return f"{'; '.join(parts)}; where they do more, a step is longer" if parts else None

    def together(self, kernel: Kernel, root: int, gpus: Sequence[int]) -> None:
        """A collective of several GPUs of the process, on their current streams."""
        on = self._engine.memory.stream_of(root)
        others = [self._engine.memory.stream_of(number) for number in gpus if number != root]
        for stream in others:
            self.stream_waits(on, self.event(stream), stream)
        self._write(_rows([kernel]), on)
        for stream in others:
            self.stream_waits(stream, self.event(on), on)

    def kernel(self, kernel: Kernel, stream: int | None = None) -> None:
        """A kernel that no operator of PyTorch's launches, on the current stream or another."""
        on = self._engine.memory.stream if stream is None else stream
        self._write(_rows([kernel]), on)

    def replay(self, rows: list[KernelRow]) -> None:
        """Kernels that a graph holds, with one launch for all."""
        recorder, stream = self._engine.recorder, self._engine.memory.stream
        recorder.kernel((_KIND["graph"], 0, 0, 0, 0, len(rows), 0, 0, 1, 1), stream)
        for row in rows:
            recorder.kernel(row, stream)

    def _write(self, rows: list[KernelRow], stream: int) -> None:
        if self.captured is not None and stream in self._engine.memory.capturing:
            self.captured.extend(rows)
            return
        write = self._engine.recorder.kernel
        for row in rows:
            write(row, stream)

    def host_waits(self, stream: int | None) -> None:
        """The host waits until the GPU has done everything, or a stream (given) has."""
        if stream is None:
            self._mark("wait", self._engine.memory.stream)
        else:
            self._mark("stream_wait", stream)

    def event(self, stream: int) -> int:
        """An event is recorded on a stream; returns its number."""
        self._events += 1
        self._mark("event", stream, self._events)
        return self._events

    def stream_waits(self, stream: int, event: int, recorded_on: int) -> None:
        """What is launched on ``stream`` from now on begins after an event of another."""
        capturing = self._engine.memory.capturing
        if recorded_on in capturing:
            capturing.add(stream)
        self._mark("event_wait", stream, event, recorded_on)

    def host_waits_for_event(self, event: int, recorded_on: int) -> None:
        """The host waits for an event."""
        self._mark("event_synchronize", recorded_on, event)

    def _mark(self, kind: str, stream: int, event: int = 0, recorded_on: int = 0) -> None:
        if self.captured is not None and stream in self._engine.memory.capturing:
            return  # order within a graph, whose kernels are replayed one after the other
        row = (_KIND[kind], 0, 0, 0, 0, event, recorded_on, 0, 1, 0)
        self._engine.recorder.kernel(row, stream)


def _copy(model: str, nbytes: int) -> Kernel:
    """The copy of an operand into the order that the operator's kernels need; only its bytes
    matter."""
    return Kernel(COPIES[model], "float32", 0, nbytes, nbytes)


def _named(operators: Mapping[str, Counter[int]]) -> str:
    """The names of those that run most often, and how many more there are."""
    most = {name: max(steps.values()) for name, steps in operators.items()}
    ordered = sorted(most, key=lambda name: -most[name])
    named = [f"{name} ({most[name]}× a step)" for name in ordered[:_NAMED]]
    return ", ".join(
        [*named, *([f"{len(ordered) - _NAMED} more"] if len(ordered) > _NAMED else [])]
    )


def _rows(kernels: list[Kernel]) -> list[KernelRow]:
    return [
        (
            *(_KIND[kernel.kind], _DTYPE[kernel.dtype], kernel.flops, kernel.read_bytes),
            *(kernel.written_bytes, kernel.rows, kernel.columns, kernel.depth),
            *(kernel.batches, kernel.launches),
        )
        for kernel in kernels
    ]


def _rounding() -> tuple[bool, bool]:
    """The script's switches for TF32."""
    return may_round("convolution"), may_round("matmul")
