"""Measures or rehearses the DataLoader of a command in a child process, and tells how it goes."""

from __future__ import annotations

import contextlib
import dataclasses
import signal
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Final

from trainfit.findings.tracebacks import own_fault_in
from trainfit.hardware import GpuNameError, GpuSpec, find_gpu, local_gpu
from trainfit.lint.mistakes import SAME_NUMBERS
from trainfit.plan.command.interpreter import own_interpreter
from trainfit.plan.command.parsing import Command
from trainfit.plan.command.prefix import Prefix
from trainfit.plan.dataloader.process import Listener, Loaded, LoadingProcess, Stage
from trainfit.plan.launch_line import launched, launched_settings
from trainfit.plan.runs.failures import (
    ScriptError,
    cause_of,
    cause_of_error,
    exit_hint,
    last_lines,
    mistakes_of,
    one_line,
    remedy,
    unsaid,
    what_happened,
    without_a_step,
    without_batches,
)
from trainfit.plan.runs.option_proof import proven_settings
from trainfit.plan.runs.options import CommandOptions, ObservedSettings, read_options
from trainfit.plan.runs.tracing import ending
from trainfit.results.files.errors import TrainfitError
from trainfit.results.findings import Finding
from trainfit.results.loader import LoaderResult
from trainfit.results.rehearsal import Predicted, Rehearsal
from trainfit.results.runs.measurement import AS_FAST, Consumer
from trainfit.results.runs.script import UNASKED, SandboxRequest
from trainfit.results.runs.spec import LoaderSpec, RehearsalSpec, RunSpec
from trainfit.results.runs.trace import TraceOutcome
from trainfit.results.text import count, duration, quote

#: Simulated where no GPU is named and none is here: the loader does not depend on it.
DEFAULT_GPU: Final = "RTX 4090"


class _Lines(Listener):
    def __init__(self, progress: Callable[[str], None]) -> None:
        self._progress = progress

    def stage(self, stage: Stage) -> None:
        self._progress(stage.text)


@dataclasses.dataclass(frozen=True)
class Tuned:
    """What tuning found, and the user's interrupt that ended it, if one did."""

    result: LoaderResult
    interrupt: KeyboardInterrupt | None


def tune_command(
    command: Command | None,
    spec: RunSpec,
    progress: Callable[[str], None] | Listener = lambda text: None,
    clock: Callable[[], float] = time.monotonic,
    sandbox: SandboxRequest = UNASKED,
    *,
    fills_options: bool = False,
) -> Tuned:
    """The settings that suit the loader of ``command``, or the one that ``spec.loading`` names.

    Without a GPU in ``spec``, and without a step, it is tuned to be as fast as it can. ``sandbox``
    says what may come of files that are written where there is no command. ``fills_options``: the
    launch line says the settings by placeholders of the command or options of its script.

    Raises :class:`~trainfit.plan.runs.failures.ScriptError` where the script comes to no loader
    that can be measured.
    """
    loaded = call_on_loader(command, spec, progress, clock, sandbox)
    text, tuning = loaded.result or loaded.partial, _asked(spec).tuning
    assert text is not None
    result = LoaderResult.from_json(text, Path("the measuring process"))
    line, said = _launch(command, result)
    result = dataclasses.replace(
        result,
        notes=(*result.notes, *said, *notes_of(loaded, command, spec)),
        launch=line,
        faults=(*_of_samples(command), *result.faults),
        step_is_bound=(tuning.step is None or tuning.step_is_bound) and result.step_s > 0,
        seconds=result.seconds or loaded.seconds,
        protection=loaded.protection,
    )
    if fills_options and command is not None and loaded.interrupt is None:
        try:
            result = _with_options(result, loaded, command, spec, progress)
        except KeyboardInterrupt as interrupt:
            return Tuned(result, interrupt)
    return Tuned(result, loaded.interrupt)


def _with_options(
    result: LoaderResult,
    loaded: Loaded,
    command: Command,
    spec: RunSpec,
    progress: Callable[[str], None] | Listener,
) -> LoaderResult:
    def tell(text: str) -> None:
        if callable(progress):
            progress(text)

    trace = loaded.outcome.trace if loaded.outcome is not None else None
    return with_own_options(result, command, trace, _gpu(spec), spec.time_limit_s, tell)


