"""Parts that recorded machines are composed from: each is a piece of a machine's document.

A part is a dictionary with some of the keys "files", "environment", "inaccessible", "calls",
"commands" and "probes" (see ``trainfit.hardware.machine.recorded``). ``composed`` lays parts over
each other: what a later one says replaces what an earlier one said, and ``None`` takes it away.
"""

from __future__ import annotations

import uuid
from collections.abc import Iterable, Sequence
from typing import Any

Part = dict[str, Any]
Files = dict[str, Any]

FOLDER = {"folder": True}
KIB, MIB, GIB = 1 << 10, 1 << 20, 1 << 30


def composed(*parts: Part) -> Part:
    """The parts laid over each other."""
    whole: Part = {"environment": {}, "files": {}, "calls": {}, "commands": {}, "probes": {}}
    inaccessible: set[str] = set()
    for part in parts:
        inaccessible |= set(part.get("inaccessible", ()))
        for key in whole:
            _lay_over(whole[key], part.get(key, {}))
    return {**whole, "inaccessible": sorted(inaccessible)}


def _lay_over(below: dict[str, Any], above: dict[str, Any]) -> None:
    for name, value in above.items():
        if value is None:
            below.pop(name, None)
        elif isinstance(value, dict) and name in ("limits", "spaces", "sizes", "processes"):
            below[name] = {**below.get(name, {}), **value}
        else:
            below[name] = value


def link(target: str) -> dict[str, str]:
    """A symbolic link as a file's content."""
    return {"link": target}


def each(path: str, values: Sequence[Any]) -> Files:
    """One file for each value; ``path`` holds ``{}`` where its number, from 0, stands."""
    return each_of(path, range(len(values)), values)


def each_of(path: str, numbers: range, values: Sequence[Any]) -> Files:
    """One file for each of the consecutive numbers, as one range where they are several."""
    first, last = numbers[0], numbers[-1]
    if first == last:
        return {path.replace("{}", str(first)): values[0]}
    place = path.replace("{}", f"{{{first}-{last}}}")
    same = all(value == values[0] for value in values)
    return {place: values[0] if same else list(values)}


def cpu_list(numbers: Iterable[int]) -> str:
    """Numbers as Linux writes a list: "0-3,8"."""
    parts: list[list[int]] = []
    for number in sorted(numbers):
        if parts and number == parts[-1][1] + 1:
            parts[-1][1] = number
        else:
            parts.append([number, number])
    return ",".join(str(low) if low == high else f"{low}-{high}" for low, high in parts)


def made_up_uuid(name: str) -> str:
    """A UUID that is always the same for ``name``."""
    return str(uuid.uuid5(uuid.NAMESPACE_DNS, f"{name}.trainfit"))
