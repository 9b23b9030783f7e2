"""Watches the operators of a simulated run from outside the engine: their work, their operands."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

from trainfit.results.trace import Compute
from trainfit.simgpu.least_work import kind_of_work, least_moved_bytes, makes_kernel, tensors_in
from trainfit.simgpu.operator_flops import flops_of
from trainfit.simgpu.patching import PatchSet
from trainfit.simgpu.session import Simulation

#: Called after an operator with it, its arguments and its result.
Listener = Callable[[Any, tuple[Any, ...], Any], None]


class OperatorWatch:
    """Counts the work of each optimizer step; tells listeners of every operator.

    FLOPs are by :mod:`trainfit.simgpu.operator_flops`; traffic is every tensor that an operator
    reads or writes, once; views count nothing. What no GPU can do without is by
    :mod:`trainfit.simgpu.least_work`.
    """

    def __init__(self, simulation: Simulation) -> None:
        self._simulation = simulation
        self._listeners: list[Listener] = []
        self._work: Counter[str] = Counter()
        self._marks: list[Counter[str]] = [Counter()]
        self._l2_bytes = simulation.gpu.l2_bytes

    def listen(self, listener: Listener) -> None:
        """Call ``listener`` after every operator from now on."""
        self._listeners.append(listener)

    def install(self, patches: PatchSet) -> None:
        """Watch from now on, until ``patches`` is restored."""
        engine = self._simulation.engine
        run, info_of = engine.run, engine.info
        listeners = self._listeners

        def watched(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
            result = run(func, args, kwargs)
            info = info_of(func)
            if not info.composite:  # its parts come by themselves
                if not info.view:
                    self._count(func, args, kwargs, result)
                for listener in listeners:
                    listener(func, args, result)
            return result

        patches.set(engine, "run", watched)
        self._simulation.on_step(self._step_end)

    def last_step(self) -> Compute | None:
        """The work of the last whole step; ``None`` before the first."""
        if len(self._marks) < 2:
            return None
        before, after = self._marks[-2:]
        work = after - before
        flops = {name: n for name, n in work.items() if "/" in name}
        return Compute(
            flops=sum(flops.values()),
            traffic_bytes=work["traffic"],
            operators=work["operators"],
            flops_of=flops,
            kernels=work["kernels"],
            moved_bytes=work["moved"],
            compiled=any("torch.compile" in text for text in self._simulation.engine.assumptions),
        )

    def _step_end(self, steps: int) -> None:
        self._work["operators"] = self._simulation.engine.recorder.op_count
        self._marks = [self._marks[-1], Counter(self._work)]

    def _count(self, func: Any, args: Any, kwargs: Any, result: Any) -> None:
        operands = tensors_in((args, result))
        traffic = sum(tensor._spec.nbytes for tensor in operands)
        self._work["traffic"] += traffic
        self._work["kernels"] += traffic > 0 and makes_kernel(func)
        flops = flops_of(func, args, kwargs, result)
        if flops:
            self._work[kind_of_work(func, operands[0]._spec.dtype)] += flops
        self._work["moved"] += least_moved_bytes(func, args, result, self._l2_bytes)