def _of_samples(command: Command | None) -> tuple[Finding, ...]:
    """What the script's text says of its data set's samples."""
    mistakes = () if command is None else mistakes_of(command)
    return tuple(mistake for mistake in mistakes if mistake.kind == SAME_NUMBERS)


def _launch(command: Command | None, result: LoaderResult) -> tuple[str, tuple[str, ...]]:
    """The command with variables and cores before it, and notes; empty where nothing is."""
    if command is None:
        return "", ()
    advised = launched(command, {}, {}, result)
    return advised.line if advised.line != command.line() else "", advised.notes


def call_on_loader(
    command: Command | None,
    spec: RunSpec,
    progress: Callable[[str], None] | Listener,
    clock: Callable[[], float] = time.monotonic,
    sandbox: SandboxRequest = UNASKED,
) -> Loaded:
    """Do with the loader what ``spec.loading`` says, in a child process.

    There is a result or a partial one; raises :class:`ScriptError` else. A ``KeyboardInterrupt``
    reaches that process (:mod:`trainfit.loader.child`) too, and is raised here unless that gives a
    result all the same.
    """
    listener = progress if isinstance(progress, Listener) else _Lines(progress)
    with tempfile.TemporaryDirectory(prefix="trainfit-") as name:
        started = command or _no_command(sandbox)
        loaded = LoadingProcess(_completed(command, spec, name), started, listener, clock).run()
    if loaded.result is None and loaded.partial is None:
        raise _failure(loaded, command, spec)
    return loaded


def _gpu(spec: RunSpec) -> GpuSpec:
    if spec.gpu is not None:
        return spec.gpu
    try:
        return local_gpu() or find_gpu(DEFAULT_GPU)
    except GpuNameError:  # one that the catalogue does not know
        return find_gpu(DEFAULT_GPU)


def _asked(spec: RunSpec) -> LoaderSpec:
    assert spec.loading is not None
    return spec.loading


def _completed(command: Command | None, spec: RunSpec, folder: str) -> RunSpec:
    """What the process is told: ``spec`` with the script, the GPU and the step as far as they are
    known."""
    loading = _asked(spec)
    tuning = dataclasses.replace(loading.tuning, step=_known_step(command, spec))
    return dataclasses.replace(
        spec,
        folder=folder,
        gpu=_gpu(spec),
        target=command.target() if command is not None else None,
        command=command.line() if command is not None else _given(loading),
        loading=dataclasses.replace(
            loading,
            tuning=tuning,
            command_sets=command.environment() if command is not None else {},
        ),
    )


def _given(loading: LoaderSpec) -> str:
    """The options that stand for a command."""
    size = f" --batch-size {loading.batch_size}" if loading.batch_size is not None else ""
    return f"--loader {quote(loading.place)}{size}"


def _known_step(command: Command | None, spec: RunSpec) -> Consumer | None:
    """The step's time, unless the script has to be simulated for it."""
    step = _asked(spec).tuning.step
    if step is not None:
        return step
    if spec.gpu is None or command is None:
        return Consumer(0.0, source=AS_FAST)
    return None


def _no_command(sandbox: SandboxRequest) -> Command:
    """Python alone, where a callable is named in a command's place."""
    python = own_interpreter()
    return Command((), {}, None, Prefix(), python, (), "script", "", 0, sandbox=sandbox)


# -- what to say -------------------------------------------------------------------------------


