"""What to tell the user of a simulated run that gave less than was asked."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Final

from trainfit.findings.facts import Failure, FailureContext
from trainfit.findings.failure import WHATEVER_THE_LENGTH, of_exception, of_failure
from trainfit.findings.tracebacks import (
    ParsedException,
    exception_in,
    parse,
    printed_traceback,
)
from trainfit.lint.api import mistakes_in, settings_in
from trainfit.plan.command.parsing import Command
from trainfit.plan.runs.processes import BY_OTHERS
from trainfit.plan.runs.tracing import Trace
from trainfit.results.dataloader import LoaderSettings
from trainfit.results.files.errors import TrainfitError
from trainfit.results.findings import Finding
from trainfit.results.findings import fails_later as failing
from trainfit.results.real_runs import RealRunOutcome
from trainfit.results.runs.operands import NO_CALL, FailedCall
from trainfit.results.runs.recording import PHASES, Recording
from trainfit.results.runs.script import ScriptOption
from trainfit.results.runs.trace import ContextSeen, Counted, OwnFault, TraceOutcome
from trainfit.results.text import count, duration, exception_text

#: Why there are no figures of a run, after an interrupt.
INTERRUPTED = "interrupted before that was simulated"
#: What colours a terminal's text.
_COLOUR: Final = re.compile(r"\x1b\[[0-9;]*m")
#: Lines of the script's output that are shown with an error.
_TAIL = 20


class ScriptError(TrainfitError):
    """The script did not do what a plan needs.

    ``script_output`` is the script's own traceback or last lines, to be shown marked as its.
    With ``own_fault`` it is trainfit that failed. ``cause`` is why, with the fix, if that is known.
    ``wants`` are packages with a stand-in that it failed for want of. ``in_note`` is the message
    where the script's output is not shown below it.
    """

    def __init__(
        self,
        message: str,
        script_output: str = "",
        own_fault: OwnFault | None = None,
        cause: Finding | None = None,
        wants: tuple[str, ...] = (),
        in_note: str = "",
    ) -> None:
        super().__init__(message)
        self.in_note = in_note or message
        self.wants = wants
        self.script_output = script_output
        self.own_fault = own_fault
        self.cause = cause


class NotSimulated(ScriptError):
    """The user interrupted the plan before this run was over."""

    def __init__(self) -> None:
        super().__init__(INTERRUPTED)


def require_step(trace: Trace, command: Command, counted: Counted = "steps") -> None:
    """Raise :class:`ScriptError` unless the run completed a step on the GPU.

    A script without an optimizer, which only infers or updates its parameters by itself, has no
    optimizer step to complete.
    """
    outcome = trace.outcome
    if outcome.steps == 0 and is_inference(trace):
        return
    if outcome.steps == 0 and counted == "steps" and updates_by_itself(trace):
        return
    if outcome.status == "unsupported":
        where = unsaid(outcome, script_output(trace))
        raise ScriptError(f"{command.name}: {outcome.message}", where)
    if outcome.steps == 0:
        output = script_output(trace)
        what, hint = _printed_exception(outcome, trace.output) or _without_step(
            outcome, command, output
        )
        what = f"{command.name}: {what}"
        message = f"{what}; {hint}" if hint else what
        said, own = unsaid(outcome, output), outcome.own_fault
        mistakes = mistakes_of(command, outcome) if own is None else ()
        cause = _explained(cause_of(outcome, trace.output), mistakes)
        wants, in_note = _wanted(outcome, trace.output), what if hint in _POINTERS else message
        raise ScriptError(message, said, own, cause, wants, in_note)
    if trace.recording is None or not len(trace.recording.alloc_bytes):
        raise ScriptError(
            f"{command.name}: {_steps(outcome)}, none of them on the GPU: {_not_moved(outcome)}"
        )


def _not_moved(outcome: TraceOutcome) -> str:
    """A clause that says that a script did all of its work on the CPU, and what to change."""
    return f'no tensor was moved to "cuda"; {_to_gpu(outcome.options)}'


#: Of failures, the mistakes in the script's text that are why.
_EXPLAINED_BY: Final[dict[str, tuple[str, ...]]] = {
    "two_devices": ("result-dropped", "not-moved"),
    "no_graph": ("gradients-left-off",),
    "sizes_of_data": ("split-order",),
}


def _explained(cause: Finding | None, mistakes: Sequence[Finding]) -> Finding | None:
    """Why a script failed: a line of its own that is known to lead there, before what its exception
    means in general."""
    wanted = () if cause is None else _EXPLAINED_BY.get(cause.kind, ())
    why = next((mistake for mistake in mistakes if mistake.kind in wanted), None)
    return why or cause or next(iter(mistakes), None)


#: Options that say whether to use a GPU ("--cuda", "--use_gpu", "--accel"), or which device.
_USES_GPU: Final = re.compile(r"(?:use_?|enable_?|with_?)?(?:cuda|gpus?|accel(?:erator)?)")
_USES_NONE: Final = re.compile(r"(?:no|disable|without)_?(?:cuda|gpus?|accel(?:erator)?)")


def _to_gpu(options: Iterable[ScriptOption]) -> str:
    """What brings a script to the GPU that trained on the CPU."""
    for option in options:
        name, flag = option.name.lower(), option.flags[0] if option.flags else option.name
        if option.switch and option.value == "False" and _USES_GPU.fullmatch(name):
            return f"give it its option {flag}"
        if option.switch and option.given and _USES_NONE.fullmatch(name):
            return f"leave out its option {flag}"
        if name == "device" and option.value == "cpu":
            return f"give it {flag} cuda in place of cpu"
    return "let the script use the GPU where torch.cuda.is_available()"


def _wanted(outcome: TraceOutcome, output: str) -> tuple[str, ...]:
    """Packages that are not installed, have a stand-in, and are named where the script failed."""
    if outcome.status not in ("failed", "exited"):
        return ()
    said = _letters(f"{outcome.message} {last_lines(output)}")
    return tuple(each for each in outcome.absent if _letters(each) in said)


def _letters(text: str) -> str:
    """The letters that "flash_attn", "flash-attn" and "FlashAttention 2" have in common."""
    return re.sub(r"[^a-z]", "", text.lower().replace("attention", "attn"))


def with_stand_ins(
    command: Command, error: ScriptError, progress: Callable[[str], None]
) -> Command:
    """The command with stand-ins for the packages that it failed for want of; raises ``error``
    where that was not why."""
    more = [want for want in error.wants if want not in command.stand_ins]
    if not more:
        raise error
    progress(f"not installed here: {', '.join(more)}; once more with a stand-in")
    return dataclasses.replace(command, stand_ins=(*command.stand_ins, *more))


def is_inference(trace: Trace) -> bool:
    """Did the script call a model on the GPU and neither train it nor set out to?"""
    return _without_optimizer(trace) and bool(trace.outcome.forward.calls) and not _trains(trace)


def updates_by_itself(trace: Trace) -> bool:
    """Did the script train on the GPU without an optimizer of PyTorch's?"""
    return _without_optimizer(trace) and _trains(trace)


