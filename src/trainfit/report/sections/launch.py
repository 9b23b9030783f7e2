"""A launch command in words: what each of its parts is for, and what is to be changed by hand."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from trainfit.results.changes import NOT_NEEDED, LaunchPart, changes_by_hand


def part_reason(part: LaunchPart) -> str:
    """A part with its reason and what that is from, in one line."""
    return f"{_headed(part)}: {_reason(part)}{_evidence(part)}"


def _headed(part: LaunchPart) -> str:
    if part.status in ("not set", "cannot tell"):
        return part.name
    if part.where == "wrapper":
        return part.value
    return f"{part.name}={part.value}"


def why(part: LaunchPart) -> str:
    """The reason alone: also what is recommended where the command's own value is kept."""
    if part.recommended:
        return f"the command's own; recommended is {part.recommended}: {part.reason}"
    words = (NOT_NEEDED if part.is_needless else "", part.reason, part.more)
    return "; ".join(filter(None, words)) or "reason not known"


def _reason(part: LaunchPart) -> str:
    was = f"was {part.present}: " if part.present and part.present != part.value else ""
    before = {
        "set": was,
        "kept": "kept: " if part.where != "script" else "",
        "not set": f"was {part.present}, " if _is_removed(part) else "not set: ",
        "by hand": f"in {_file(part)}, {was}",
        "cannot tell": "cannot tell: ",
        "option": "option: ",
    }
    return before[part.status] + why(part)


def _file(part: LaunchPart) -> str:
    """Where a change by hand is made: a configuration file's line is named, a script is not."""
    name = part.place.rpartition(":")[0]
    return "the script" if not name or name.endswith(".py") else name


def _evidence(part: LaunchPart) -> str:
    if not part.evidence:
        return ""
    return f" [{part.evidence}{f', {part.machine}' if part.machine else ''}]"


def change_lines(parts: Sequence[LaunchPart]) -> list[str]:
    """What the user has to change in the script, a line for each place."""
    # Another batch size is in a plan's figures, wherever it is written; another precision is not.
    without = {part.line for part in parts if part.name == "amp" and part.status == "by hand"}
    return [
        f"change {place or 'in the script'}"
        f"{' (not in these figures)' if any(map(line.endswith, without)) else ''}: {line}"
        for place, line in changes_by_hand(parts)
    ]


def change_text(part: LaunchPart) -> str:
    """Where one part is written in the script, and what to write there."""
    by_hand = dataclasses.replace(part, status="by hand")
    return ": ".join(changes_by_hand([by_hand])[0])


def threads_text(parts: Sequence[LaunchPart]) -> str:
    """Variables and cores that go before the command, and why; empty without any."""
    found = [part for part in parts if part.where in ("environment", "wrapper")]
    told = [part for part in found if part.status == "set" or _is_overruled(part)]
    reasons = dict.fromkeys(f"{why(part)}{_evidence(part)}" for part in told)
    return f"{' '.join(map(_headed, told))}: {'; '.join(reasons)}" if told else ""


def _is_overruled(part: LaunchPart) -> bool:
    """Kept, although another value is recommended."""
    return part.status == "kept" and bool(part.recommended)


def _is_removed(part: LaunchPart) -> bool:
    """A variable that is set now, and should not be."""
    return part.status == "not set" and part.where == "environment" and bool(part.present)


def removed_text(parts: Sequence[LaunchPart]) -> str:
    """Variables whose values no library can use, and what became of them; empty without any."""
    found = filter(_is_removed, parts)
    return "; ".join(f"{part.name}={part.present} {part.reason}" for part in found)


def left_out_text(parts: Sequence[LaunchPart]) -> str:
    """What was considered and not set; the reasons are in the whole report."""
    found = [part for part in parts if part.status == "not set" and not _is_removed(part)]
    needless = [part.name for part in found if part.is_needless]
    others = [part.name for part in found if not part.is_needless]
    texts = [f"{', '.join(others)}: no gain"] if others else []
    texts += [f"{', '.join(needless)}: {NOT_NEEDED}"] if needless else []
    return "; ".join(texts)
