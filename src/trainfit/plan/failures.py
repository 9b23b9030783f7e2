"""What to tell the user of a simulated run that gave less than was asked."""

from __future__ import annotations

from trainfit.plan.command import Command
from trainfit.plan.tracing import Trace
from trainfit.results.errors import TrainfitError
from trainfit.results.recording import PHASES
from trainfit.results.trace import TraceOutcome
from trainfit.results.words import count

#: Lines of the script's output that are shown with an error.
_TAIL = 20


class ScriptError(TrainfitError):
    """The script did not do what a plan needs.

    ``script_output`` is the script's own traceback or last lines, to be shown marked as its.
    """

    def __init__(self, message: str, script_output: str = "") -> None:
        super().__init__(message)
        self.script_output = script_output


def require_step(trace: Trace, command: Command) -> None:
    """Raise :class:`ScriptError` unless the run completed an optimizer step on the GPU.

    A script that only infers has none to complete.
    """
    outcome = trace.outcome
    if outcome.steps == 0 and is_inference(trace):
        return
    if outcome.status == "unsupported":
        raise ScriptError(f"{command.name}: {outcome.message}", script_output(trace))
    if outcome.steps == 0:
        raise ScriptError(
            f"{command.name}: {_without_step(outcome, command)}", script_output(trace)
        )
    if trace.recording is None or not len(trace.recording.alloc_bytes):
        raise ScriptError(
            f"{command.name}: {_steps(outcome)}, none of them on the GPU: no tensor was moved "
            'to "cuda"; let the script use the GPU where torch.cuda.is_available()'
        )


def is_inference(trace: Trace) -> bool:
    """Did the script call a model on the GPU and neither train it nor set out to?"""
    outcome, recording = trace.outcome, trace.recording
    if outcome.status not in ("ended", "finished", "timeout") or outcome.optimizers:
        return False
    if recording is None or not outcome.forward.calls or not len(recording.alloc_bytes):
        return False
    return not (recording.op_phase == PHASES.index("backward")).any()


def shortfall(trace: Trace, command: Command) -> str | None:
    """What went wrong after the first step, in one line; ``None`` if nothing did."""
    outcome = trace.outcome
    if outcome.status in ("finished", "ended"):
        return None
    return f"{command.name}: {what_happened(outcome)} after {_steps(outcome)}"


def script_output(trace: Trace) -> str:
    """The script's traceback, or the last lines that it printed."""
    return trace.outcome.traceback.rstrip() or last_lines(trace.output)


def last_lines(output: str) -> str:
    """The end of what a script printed, as it is shown with an error."""
    return "\n".join(output.rstrip().splitlines()[-_TAIL:])


def _without_step(outcome: TraceOutcome, command: Command) -> str:
    what, after = what_happened(outcome), f"after {outcome.seconds:.1f} s"
    if outcome.status == "ended":
        return (
            f"the script ended {after} without an optimizer step (seen: {_seen(outcome)}); "
            "plan a command that trains, with enough data for one batch"
        )
    if outcome.status == "timeout":
        place = f", it was at {outcome.location}" if outcome.location else ""
        return (
            f"no optimizer step {after}{place} (seen: {_seen(outcome)}); "
            "shorten what comes before training, or raise --time-limit"
        )
    if outcome.status == "exited":
        return f"{what} {after}, before its first optimizer step; {_exit_hint(command)}"
    return f"{what} {after}, before its first optimizer step; {_remedy(outcome)}"


def what_happened(outcome: TraceOutcome) -> str:
    """The subject and its verb, to be continued with "after …"."""
    place = f" at {outcome.location}" if outcome.location else ""
    if outcome.status == "exited":
        return f"the script ended itself with {outcome.message}"
    if outcome.status == "timeout":
        return f"the time limit was reached{place}"
    if outcome.status == "died":
        return f"the script broke off ({outcome.message})"
    if outcome.status == "out_of_memory":
        return f"the script ran out of GPU memory{place}"
    return f"the script failed{place} ({one_line(outcome.message)})"


def _remedy(outcome: TraceOutcome) -> str:
    if outcome.status == "out_of_memory":
        return "make the model or its input smaller, or name a larger GPU"
    if outcome.status == "died" and "SIGKILL" in outcome.message:
        return "a process that uses up the machine's memory is ended so: see its system log"
    if outcome.status == "died":
        return "its last lines are below"
    return "its traceback is below"


def _exit_hint(command: Command) -> str:
    if not command.present:
        return "its own message is below"
    names = ", ".join(f"{{{name}}}" for name in command.present)
    return f"does it know the option that holds {names}? Its own message is below"


def _seen(outcome: TraceOutcome) -> str:
    return ", ".join(
        (
            count(outcome.gpu_operators, "operator") + " on the GPU",
            count(outcome.module_calls, "module call"),
            count(outcome.loaders, "DataLoader"),
        )
    )


def _steps(outcome: TraceOutcome) -> str:
    return count(outcome.steps, "optimizer step")


def one_line(text: str, most: int = 200) -> str:
    """Text on one line, its beginning kept."""
    line = " ".join(text.split())
    return line if len(line) <= most else line[: most - 1] + "…"