def _without_optimizer(trace: Trace) -> bool:
    outcome, recording = trace.outcome, trace.recording
    ran = outcome.status in ("ended", "finished", "timeout") and not outcome.optimizers
    return ran and recording is not None and bool(len(recording.alloc_bytes))


def _trains(trace: Trace) -> bool:
    recording = trace.recording
    return recording is not None and bool((recording.op_phase == PHASES.index("backward")).any())


def cause_of(outcome: TraceOutcome | RealRunOutcome, output: str) -> Finding | None:
    """Why a script failed that printed ``output``, and the fix; ``None`` where that is not known,
    or the GPU was full, which is what a plan or its verification is about."""
    loader = outcome.loader if isinstance(outcome, TraceOutcome) else None
    settings = loader.settings if loader is not None else None
    if outcome.status == "timeout" and not outcome.steps:
        return _cause_of_hang(outcome, output, settings)
    is_over = outcome.status == "exited" or (outcome.status == "ended" and not outcome.steps)
    if is_over and (printed := printed_traceback(output)):
        return of_exception(printed, settings)
    if outcome.status != "failed" or outcome.own_fault is not None:
        return None
    context = outcome.context if isinstance(outcome, TraceOutcome) else ContextSeen()
    said = outcome.message, outcome.traceback
    return cause_of_error(*said, output, settings, context, outcome.call)


