"""Records what every operator launches on the simulated GPU."""

from __future__ import annotations

from typing import Any, Final

from trainfit.results.kernels import DTYPES, KINDS
from trainfit.simgpu.engine import Engine, OperatorInfo
from trainfit.simgpu.gpu_kernels import Kernel, kernels_of
from trainfit.simgpu.layouts import COPIES
from trainfit.simgpu.least_work import may_round
from trainfit.simgpu.recorder import KernelRow

_KIND: Final = {name: code for code, name in enumerate(KINDS)}
_DTYPE: Final = {name: code for code, name in enumerate(DTYPES)}
_WAIT: Final = (_KIND["wait"], 0, 0, 0, 0, 0, 0, 0, 1, 0)


class KernelLog:
    """Writes the engine's kernels to its recorder.

    Operators with operands of the same geometry launch the same kernels: they are worked out
    once.
    """

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._known: dict[Any, list[KernelRow]] = {}

    def operator(
        self, info: OperatorInfo, key: Any, args: tuple[Any, ...], kwargs: Any, result: Any
    ) -> None:
        """An operator ran; ``key`` is its geometry, ``None`` where the engine did not need it."""
        if key is not None:
            key = (key, _rounding())
            rows = self._known.get(key)
            if rows is None:
                rows = self._known[key] = _rows(kernels_of(info.func, args, kwargs, result))
        else:
            rows = _rows(kernels_of(info.func, args, kwargs, result))
        if copied := self._engine.copied:
            rows = [*_rows([_copy(*each) for each in copied]), *rows]
            self._engine.copied = []
        if rows:
            write, stream = self._engine.recorder.kernel, self._engine.memory.stream
            for row in rows:
                write(row, stream)

    def wait(self) -> None:
        """The host waits until the GPU has done everything."""
        self._engine.recorder.kernel(_WAIT, self._engine.memory.stream)


def _copy(model: str, nbytes: int) -> Kernel:
    """Of an operand into the order that the operator's kernels take; only its bytes matter."""
    return Kernel(COPIES[model], "float32", 0, nbytes, nbytes)


def _rows(kernels: list[Kernel]) -> list[KernelRow]:
    return [
        (
            *(_KIND[each.kind], _DTYPE[each.dtype], each.flops, each.read_bytes),
            *(each.written_bytes, each.rows, each.columns, each.depth),
            *(each.batches, each.launches),
        )
        for each in kernels
    ]


def _rounding() -> tuple[bool, bool]:
    """The script's switches for TF32."""
    return may_round("convolution"), may_round("product")
