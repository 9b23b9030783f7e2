"""Watches the operators of a simulated run from outside the engine: their work, their operands."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

from trainfit.results.runs.trace import Compute
from trainfit.simgpu.launches.flops import flops_of
from trainfit.simgpu.launches.lower_bound import (
    kind_of_work,
    least_moved_bytes,
    makes_kernel,
    tensors_in,
)
from trainfit.simgpu.patching import PatchSet
from trainfit.simgpu.recording.recorder import SETUP
from trainfit.simgpu.recording.typical_step import steady_step
from trainfit.simgpu.session import Simulation
from trainfit.torch_private.modules import APPLY

#: Called after an operator with it, its arguments and its result.
Listener = Callable[[Any, tuple[Any, ...], Any], None]


class OperatorWatch:
    """Counts the work of each optimizer step; tells listeners of every operator.

    FLOPs are by :mod:`trainfit.simgpu.launches.flops`; traffic is every tensor that an operator
    reads or writes, once; views count nothing. What no GPU can do without is by
    :mod:`trainfit.simgpu.launches.lower_bound`.
    """

    def __init__(self, simulation: Simulation) -> None:
        self._simulation = simulation
        self._listeners: list[Listener] = []
        self._work: Counter[str] = Counter()
        self._setup: Counter[str] = Counter()
        self._steps: list[Counter[str]] = []
        self._operators = 0
        self._moving = 0
        self._l2_bytes = simulation.gpu.l2_bytes

    def listen(self, listener: Listener) -> None:
        """Call ``listener`` after every operator from now on."""
        self._listeners.append(listener)

    def install(self, patches: PatchSet) -> None:
        """Watch from now on, until ``patches`` is restored."""
        engine = self._simulation.engine
        run, info_of = engine.run, engine.info
        listeners, attempt = self._listeners, engine.accounting.attempt

        def watched(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
            result = run(func, args, kwargs)
            info = info_of(func)
            if not info.composite:  # its parts come by themselves
                if not info.view and not self._moving:
                    attempt(func, self._count, func, args, kwargs, result)
                for listener in listeners:
                    attempt(func, listener, func, args, result)
            return result

        apply = APPLY.now

        def _apply(module: Any, *args: Any, **kwargs: Any) -> Any:
            self._moving += 1
            try:
                return apply(module, *args, **kwargs)
            finally:
                self._moving -= 1

        patches.set(engine, "run", watched)
        patches.set(*APPLY, _apply)
        self._simulation.on_step(self._step_end)

    def steady_step(self) -> Compute | None:
        """The work of the typical step (:mod:`trainfit.simgpu.recording.typical_step`); ``None``
        before the first.

        Where the first is the only one, it comes without the model's set-up and moves.
        """
        if not self._steps:
            return None
        totals = [sum(step.values()) for step in self._steps]
        work = self._steps[steady_step([each["operators"] for each in self._steps], totals)]
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
        if not self._simulation.engine.forward_seen:  # nothing tells set-up from a step
            self._work += self._setup
        self._setup.clear()
        operators = self._simulation.engine.recorder.op_count
        self._work["operators"] = operators - self._operators
        self._steps.append(self._work)
        self._work, self._operators = Counter(), operators

    def _count(self, func: Any, args: Any, kwargs: Any, result: Any) -> None:
        work = self._setup if self._simulation.engine.phase() == SETUP else self._work
        operands = tensors_in((args, result))
        traffic = sum(tensor._spec.nbytes for tensor in operands)
        work["traffic"] += traffic
        work["kernels"] += traffic > 0 and makes_kernel(func)
        flops = flops_of(func, args, kwargs, result)
        if flops:
            work[kind_of_work(func, operands[0]._spec.dtype)] += flops
        work["moved"] += least_moved_bytes(func, args, result, self._l2_bytes)