#: Of a run at its time limit: what shows that it hangs. It may be slow otherwise.
_HANGS: Final = (
    *("deadlock", "open_files", "shm_full", "batch_not_picklable", "batch_lost"),
    "no_main_guard",
)


def _cause_of_hang(
    outcome: TraceOutcome | RealRunOutcome, output: str, settings: LoaderSettings | None
) -> Finding | None:
    context = FailureContext(output=output, limit_s=outcome.seconds)
    found = of_failure(Failure(hung=True, stacks=outcome.stacks), settings, context)
    return found if found is not None and found.kind in _HANGS else None


def cause_of_error(
    message: str,
    traceback: str,
    output: str = "",
    settings: LoaderSettings | None = None,
    context: ContextSeen = ContextSeen(),  # noqa: B008 (it is frozen)
    call: FailedCall = NO_CALL,
) -> Finding | None:
    """The cause and the fix of an exception that is told as "TypeError: what it says"."""
    name, _, said = message.partition(": ")
    if not name.replace(".", "_").isidentifier():
        return None
    failure = Failure(name, said, traceback)
    tokens, positions = context.longest, context.positions
    seen = FailureContext(output=output, tokens=tokens, positions=positions, call=call)
    return of_failure(failure, settings, seen)


def mistakes_of(command: Command, outcome: TraceOutcome | None = None) -> tuple[Finding, ...]:
    """Lines of the script that cannot do what they are for (``optimizer.step`` without
    parentheses), in the files that a run of it has imported."""
    ran = outcome.files if outcome is not None else ()
    if command.kind != "script":
        return ()
    said = {word.rpartition("=")[2] for word in command.target().args}
    return mistakes_in(Path(command.name), ran, said)


def settings_of(
    command: Command, outcome: TraceOutcome, recording: Recording, *, is_full: bool
) -> tuple[Finding, ...]:
    """Lines of the script with settings that the run had on, and that its figures need to say."""
    if command.kind != "script":
        return ()
    said = {word.rpartition("=")[2] for word in command.target().args}
    return settings_in(
        Path(command.name),
        outcome.files,
        said,
        is_deterministic=bool(recording.header.get("deterministic")),
        is_full=is_full,
    )


def shortfall(trace: Trace, command: Command) -> str | None:
    """What went wrong after the first step, in one line; ``None`` if nothing did."""
    outcome = trace.outcome
    if outcome.status in ("finished", "ended"):
        return None
    when = f"after {_steps(outcome)}" if outcome.steps else without_a_step(outcome)
    return f"{command.name}: {what_happened(outcome)} {when}"


def without_a_step(outcome: TraceOutcome) -> str:
    """A clause on when a run without a step ended: with several optimizers, of which one may have
    made a step, a training step is a period of their loop."""
    if outcome.optimizers > 1:
        return f"before a whole training step of its {outcome.optimizers} optimizers"
    return "before its first optimizer step"


def fails_later(trace: Trace, command: Command) -> tuple[Finding, ...]:
    """What ends the script after its first steps, the cause first."""
    outcome, what = trace.outcome, shortfall(trace, command)
    if what is None or outcome.status != "failed" or outcome.own_fault is not None:
        return ()
    cause = cause_of(outcome, trace.output)
    failed = failing(what, _when(outcome))
    return (failed,) if cause is None else (cause, failed)


def ends_early(trace: Trace, command: Command) -> tuple[Finding, ...]:
    """What ended a run whose recording is kept all the same, the cause first: the script failed, or
    has what cannot be simulated."""
    outcome = trace.outcome
    if outcome.status == "unsupported":
        return (failing(f"{command.name}: {outcome.message}", _when(outcome)),)
    return fails_later(trace, command)


def _when(outcome: TraceOutcome) -> str:
    return f"after {count(outcome.steps, 'step')}" if outcome.steps else "before its first step"


