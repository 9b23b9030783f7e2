"""The launch command of a plan, made once: its parts, set or left out, each with its reason."""

from __future__ import annotations

import dataclasses
import linecache
import os
from collections.abc import Iterator
from typing import Final

from trainfit.plan.command.file_values import config_line
from trainfit.plan.command.parsing import Command
from trainfit.plan.command.script_lines import is_packages, package_says
from trainfit.plan.command.tunables import FRAMEWORKS, LOADER_TUNABLES
from trainfit.plan.command.wrappers import ACCELERATE
from trainfit.plan.launch_line import LaunchCommand, launch_command
from trainfit.plan.sizing.recommendation import effective_words
from trainfit.results.changes import AllocatorTrial, LaunchPart, PartPlace, PartStatus
from trainfit.results.configuration import AmpChoice, BatchLimits
from trainfit.results.dataloader import LoaderSettings
from trainfit.results.loader import LoaderResult, SettingReason
from trainfit.results.plan import PlanResult, batch_reasons, option_text
from trainfit.results.text import size

# ---
# Mixed precision in the launch command.


def amp_part(result: PlanResult, command: Command) -> LaunchPart:
    """The line "amp": what autocast is to compute in, how that is asked for, and why."""
    choice, present = result.amp_choice, _present(result, command)
    if choice is None and result.now.by_fsdp:
        why = f"the model computes in {result.now.amp} already, by FSDP's mixed precision"
        return _part(result, command, "kept", present, why)
    if choice is None:
        why = "the opposite setting was not simulated"
        return LaunchPart("amp", "cannot tell", _place(result, command), why, present=present)
    if choice.configuration is not None:
        value = choice.value or f"{ACCELERATE}={choice.variable}"
        reason = _reason(choice)
        if choice.by_hand:
            reason += f"; {choice.by_hand}"
        return _part(result, command, "set", value, reason)
    if choice.by_hand:
        reason = choice.by_hand_gain
        hazard = next(
            (own_hazard.title for own_hazard in choice.own_hazards if own_hazard.is_critical), ""
        )
        return LaunchPart(
            "amp",
            "by hand",
            "script",
            f"{reason}: {hazard}" if hazard else reason,
            choice.by_hand_dtype,
            present,
            "predicted",
            result.gpu,
            choice.line,
            choice.place,
        )
    return _part(result, command, "kept" if present else "not set", present, _reason(choice))


def _part(
    result: PlanResult, command: Command, status: PartStatus, value: str, reason: str
) -> LaunchPart:
    return LaunchPart(
        "amp",
        status,
        _place(result, command),
        reason,
        value,
        _present(result, command),
        "predicted",
        result.gpu,
    )


def _reason(choice: AmpChoice) -> str:
    """The reason in one line, with why AMP saves no time where it is off."""
    reason = choice.reason
    if choice.dtype == "off" and choice.time_reason:
        reason += f"; {choice.time_reason}"
    return reason


def _place(result: PlanResult, command: Command) -> PartPlace:
    """The place where the precision is, or would be, asked for."""
    if "amp" in command.present:
        return "argument"
    return "environment" if _asks_environment(result, command) else "script"


def _present(result: PlanResult, command: Command) -> str:
    """The precision as it is written; of a script that says it itself, what autocast computes
    in."""
    written = command.present.get("amp")
    if written is not None:
        return written
    precision = command.environment().get(ACCELERATE) or _exported(result.amp_choice)
    if precision:
        return f"{ACCELERATE}={precision}"
    return "" if result.now.amp == "off" else result.now.amp


def _exported(choice: AmpChoice | None) -> str:
    """Accelerate's precision in trainfit's own environment; empty where it is not set there."""
    candidates = choice.candidates if choice is not None else ()
    value = next((candidate.value for candidate in candidates if candidate.asked == "present"), "")
    return "" if value == "no" else value


def _asks_environment(result: PlanResult, command: Command) -> bool:
    choice = result.amp_choice
    asked = choice is not None and any(
        candidate.asked == "variable" for candidate in choice.candidates
    )
    return asked or ACCELERATE in {**result.variables, **command.environment()}


# ---
# Parts of a launch command, set or left out, each with its reason.


