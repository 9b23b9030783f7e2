"""A training that is looked at as a simulated or a watched run looks at it."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

from trainfit.hooks.learning import LearningObserver
from trainfit.hooks.learning_hooks import install
from trainfit.results.findings import Finding
from trainfit.simgpu.device.user_location import user_frame
from trainfit.simgpu.patching import PatchSet
from trainfit.simgpu.session import Simulation

#: Runs a training, and gives its findings by their kind.
Kinds = Callable[[Callable[[], Any]], dict[str, Finding]]


@contextlib.contextmanager
def observing(
    simulation: Simulation | None = None,
    place: Callable[[], Any] = user_frame,
    **options: bool,
) -> Iterator[LearningObserver]:
    """PyTorch's calls in the block are told to an observer with these options, and those of the
    arithmetic on a simulated device where one is given."""
    patches = PatchSet()
    observer = LearningObserver(place, **options)
    told: tuple[Any, ...] = ()
    if simulation is not None:
        told = simulation.on_arithmetic, simulation.on_view, simulation.on_result
    install(lambda: observer, patches, *told)
    try:
        yield observer
    finally:
        patches.restore()
