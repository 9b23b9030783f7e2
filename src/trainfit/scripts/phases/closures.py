"""A step of LBFGS computes the loss up to ``max_eval`` times: few of them are simulated.

Whether it converged cannot be told of simulated values: each step goes its full way. Its first
three evaluations are made; the others do what lies between the second and the third. The history of
directions is full after the first step, as it is in a run that goes on.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, Final

import torch

from trainfit.simgpu.patching import PatchSet
from trainfit.simgpu.session import Simulation

#: Evaluations of a step that are made.
_MADE: Final = 3
#: What torch/optim/lbfgs.py keeps for each pair of vectors in its history.
_VECTORS: Final = ("old_dirs", "old_stps")


class RepeatedClosures:
    """Leaves out evaluations of LBFGS that follow from those before.

    Args:
        simulation: where they are made.
        repeated: gets the evaluations that stand for others, as
            :class:`~trainfit.results.runs.recording.RepeatedCall` has them.
    """

    def __init__(self, simulation: Simulation, repeated: list[list[int]]) -> None:
        self._simulation, self._repeated = simulation, repeated

    def install(self, patches: PatchSet) -> None:
        """Watch from now on, until ``patches`` is restored."""
        patches.hook(torch.optim.LBFGS, "step", self._of_lbfgs)

    def _of_lbfgs(self, make: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(make)
        def step(optimizer: Any, closure: Any, *args: Any, **kwargs: Any) -> Any:
            group = optimizer.param_groups[0]
            first = group["params"][0] if group["params"] else None
            if first is None or first.device.type != "cuda":
                return make(optimizer, closure, *args, **kwargs)
            began: list[int] = []

            @functools.wraps(closure)
            def noted() -> Any:
                began.append(self._simulation.operators)
                return closure()

            most = evaluations(group)
            given = {name: group[name] for name in ("max_iter", "max_eval", "tolerance_change")}
            fewer = {name: min(given[name], _MADE) for name in ("max_iter", "max_eval")}
            group.update(fewer, tolerance_change=-1.0)
            try:
                result = make(optimizer, noted, *args, **kwargs)
            finally:
                group.update(given)
            if most > _MADE and len(began) >= _MADE:
                _, second, third = began[:_MADE]
                self._repeated.append([second, second, third, most - _MADE])
                self._simulation.engine.assume(
                    f"each step of LBFGS was assumed to compute the loss {most} times (as "
                    f"max_iter and max_eval allow), of which {_MADE} were simulated, and its "
                    "history to be full"
                )
            _fill_history(optimizer.state[first], group["history_size"])
            return result

        return step


def evaluations(group: dict[str, Any]) -> int:
    """How often a step computes the loss that does not converge: once an iteration; at most
    ``max_eval`` times where a line search has several in each."""
    if group.get("line_search_fn") is not None:
        return int(group["max_eval"])
    return int(min(group["max_iter"], group["max_eval"]))


def _fill_history(state: dict[str, Any], size: int) -> None:
    like = state.get("prev_flat_grad")
    if like is None or any(name not in state for name in _VECTORS):
        return
    while len(state["old_dirs"]) < size:
        for name in _VECTORS:
            state[name].append(torch.empty_like(like))
        state["ro"].append(torch.empty((), device=like.device, dtype=like.dtype))