def fails_beyond(trace: Trace, command: Command, at: str) -> tuple[Finding, ...]:
    """What ends the script in a run beyond its first steps, where the cause is known.

    Of a run whose epochs are cut short nobody knows after how many steps that is, but ``at`` what
    (empty: no epoch is cut), and only causes count that an epoch's length has no part in.
    """
    findings = fails_later(trace, command)
    if len(findings) < 2 or (at and findings[0].kind not in WHATEVER_THE_LENGTH):
        return ()
    cause, failed = findings
    if at:
        title = f"{command.name}: {what_happened(trace.outcome)}, {at}"
        failed = dataclasses.replace(failed, title=title, subject=at)
    return (cause, failed)


def with_cause(text: str, cause: Finding | None) -> str:
    """What happened, in one line with its cause and fix, for a note."""
    return text if cause is None else f"{text}; cause: {cause.title}; fix: {cause.fix.action}"


def script_output(trace: Trace) -> str:
    """The script's traceback, or the last lines that it printed."""
    return trace.outcome.traceback.rstrip() or last_lines(trace.output)


def absent_kernels(outcome: TraceOutcome) -> str:
    """A sentence that says that a run went on without packages of kernels, and what to add; empty
    where it did not."""
    # PyTorch itself looks for Triton.
    names = [each for each in outcome.imported if each != "triton"]
    if not names:
        return ""
    return (
        f"{', '.join(names)} {'is' if len(names) == 1 else 'are'} not installed here, and the "
        "script went on without: where the training will have what is missing, add "
        f"--assume-installed {','.join(names)}"
    )


def last_lines(output: str) -> str:
    """The end of what a script printed, as it is shown with an error."""
    return "\n".join(output.rstrip().splitlines()[-_TAIL:])


def _printed_exception(outcome: TraceOutcome, printed: str) -> tuple[str, str] | None:
    """The exception that a script which ended by itself handled and printed, as a logger's
    ``catch`` does around ``main()``."""
    if outcome.status != "ended":
        return None
    raised = exception_in(printed_traceback(printed))
    if not raised[0]:
        return None
    said = one_line(exception_text(*raised))
    what = f"the script printed an exception ({said}) and ended after {duration(outcome.seconds)}"
    return f"{what}, {without_a_step(outcome)}", _LINES_BELOW


def _without_step(outcome: TraceOutcome, command: Command, output: str) -> tuple[str, str]:
    """What happened, and what to do about it or where to look (empty: the first says it)."""
    what, after = what_happened(outcome), f"after {duration(outcome.seconds)}"
    too_small = without_batches(outcome, command)
    if too_small and outcome.status == "ended":
        return f"no optimizer step: {too_small}", ""
    if outcome.status == "ended" and outcome.module_calls and not outcome.gpu_operators:
        # It may have trained: a run without an optimizer ends with its first backward passes.
        text = f"{count(outcome.module_calls, 'module call')} in {duration(outcome.seconds)}"
        return f"{text}, none of them on the GPU: {_not_moved(outcome)}", ""
    if outcome.status == "ended":
        fix = "plan a command that trains, with enough data for one batch"
        return f"the script ended {after} without an optimizer step (seen: {_seen(outcome)})", fix
    if outcome.status == "timeout":
        place = f", it was at {outcome.location}" if outcome.location else ""
        fix = "shorten what comes before training, or raise --time-limit"
        return f"no optimizer step {after}{place} (seen: {_seen(outcome)})", fix
    hint = _of_processes(outcome.message, command.gpus)
    if outcome.status == "exited":
        hint = hint or _of_launch(output, command.gpus) or _spelled_otherwise(output)
        hint = hint or exit_hint(outcome, output, command)
    elif _OF_NO_BATCH.search(outcome.message):
        hint = hint or too_small or remedy(outcome, output)
    else:
        hint = hint or remedy(outcome, output)
    return f"{what} {after}, {without_a_step(outcome)}", hint


#: What a script says of a DataLoader that has no batch: something is divided by their number, a
#: schedule is made of it, or what a loop over them assigns is read behind it.
_OF_NO_BATCH: Final = re.compile(
    r"^(?:ZeroDivisionError|UnboundLocalError|StopIteration)\b|\btotal_steps\b.*\bgot 0\b"
)