def notes_of(loaded: Loaded, command: Command | None, spec: RunSpec) -> list[str]:
    """What a reader of the result should know of how it was made."""
    note = command.interpreter.note if command is not None else ""
    notes = [each for each in (note, loaded.wrapper_failure) if each]
    trace = loaded.outcome.trace if loaded.outcome is not None else None
    if trace is not None and trace.status == "unsupported":
        notes.append(
            f"the script's step could not be simulated ({one_line(trace.message)}); the "
            "DataLoader that gave the last batch before that was measured"
        )
    if trace is not None and trace.status == "timeout":
        notes.append(
            f"the script made no optimizer step in {duration(trace.seconds)}; the DataLoader that "
            "gave the last batch by then was measured"
        )
    if command is not None and spec.gpu is None:
        notes.append(f"the script ran on a simulated {_gpu(spec).key}: --gpu names another")
    outcome = loaded.outcome
    if outcome is not None and outcome.status == "failed" and loaded.result is None:
        notes.append(f"measuring failed ({outcome.error}) while {loaded.stage}; results so far")
    elif loaded.interrupt is not None and loaded.result is None:
        notes.append(f"interrupted while {loaded.stage}; results so far")
    elif loaded.result is None:
        notes.append(f"{_broken_off(loaded, spec)}; results so far")
    return notes


def _failure(loaded: Loaded, command: Command | None, spec: RunSpec) -> TrainfitError:
    outcome = loaded.outcome
    name = command.name if command is not None else "--loader"
    if outcome is None and loaded.protection is not None and loaded.protection.stopped:
        return ScriptError(f"{name}: {loaded.protection.stopped}", last_lines(loaded.output))
    if outcome is None:
        text = f"{_broken_off(loaded, spec)}; {_remedy(loaded.code)}"
        return ScriptError(
            f"{name}: {text}", last_lines(loaded.output), own_fault_in(loaded.output)
        )
    output = outcome.traceback or last_lines(loaded.output)
    if outcome.status == "script":
        assert outcome.trace is not None
        output = outcome.trace.traceback or last_lines(loaded.output)
        text = f"{name}: {_script_failed(outcome.trace, output)}"
        cause = cause_of(outcome.trace, loaded.output)
        return ScriptError(text, unsaid(outcome.trace, output), outcome.trace.own_fault, cause)
    if outcome.status == "loader" and not outcome.traceback:
        too_small = command and outcome.trace and without_batches(outcome.trace, command)
        small = too_small or outcome.error
        return ScriptError(f"{name}: {small}" if command is not None else small)
    cause = None if outcome.own_fault else cause_of_error(outcome.error, outcome.traceback)
    if outcome.status == "loader":
        return ScriptError(outcome.error, outcome.traceback, cause=cause)
    where = f" ({outcome.loader})" if outcome.loader else ""
    text = f"{name}: its loader{where} could not be measured: {outcome.error}"
    return ScriptError(text, output, outcome.own_fault, cause)


def _remedy(code: int | None) -> str:
    if code is None:
        return "raise --time-limit"
    if code == -signal.SIGKILL:
        return "the system kills processes this way when memory runs out: see the system log"
    return "its last lines are below"


def _broken_off(loaded: Loaded, spec: RunSpec) -> str:
    if loaded.code is None:
        return f"the time limit of {duration(spec.time_limit_s)} was reached while {loaded.stage}"
    return f"{ending(loaded.code)} while {loaded.stage}"


def _script_failed(trace: TraceOutcome, output: str) -> str:
    what = what_happened(trace)
    after = f"after {duration(trace.seconds)}, {without_a_step(trace)}"
    if trace.status == "timeout":
        made = count(trace.loaders, "DataLoader")
        return (
            f"{what} {after} (seen: {made}); shorten what comes before training, or raise "
            "--time-limit"
        )
    if trace.status == "unsupported":
        return f"{one_line(trace.message)}; name what creates its DataLoader with --loader"
    if trace.status == "exited":
        return f"{what} {after}; {exit_hint(trace, output)}"
    return f"{what} {after}; {remedy(trace, output)}"


# ---
# Rehearses a command's DataLoader in a child process.


#: Seconds that a rehearsal may take beyond its duration: until a hang is told, and its end.
_BEYOND_S: Final = 60.0
#: Steps that differ by less are one.
_SAME_STEP: Final = 0.01


@dataclasses.dataclass(frozen=True)
class Rehearsed:
    """A rehearsal, and the user's interrupt that ended it, if one did."""

    result: Rehearsal
    interrupt: KeyboardInterrupt | None