#: What evidence of real runs of the DataLoader is from.
_HERE: Final = "this machine"
#: A DataLoader's settings whose argument (or call) has another name.
_ARGUMENTS: Final = {
    "start_method": "multiprocessing_context",
    "worker_threads": "torch.set_num_threads in worker_init_fn",
}
_LOADER: Final = "DataLoader"
#: Settings that mean nothing without workers.
_OF_WORKERS: Final = (
    *("prefetch_factor", "persistent_workers", "start_method", "in_order", "worker_threads"),
)


def launch_parts(plan: PlanResult, line: LaunchCommand) -> tuple[LaunchPart, ...]:
    """The parts in the order of the line: environment, cores, arguments; then what the script has
    to say."""
    parts = [
        *_variables(plan, line),
        *_cores(line),
        *_batch_option(plan, line.command),
        _batch(plan, line.command),
        *_accumulation(plan, line),
        amp_part(plan, line.command),
        *_loader(plan, line),
    ]
    return tuple(sorted(parts, key=lambda part: _ORDER.index(part.where)))


_ORDER: Final = ("environment", "wrapper", "argument", "script")


# -- before the command ------------------------------------------------------------------------
def _variables(plan: PlanResult, line: LaunchCommand) -> Iterator[LaunchPart]:
    asked = plan.amp_choice.variable if plan.amp_choice is not None else ""
    for name, value in plan.variables.items():
        if name == ACCELERATE and value == asked:
            continue  # the part of AMP says it
        reason = "as in the environment of the plan"
        yield LaunchPart(name, "set", "environment", reason, value)
    yield from _misread(line)
    yield from _threads(line)
    if plan.allocator is not None:
        yield _allocator(plan.allocator, plan.gpu)


def _misread(line: LaunchCommand) -> Iterator[LaunchPart]:
    """Variables that hold no number of threads: out of the command, or to be unset outside it."""
    found, present = line.found, {**os.environ, **line.command.environment()}
    told = {reason.name: reason for reason in (found.reasons if found is not None else ())}
    for name, what in line.useless.items():
        where = "removed" if name in line.removed else "unset it where it is set"
        more = told[name].reason if name in told and told[name].misread else ""
        yield LaunchPart(
            name, "not set", "environment", f"{where}: it {what}", "", present[name], "assumed",
            more=more,
        )  # fmt: skip


def _threads(line: LaunchCommand) -> Iterator[LaunchPart]:
    """Variables that hold libraries' threads; calls that do are lines of the script."""
    found = line.found
    if found is None:
        return
    calls = {
        variable.name: variable for variable in found.variables if variable.where != "environment"
    }
    for reason in found.reasons:
        if reason.where != "environment" or reason.name in line.useless:
            continue
        part = _variable(reason, line)
        if found.was_busy and part.status == "not set":
            part = dataclasses.replace(part, status="cannot tell")
        if reason.name in calls:
            place = calls[reason.name].where.replace("script", "")
            call = calls[reason.name].line
            part = dataclasses.replace(
                part, status="by hand", where="script", line=call, place=place
            )
        yield part


def _variable(reason: SettingReason, line: LaunchCommand) -> LaunchPart:
    """A variable that holds a library's threads."""
    value, present = reason.value or "", reason.present or ""
    status: PartStatus = "set" if value else "not set"
    recommended = ""
    if reason.name in line.kept:
        recommended = value
        status, value = "kept", line.kept[reason.name]
    elif value and present == value:
        status = "kept"
    return LaunchPart(
        reason.name, status, "environment", reason.reason, value, present, reason.evidence, _HERE,
        recommended=recommended,
    )  # fmt: skip


def _allocator(trial: AllocatorTrial, gpu: str) -> LaunchPart:
    """Expandable segments, only where the job does not run without them."""
    saved = trial.reserved_bytes - trial.other_reserved_bytes
    text = f" at batch size {trial.batch_size}" if trial.batch_size else ""
    other = "without expandable segments" if trial.expandable else "with expandable segments"
    differs = f"{size(abs(saved))} {'less' if saved > 0 else 'more'} reserved"
    reason = f"{other} {differs if saved else 'as much is reserved'}"
    reason += f" ({size(trial.reserved_bytes)}{text})"
    status: PartStatus = "kept" if trial.present else "not set"
    return LaunchPart(
        trial.variable, status, "environment", reason, trial.present, trial.present,
        "predicted", gpu, is_needless=saved > 0 and not trial.present,
    )  # fmt: skip