def without_batches(outcome: TraceOutcome, command: Command) -> str:
    """A sentence that says that the data set has less than one batch, and what to type; empty where
    that is not so."""
    loader = outcome.loader
    if outcome.status not in ("ended", "failed") or loader is None or loader.batches:
        return ""
    samples, batch = loader.samples, loader.batch_size
    if not samples or not batch or samples >= batch:
        return ""
    where = f" at {loader.where}" if loader.where else ""
    fix = f"set batch_size={samples} or less for the DataLoader{where}"
    if "batch_size" in command.present:
        fix = f"write {{batch_size:{samples}}} (or less) into the command"
    return (
        f"the data set has {count(samples, 'sample')}, fewer than one batch of {batch} with "
        f"drop_last; {fix}"
    )


#: What Python says of a file or a folder that is not there.
_MISSING = re.compile(
    r"FileNotFoundError: .*\[Errno 2\] [^:\n]*: ('(?!nvidia-smi')[^'\n]+')", re.DOTALL
)
#: What a script says that was not started by its launcher.
_WITHOUT_LAUNCHER = re.compile(
    r"KeyError: '(LOCAL_RANK|RANK|WORLD_SIZE|LOCAL_WORLD_SIZE|MASTER_ADDR|MASTER_PORT)'"
    r"|env:// rendezvous: environment variable"
)
#: What PyTorch says of a tensor that was left on the CPU.
_MIXED_DEVICES = "Expected all tensors to be on the same device"
#: What a script says that wants several GPUs.
_SEVERAL_GPUS = re.compile(
    r"\b([2-9]|[1-9]\d|two|several|multiple|more than (one|1))\b[^.;]{0,20}\b(gpu|cuda|device)s?\b",
    re.IGNORECASE,
)


_NAME_GPUS = (
    'name them, as in --gpu "2x RTX 4090", or begin the command with '
    "`torchrun --nproc-per-node=2`, one process for each GPU"
)


def _of_processes(message: str, gpus: int) -> str:
    """What to do where a script wants a launcher, or several GPUs, in a machine of ``gpus``; empty
    where it does not."""
    if _WITHOUT_LAUNCHER.search(message):
        return (
            "it expects a launcher's environment variables: begin the command with "
            f"`torchrun --nproc-per-node={gpus}` in place of `python`"
        )
    if _MIXED_DEVICES in message:
        return "move all tensors of that line to one device, as in .to(device)"
    if _SEVERAL_GPUS.search(message):
        return _NAME_GPUS
    return ""


def _of_launch(output: str, gpus: int) -> str:
    """What to do where a script's parser refuses the option that PyTorch's old launcher gives it;
    empty where it does not."""
    if "unrecognized arguments: --local-rank=" not in output:
        return ""
    return (
        "torch.distributed.launch of PyTorch 2 and newer gives it --local-rank, which it does not "
        f"know: begin the command with `torchrun --nproc-per-node={gpus}`; where it needs "
        'args.local_rank, give its parser "--local-rank" next to "--local_rank"'
    )


#: argparse, and what its usage has of options.
_UNRECOGNIZED: Final = re.compile(r"error: unrecognized arguments: ([^\n]*)")
_FLAG: Final = re.compile(r"(?<![\w-])--?[A-Za-z][\w-]*")


def _spelled_otherwise(output: str) -> str:
    """The option that a script's parser has in place of one that it refuses, where they differ in
    dashes, underscores and capitals alone; empty where there is none."""
    refused = _UNRECOGNIZED.search(output)
    if refused is None:
        return ""
    known = {_bare(flag): flag for flag in _FLAG.findall(output[: refused.start()])}
    for flag in _FLAG.findall(refused[1]):
        if (meant := known.get(_bare(flag))) is not None:
            return f"its parser calls the option {meant}, not {flag}"
    return ""


def _bare(flag: str) -> str:
    return re.sub(r"[-_]", "", flag).lower()


