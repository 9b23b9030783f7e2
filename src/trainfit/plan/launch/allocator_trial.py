"""The launched job with expandable segments and without: does the variable lower memory?"""

from __future__ import annotations

import dataclasses
import os

from trainfit.memory.stream.replay import Stream
from trainfit.plan.amp.choice import AmpSetting
from trainfit.plan.command.parsing import Command
from trainfit.plan.runs.tracing import recording_of
from trainfit.plan.sizing.memory_model import MemoryModel
from trainfit.results.plan.launch import AllocatorTrial
from trainfit.simgpu.allocator.settings import VARIABLE, variables_read


def allocator_trial(
    command: Command, memory_model: MemoryModel, chosen: AmpSetting
) -> AllocatorTrial:
    """Replay the recording of ``chosen`` at its batch size with either kind of segment."""
    stream, batch = _launched(chosen)
    settings = memory_model.settings
    other = memory_model.with_settings(
        dataclasses.replace(settings, expandable_segments=not settings.expandable_segments)
    )
    shown, fits = memory_model.shown(stream)
    changed, other_fits = other.shown(stream)
    name, present = allocator_variable(command)
    return AllocatorTrial(
        name,
        present,
        settings.expandable_segments,
        batch,
        shown.peak_reserved,
        changed.peak_reserved,
        fits,
        other_fits,
    )


def allocator_variable(command: Command) -> tuple[str, str]:
    """The variable that holds the allocator's settings, and its value (empty: it is not set).

    The one that is set and that the command's PyTorch reads, else the one that every version does.
    """
    environment = {**os.environ, **command.environment()}
    read = variables_read(command.interpreter.torch)
    name = next((each for each in read if each in environment), VARIABLE)
    return name, environment.get(name, "")


def _launched(chosen: AmpSetting) -> tuple[Stream, int | None]:
    """The stream of the recommended batch size, where a law gives it; else of the current one."""
    found = chosen.batches
    if found.law is not None and found.recommended:
        return found.law.at(found.recommended), found.recommended
    return Stream.of(recording_of(chosen.trace)), chosen.configuration.batch_size
