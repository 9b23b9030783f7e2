"""What to tell the user of a simulated run that gave nothing to plan with."""

from __future__ import annotations

from trainfit.plan.command import Command
from trainfit.plan.tracing import Trace
from trainfit.results.errors import TrainfitError
from trainfit.results.trace import TraceOutcome

#: Lines of the script's output that are shown with an error.
_TAIL = 15


class ScriptError(TrainfitError):
    """The script did not get as far as an optimizer step.

    ``script_output`` is the script's own traceback or last lines, to be shown marked as its.
    """

    def __init__(self, message: str, script_output: str = "") -> None:
        super().__init__(message)
        self.script_output = script_output


def require_step(trace: Trace, command: Command) -> None:
    """Raise :class:`ScriptError` unless the run completed an optimizer step on the GPU."""
    outcome = trace.outcome
    if outcome.status == "unsupported":
        raise ScriptError(outcome.message, outcome.traceback or _tail(trace.output))
    if outcome.steps == 0:
        message = _without_step(outcome, command)
        raise ScriptError(message, outcome.traceback or _tail(trace.output))
    if trace.recording is None or not len(trace.recording.alloc_bytes):
        raise ScriptError(
            f"{command.name}: {outcome.steps} optimizer steps, none of them on the GPU: no tensor "
            'was moved to "cuda"; let the script use the GPU where torch.cuda.is_available()'
        )


def _without_step(outcome: TraceOutcome, command: Command) -> str:
    name, after = command.name, f"after {outcome.seconds:.1f} s"
    seen = _seen(outcome)
    if outcome.status == "ended":
        return (
            f"{name}: the script ended {after} without an optimizer step (seen: {seen}); "
            "plan a command that trains, with enough data for one batch"
        )
    if outcome.status == "timeout":
        place = f", it was at {outcome.location}" if outcome.location else ""
        return (
            f"{name}: no optimizer step {after}{place} (seen: {seen}); "
            "shorten what comes before training, or raise --time-limit"
        )
    if outcome.status == "exited":
        hint = _placeholder_hint(command)
        return f"{name}: the script ended itself {after} with {outcome.message}{hint}"
    if outcome.status == "out_of_memory":
        return f"{name}: out of memory {after}, before the first step: {outcome.message}"
    place = f" at {outcome.location}" if outcome.location else ""
    return f"{name}: the script failed {after}, before its first optimizer step{place}: " + (
        outcome.message or "it died"
    )


def _placeholder_hint(command: Command) -> str:
    if not command.present:
        return "; its own message is below"
    names = ", ".join(f"{{{name}}}" for name in command.present)
    return f"; does it know the options that hold {names}? Its own message is below"


def _seen(outcome: TraceOutcome) -> str:
    parts = [
        f"{outcome.gpu_operators} operators on the GPU",
        f"{outcome.module_calls} module calls",
        f"{outcome.loaders} DataLoaders",
    ]
    return ", ".join(parts)


def _tail(output: str) -> str:
    return "\n".join(output.rstrip().splitlines()[-_TAIL:])
