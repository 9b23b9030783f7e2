"""Watches the operators of a simulated run from outside the engine: their work, their operands."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch.utils.flop_counter import flop_registry

from trainfit.results.trace import Compute
from trainfit.simgpu.patching import PatchSet
from trainfit.simgpu.session import Simulation
from trainfit.simgpu.tensor import SimulatedTensor

#: Called after an operator with it, its arguments and its result.
Listener = Callable[[Any, tuple[Any, ...], Any], None]


class OperatorWatch:
    """Counts the work of each optimizer step; tells listeners of every operator.

    FLOPs are those of matrix products, convolutions and attention by the formulas of
    ``torch.utils.flop_counter``; traffic is every tensor that an operator reads or writes,
    once; views count nothing.
    """

    def __init__(self, simulation: Simulation) -> None:
        self._simulation = simulation
        self._listeners: list[Listener] = []
        self._flops = self._traffic = 0
        self._marks: list[tuple[int, int, int]] = [(0, 0, 0)]

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
        flops, traffic, operators = (b - a for a, b in zip(before, after, strict=True))
        return Compute(flops, traffic, operators)

    def _step_end(self, steps: int) -> None:
        count = self._simulation.engine.recorder.op_count
        self._marks.append((self._flops, self._traffic, count))

    def _count(self, func: Any, args: Any, kwargs: Any, result: Any) -> None:
        formula = flop_registry.get(func._overloadpacket)
        if formula is not None:
            self._flops += int(formula(*args, **kwargs, out_val=result))
        self._traffic += sum(tensor._spec.nbytes for tensor in tensors_in((args, result)))


def tensors_in(value: Any) -> list[SimulatedTensor]:
    """The simulated tensors in arguments or results, lists among them included."""
    kind = type(value)
    if kind is SimulatedTensor:
        return [value]
    if kind is tuple or kind is list:
        return [tensor for each in value for tensor in tensors_in(each)]
    return []
