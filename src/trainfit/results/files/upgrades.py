"""Documents of earlier format versions, brought to the current one before they are decoded."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

#: Changes a parsed document in place, from one format version to the next.
Upgrade = Callable[[dict[str, Any]], None]


def upgrade(
    document: dict[str, Any], version: int, upgrades: Mapping[int, Upgrade], present: int
) -> None:
    """Apply the upgrades from ``version`` to ``present``; a version without one only added keys."""
    for number in range(version, present):
        if number in upgrades:
            upgrades[number](document)


def rename_key(document: dict[str, Any], path: str, former: str, name: str) -> None:
    """Rename a key of every object at ``path`` (see :func:`objects_at`)."""
    for found in objects_at(document, path):
        if former in found:
            found[name] = found.pop(former)


def rename_value(document: dict[str, Any], path: str, key: str, former: str, name: str) -> None:
    """Replace one value of a key in every object at ``path`` (see :func:`objects_at`)."""
    for found in objects_at(document, path):
        if found.get(key) == former:
            found[key] = name


def objects_at(document: Any, path: str) -> Iterator[dict[str, Any]]:
    """The JSON objects at a path of keys, such as "probe.faults" ("": the document itself).

    A list stands for each of its items. What is missing or of another type is skipped: the
    decoder, which knows the types, refuses it.
    """
    if isinstance(document, list):
        for item in document:
            yield from objects_at(item, path)
    elif isinstance(document, dict):
        key, _, rest = path.partition(".")
        if not key:
            yield document
        else:
            yield from objects_at(document.get(key), rest)