def _cores(line: LaunchCommand) -> Iterator[LaunchPart]:
    """The cores that the job runs on."""
    found = line.found
    advised = found.cores.prefix if found is not None and found.cores is not None else ""
    own = line.own_cores
    if own:
        reason = "the command's own" + (f"; recommended is {advised}" if advised else "")
        yield LaunchPart(own, "kept", "wrapper", reason, own, own)
        return
    status: PartStatus = "set" if advised else "not set"
    for each in found.reasons if found is not None else ():
        if each.where == "wrapper":
            yield LaunchPart(
                each.name, status, "wrapper", each.reason, advised, "", each.evidence, _HERE
            )


# -- the command's arguments -------------------------------------------------------------------
def _batch(plan: PlanResult, command: Command) -> LaunchPart:
    chosen, present = plan.chosen, plan.now.batch_size
    best, limits = chosen.recommended_batch, chosen.limits
    now = str(present) if present else ""
    if not best:
        why = (limits.reason if limits is not None else "") or plan.basis_detail
        return LaunchPart("batch_size", "cannot tell", "argument", why, now, now)
    reason = "; ".join(batch_reasons(plan, best, limits or BatchLimits(None, None)))
    part = LaunchPart(
        "batch_size", "set", "argument", reason, str(best), now, "predicted", plan.gpu
    )
    return _expressed(part, plan, command)


def _batch_option(plan: PlanResult, command: Command) -> Iterator[LaunchPart]:
    """A faster batch size that would change what is learned: not in the launch line."""
    limits = plan.chosen.limits
    if limits is None or limits.option is None or not plan.chosen.recommended_batch:
        return
    option, now = limits.option, str(plan.now.batch_size or "")
    reason = option_text(option)
    part = LaunchPart(
        "batch_size", "option", "argument", reason, str(option.batch_size), now, "predicted",
        plan.gpu,
    )  # fmt: skip
    launch_part = _expressed(part, plan, command)
    if launch_part.value == part.value:
        yield dataclasses.replace(launch_part, status="option", where="argument")