def what_happened(outcome: TraceOutcome) -> str:
    """The subject and its verb, to be continued with "after …"."""
    if outcome.own_fault is not None:
        own = outcome.own_fault
        return f"trainfit itself failed at {own.place} ({one_line(own.error)})"
    place = f" at {outcome.location}" if outcome.location else ""
    if outcome.status == "exited":
        code, _, said = outcome.message.partition(": ")
        return f"the script exited with {code}" + (f" ({one_line(said)})" if said else "")
    if outcome.status == "timeout":
        return f"the time limit was reached{place}"
    if outcome.status == "interrupted":
        return f"interrupted{place}"
    if outcome.status == "died":
        return f"the script ended unexpectedly ({outcome.message})"
    if outcome.status == "out_of_memory":
        return f"the script ran out of GPU memory{place}"
    raised = parse("", outcome.message, outcome.traceback)
    if raised.where:  # the traceback of a worker stands before what it says
        place = f" at {raised.culprit.path}:{raised.culprit.line}" if raised.culprit else place
        return f"the script failed{place} ({_raised(raised)})"
    return f"the script failed{place} ({one_line(outcome.message)})"


def _raised(raised: ParsedException) -> str:
    """An exception of a DataLoader's worker, in a line."""
    return one_line(exception_text(raised.type, raised.message)) + f", {raised.where}"


#: Hints that are no more than where to look, below an error.
_TRACEBACK_BELOW, _LINES_BELOW = "its traceback is below", "its last lines are below"
_POINTERS: Final = (_TRACEBACK_BELOW, _LINES_BELOW)


def remedy(outcome: TraceOutcome, output: str) -> str:
    """What to do about a script that failed, or where to look: in ``output`` that is shown."""
    if missing := _MISSING.search(outcome.message):
        return f"put {missing[1]} there, or give its path in the command; {_TRACEBACK_BELOW}"
    if outcome.status == "out_of_memory":
        return "use a smaller model or input, or name a larger GPU"
    if outcome.status == "died" and "SIGKILL" in outcome.message:
        return "the system kills processes this way when RAM runs out: see the system log"
    if _is_syntax_error(outcome):
        return "fix that line"
    if outcome.status == "died" and BY_OTHERS in outcome.message:
        return "run it when they have ended"
    if outcome.status == "died" and "of RAM are left" in outcome.message:
        return (
            'make the model under torch.device("cuda"), where simulated parameters take no RAM, '
            "or free some"
        )
    if outcome.status == "died":
        return _LINES_BELOW if output else "it printed nothing"
    return _TRACEBACK_BELOW


def exit_hint(outcome: TraceOutcome, output: str, command: Command | None = None) -> str:
    """A hint on where to look after a script that exited by itself: in ``output`` that is shown."""
    present = command.present if command is not None else {}
    marked = [name for name in present if command is None or name not in command.supposed]
    names = ", ".join(f"{{{name}}}" for name in marked)
    check = f"check the option with {names}; " if marked else ""
    if not output:
        return f"{check}it printed nothing"
    if not unsaid(outcome, output):
        return f"{check}that is all it printed"
    return f"{check}its own message is below"


#: The exception at the end of a traceback, where it is this package's.
_OURS: Final = re.compile(r"\ntrainfit\.[\w.]+: .*", re.DOTALL)


def unsaid(outcome: TraceOutcome, output: str) -> str:
    """What the script printed; empty where the line on how it ended says it all. Of what cannot be
    simulated the frames: the exception is ours."""
    if _is_syntax_error(outcome):
        return ""
    if outcome.status == "unsupported":
        return _OURS.sub("", output)
    _, _, said = outcome.message.partition(": ")
    return "" if outcome.status == "exited" and output.split() == said.split() else output


def _is_syntax_error(outcome: TraceOutcome) -> bool:
    """Did Python not even begin to run the script? Its traceback has no frames then."""
    text = outcome.traceback
    return outcome.status == "failed" and bool(text) and "Traceback (most recent" not in text


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
    """Text on one line, without a terminal's colours, its beginning kept."""
    line = " ".join(_COLOUR.sub("", text).split())
    return line if len(line) <= most else line[: most - 1] + "…"
