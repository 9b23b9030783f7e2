"""What each hook goes through: an error of ours never reaches the training."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator
from typing import Any, Protocol, TypeVar

import torch

from trainfit.torch_private.compiled import traces_original
from trainfit.watch.recorder.patches.flops import FlopCount
from trainfit.watch.recorder.step.loader_record import LoaderRecord
from trainfit.watch.recorder.step.step_recorder import StepRecorder

Hook = TypeVar("Hook", bound=Callable[..., Any])


class Host(Protocol):
    """The recorder, as the hooks see it."""

    live: bool
    """Does it record? ``False`` in a process that was forked off, and after too many errors."""
    steps: StepRecorder

    def failed(self, where: str, error: Exception) -> None:
        """A hook of ours raised."""

    def saw(self, error: BaseException) -> None:
        """The training raised, in a call that we watch."""

    def event(self, kind: str, *, seconds: float | None = None, text: str = "") -> None: ...

    def learn(self, **facts: Any) -> None:
        """Fields of the run's header."""

    def count_flops(self, module: torch.nn.Module) -> FlopCount | None:
        """What counts the operations of this call of a model, if they shall be."""

    def scaled_by(self, scaler: Any) -> None:
        """The GradScaler of the training."""

    def note_loader(self, loader: LoaderRecord) -> None:
        """A DataLoader that is iterated."""


def in_place_of(original: Any) -> Callable[[Hook], Hook]:
    """Decorates a function that stands where ``original`` stood. torch.compile traces the
    original, as it would have; our code in its graphs would break them."""

    def named(hook: Hook) -> Hook:
        functools.update_wrapper(hook, original)
        traces_original(hook, original)
        return hook

    return named


def watched(host: Host) -> bool:
    """Is there anything to record, here and now?"""
    return host.live and host.steps.mine


@contextlib.contextmanager
def careful(host: Host, where: str) -> Iterator[None]:
    """For hooks that are rare; those of every step are written out."""
    try:
        yield
    except Exception as error:
        host.failed(where, error)


def in_phase(
    host: Host, phase: int, function: Callable[..., Any], event: str = ""
) -> Callable[..., Any]:
    """``function``, whose calls are a phase (and, the outermost, an event)."""

    @in_place_of(function)
    def phased(*args: Any, **kwargs: Any) -> Any:
        token, began = -1, 0.0
        try:
            if watched(host) and host.steps.phases.current != phase:
                token, began = host.steps.enter(phase), host.steps.now
        except Exception as error:
            host.failed(function.__name__, error)
        if token < 0:
            return function(*args, **kwargs)
        try:
            return function(*args, **kwargs)
        finally:
            try:
                host.steps.leave(token)
                if event:
                    host.event(event, seconds=host.steps.now - began)
            except Exception as error:
                host.failed(function.__name__, error)

    return phased
