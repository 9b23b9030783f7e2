"""Options of a script that set its DataLoader, in the launch line of ``trainfit loader``."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable

from trainfit.hardware import GpuSpec
from trainfit.plan.command.parsing import Command
from trainfit.plan.launch_line import launched, launched_settings
from trainfit.plan.runs.option_proof import proven_settings
from trainfit.plan.runs.options import CommandOptions, ObservedSettings, read_options
from trainfit.results.files.errors import TrainfitError
from trainfit.results.loader import LoaderResult
from trainfit.results.runs.trace import TraceOutcome


def with_own_options(
    found: LoaderResult,
    command: Command,
    trace: TraceOutcome | None,
    gpu: GpuSpec,
    time_limit_s: float,
    progress: Callable[[str], None],
) -> LoaderResult:
    """``found`` with a launch line that says the recommended settings as far as placeholders of the
    ``command`` or options of its script do; the others are left to be written.

    ``trace`` is the run until the first step. One more simulated run shows whether an option has
    the effect of its name, where there is one that may; it has ``time_limit_s``. Whatever goes
    wrong in that, the options are left alone.
    """
    if found.verdict == "cannot_tell" or found.recommended == found.present:
        return found
    options = _options(command, trace)
    values = launched_settings(options.command, found)
    if options.found and command.processes == 1:
        progress("checking options of the script that set its DataLoader")
        with contextlib.suppress(TrainfitError):  # what was measured must not be lost to it
            options = proven_settings(options, values, gpu, time_limit_s)
    filled = options.proven_command
    values = launched_settings(filled, found)
    if not values:
        return found
    line = launched(filled, values, {}, found)
    return dataclasses.replace(found, launch=line.line, launch_sets=tuple(values))


def _options(command: Command, trace: TraceOutcome | None) -> CommandOptions:
    """What may be options for settings of the DataLoader, by their names and present values."""
    info = trace.loader if trace is not None else None
    if trace is None or info is None:
        return CommandOptions(command, command)
    seen = ObservedSettings(loader=info.settings)
    return read_options(command, trace.options, seen).of_loader()