def rehearse_command(
    command: Command | None,
    spec: RunSpec,
    rehearsal: RehearsalSpec,
    progress: Callable[[str], None] | Listener,
    compare: LoaderResult | None,
    sandbox: SandboxRequest,
) -> Rehearsed:
    """Run the loader of ``command`` (or the one that ``spec.loading`` names) against a GPU's step.

    The model's prediction for its settings in ``compare`` is added. Raises
    :class:`~trainfit.plan.runs.failures.ScriptError` where the script comes to no loader, and
    ``KeyboardInterrupt`` where there are no results yet.
    """
    loading = dataclasses.replace(
        _asked(spec), task="rehearse", rehearsal=rehearsal, script_limit_s=spec.time_limit_s
    )
    limit_s = spec.time_limit_s + rehearsal.duration_s + _BEYOND_S
    whole = dataclasses.replace(spec, time_limit_s=limit_s, loading=loading)
    loaded = call_on_loader(command, whole, progress, sandbox=sandbox)
    text = loaded.result or loaded.partial
    assert text is not None
    result = Rehearsal.from_json(text, Path("the rehearsing process"))
    loader = loaded.outcome.loader if loaded.outcome is not None else ""
    notes = (*result.notes, *notes_of(loaded, command, whole))
    result = dataclasses.replace(
        result,
        loader=loader or result.loader,
        notes=notes,
        step_is_bound=loading.tuning.step is None,
        protection=loaded.protection,
    )
    if compare is not None:
        result = with_prediction(result, compare)
    return Rehearsed(result, loaded.interrupt)


def with_prediction(result: Rehearsal, found: LoaderResult) -> Rehearsal:
    """The rehearsal with the model's prediction for its settings, or a note why there is none."""
    candidate = found.candidate(result.settings)
    reason = ""
    if abs(found.step_s / result.step_s - 1) > _SAME_STEP:
        step = f"{1e3 * found.step_s:.7g}ms"
        reason = f"it was made for a step of {step}: rehearse with --step-time {step}"
    elif candidate is None:
        reason = "its candidates do not include these settings"
    elif candidate.infeasible:
        reason = f"these settings are infeasible: {candidate.infeasible}"
    if candidate is None or reason:
        note = f"nothing to compare in the result of trainfit loader: {reason}"
        return dataclasses.replace(result, notes=(*result.notes, note))
    predicted = Predicted(candidate.batches_per_s, candidate.waiting_share)
    return dataclasses.replace(result, predicted=predicted)


# ---
# Options of a script that set its DataLoader, in the launch line.


def with_own_options(
    result: LoaderResult,
    command: Command,
    trace: TraceOutcome | None,
    gpu: GpuSpec,
    time_limit_s: float,
    progress: Callable[[str], None],
) -> LoaderResult:
    """``result`` with a launch line that says the recommended settings as far as placeholders of
    the ``command`` or options of its script do; the others are left to be written.

    ``trace`` is the run until the first step. One more simulated run shows whether an option has
    the effect of its name, where there is one that may; it has ``time_limit_s``. Whatever goes
    wrong in that, the options are left alone.
    """
    if result.verdict == "cannot_tell" or result.recommended == result.present:
        return result
    options = _options(command, trace)
    values = launched_settings(options.command, result)
    if options.found and command.processes == 1:
        progress("checking options of the script that set its DataLoader")
        with contextlib.suppress(TrainfitError):  # what was measured must not be lost to it
            options = proven_settings(options, values, gpu, time_limit_s)
    filled = options.proven_command
    values = launched_settings(filled, result)
    if not values:
        return result
    line = launched(filled, values, {}, result)
    return dataclasses.replace(result, launch=line.line, launch_sets=tuple(values))


def _options(command: Command, trace: TraceOutcome | None) -> CommandOptions:
    """What may be options for settings of the DataLoader, by their names and present values."""
    info = trace.loader if trace is not None else None
    if trace is None or info is None:
        return CommandOptions(command, command)
    seen = ObservedSettings(loader=info.settings)
    return read_options(command, trace.options, seen).of_loader()