def _accumulation(plan: PlanResult, line: LaunchCommand) -> Iterator[LaunchPart]:
    """The micro-batches of an optimizer step, where there are several or a placeholder is."""
    step = plan.step
    accumulation = step.accumulation if step is not None else None
    target = int({**line.command.present, **line.values}.get("grad_accum", accumulation or 1))
    if step is not None and step.is_kept and accumulation and plan.now.batch_size:
        best = plan.chosen.recommended_batch or plan.now.batch_size
        target = max(1, plan.now.batch_size * accumulation // best)
    if step is None or accumulation is None or (accumulation == 1 and target == 1):
        return
    reason = "the script's own"
    if step.effective_batch is not None:
        now = plan.now.batch_size
        replicas = plan.ranks.replicas if plan.ranks is not None else 1
        batch = (plan.chosen.recommended_batch or now or 1) / (now or 1)
        becomes = step.effective_batch * target / accumulation * batch
        said = effective_words(step.effective_batch // step.rounds, replicas)
        reason = f"keeps {said}" if round(becomes) == step.effective_batch else f"instead of {said}"
    status: PartStatus = "kept" if target == accumulation else "set"
    yield LaunchPart("grad_accum", status, "argument", reason, str(target), str(accumulation))


def _loader(plan: PlanResult, line: LaunchCommand) -> Iterator[LaunchPart]:
    """The DataLoader's settings, or why they stay."""
    found = line.found
    if found is None:
        yield LaunchPart("num_workers", "cannot tell", "argument", _not_tuned(plan))
        return
    reasons = {each.name: each for each in found.reasons}
    other = plan.loading is not None and plan.loading.launched is not None
    machine = (plan.cpu.name if plan.cpu is not None else "") or "the processor given by --cpu"
    for name in _settings(found):
        value, present = getattr(found.recommended, name), getattr(found.present, name)
        reason = reasons.get(_ARGUMENTS.get(name, name))
        part = LaunchPart(
            name,
            "set",
            "argument",
            reason.reason if reason is not None else "",
            str(value),
            str(present),
            reason.evidence if reason is not None else "",
            _HERE,
        )
        if other and name == "num_workers":
            here = f"the fewest that feed it; {_HERE} needs {_workers_here(plan)}"
            part = dataclasses.replace(part, reason=here, evidence="predicted", machine=machine)
        yield _worth_it(_expressed(part, plan, line.command), found)


def _worth_it(part: LaunchPart, result: LoaderResult) -> LaunchPart:
    """A change of the script is asked for only where it wins something."""
    if part.status != "by hand" or result.verdict == "change":
        return part
    why = f"{part.value} gains too little to change the script: {part.reason}"
    return dataclasses.replace(
        part, status="kept", where="argument", value=part.present, reason=why,
        line="", place="", call="",
    )  # fmt: skip


def _not_tuned(plan: PlanResult) -> str:
    """Reason why nothing is known about the DataLoader."""
    if plan.loading is not None:
        return f"the DataLoader could not be tuned: {plan.loading.failure}"
    if plan.loader_at is None:
        return "no DataLoader fed the first step"
    if plan.inference is not None:
        return "the script does not train; --loader tunes its DataLoader anyway"
    return "the DataLoader was not measured (--no-loader)"


def _workers_here(plan: PlanResult) -> int:
    found = plan.loading.result if plan.loading is not None else None
    return found.recommended.num_workers if found is not None else 0


def _settings(result: LoaderResult) -> Iterator[str]:
    """The settings that every DataLoader's user looks for, and what else is to be changed."""
    for field in dataclasses.fields(LoaderSettings):
        name = field.name
        if name == "library_threads":  # variables before the command
            continue
        if name in _OF_WORKERS and not result.recommended.num_workers:
            continue
        changes = getattr(result.recommended, name) != getattr(result.present, name)
        if changes or name in LOADER_TUNABLES:
            yield name


def _expressed(part: LaunchPart, plan: PlanResult, command: Command) -> LaunchPart:
    """Set by the command where it has a placeholder; else a line to change: of the configuration
    file that holds the value, or of the script."""
    if part.value == part.present:
        return dataclasses.replace(part, status="kept")
    if part.name in command.present:
        return part
    written = config_line(command, part.name, part.present, part.value) if part.present else None
    line = plan.script_lines.get(part.name)
    if written is None and line is not None:
        text = line.line.replace("{}", part.value)
        return dataclasses.replace(
            part, status="by hand", where="script", line=text, place=line.place, call=line.call
        )
    if written is not None:
        return dataclasses.replace(
            part, status="by hand", where="script", line=written.text, place=written.place
        )
    if is_packages(plan.loader_at or "", command):
        reason = f"{part.value}: {part.reason}; {package_says(plan.loader_at or '')}"
        return dataclasses.replace(part, status="kept", value=part.present, reason=reason)
    call, name = _maker(plan), _ARGUMENTS.get(part.name, part.name)
    framework = FRAMEWORKS.get(plan.step.loop) if plan.step is not None else None
    if framework is not None and part.name in framework.names:
        call, name = framework.call, framework.names[part.name]
    return dataclasses.replace(
        part,
        status="by hand",
        where="script",
        line=f"{name}={part.value}" if call else f"{name}={part.value} for the DataLoader there",
        place=plan.loader_at or "",
        call=call,
    )


def _maker(plan: PlanResult) -> str:
    """The call that makes the DataLoader; empty where the user's line calls a library that does."""
    name, _, number = (plan.loader_at or "").rpartition(":")
    line = linecache.getline(name, int(number)) if number.isdigit() else ""
    return "" if line and _LOADER not in line else _LOADER


# ---
# The launch command of a plan, made once, with the reason of each part.


def with_launch(plan: PlanResult, command: Command) -> PlanResult:
    """``plan`` with its launch line and the parts of that; of ``loading`` what there is."""
    line = launch_command(plan, command)
    parts = launch_parts(plan, line) if plan.can_start else ()
    return dataclasses.replace(plan, launch=line.line, launch_parts=parts)
