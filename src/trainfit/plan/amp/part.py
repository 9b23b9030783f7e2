"""Mixed precision in the launch command."""

from __future__ import annotations

from trainfit.plan.command.launchers import ACCELERATE
from trainfit.plan.command.parsing import Command
from trainfit.results.plan.amp import AmpChoice
from trainfit.results.plan.launch import LaunchPart, PartPlace, PartStatus
from trainfit.results.plan.result import PlanResult


def amp_part(result: PlanResult, command: Command) -> LaunchPart:
    """The line "amp": what autocast is to compute in, how that is asked for, and why."""
    choice, present = result.amp_choice, _present(result, command)
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
        reason = choice.by_hand.removesuffix(f": {choice.line}").removesuffix(f": {choice.place}")
        hazard = next((each.text for each in choice.own_hazards if each.blocks), "")
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
    """In one line, with why AMP saves no time where it is off."""
    reason = choice.reason.removeprefix(f"AMP {choice.dtype}: ")
    if choice.dtype == "off" and choice.time_reason:
        reason += f"; {choice.time_reason}"
    return reason


def _place(result: PlanResult, command: Command) -> PartPlace:
    """Where the precision is, or would be, asked for."""
    if "amp" in command.present:
        return "argument"
    return "environment" if _asks_environment(result, command) else "script"


def _present(result: PlanResult, command: Command) -> str:
    """As it is written; of a script that says it itself, what autocast computes in."""
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
    value = next((each.value for each in candidates if each.asked == "present"), "")
    return "" if value == "no" else value


def _asks_environment(result: PlanResult, command: Command) -> bool:
    choice = result.amp_choice
    asked = choice is not None and any(each.asked == "variable" for each in choice.candidates)
    return asked or ACCELERATE in {**result.variables, **command.environment()}
