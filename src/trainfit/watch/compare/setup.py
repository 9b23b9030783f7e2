"""What two runs were given and ran on, where it differs."""

from __future__ import annotations

import dataclasses
import shlex
from collections.abc import Iterator, Mapping
from typing import Final

from trainfit.results.watch.comparison import Difference, Group
from trainfit.results.watch.run import RunHeader, WatchedLoader

_LOADER: Final = (
    *("num_workers", "prefetch_factor", "pin_memory", "persistent_workers", "start_method"),
)
#: Fields of a header by the group that they are told in.
_FIELDS: Final[Mapping[str, Group]] = {
    "precision": "precision",
    "autocast": "precision",
    "framework": "model",
    "parameters": "model",
    "trained_parameters": "model",
    "optimizer": "model",
    "torch": "version",
    "python": "version",
    "trainfit": "version",
    "distributed": "command",
    "world_size": "command",
    "host": "hardware",
    "cpu": "hardware",
    "usable_cores": "hardware",
    "quota_cores": "hardware",
    "ram_bytes": "hardware",
}


def differences(before: RunHeader, after: RunHeader) -> tuple[Difference, ...]:
    """All of them, the command first."""
    return (
        *_command(before.command, after.command),
        *_loaders(before.loaders, after.loaders),
        *_fields(before, after),
        *_mapped("command", "threads of {}", before.threads, after.threads),
        *_mapped("loader", "worker threads of {}", before.worker_threads, after.worker_threads),
        *_mapped("variable", "{}", before.variables, after.variables),
        *_told("hardware", "GPUs", gpus(before), gpus(after)),
    )


def other_hardware(before: RunHeader, after: RunHeader) -> str:
    """Why times of the two cannot be compared ("usable cores: 8 and 16"); empty: they can.

    What only one of them knows is no difference.
    """
    cores = _cores(before), _cores(after)
    pairs = (
        ("GPUs", gpus(before), gpus(after)),
        ("usable cores", *(None if each is None else f"{each:g}" for each in cores)),
        ("processor", before.cpu or None, after.cpu or None),
    )
    return "; ".join(
        f"{what}: {first} and {second}"
        for what, first, second in pairs
        if first is not None and second is not None and first != second
    )


def gpus(header: RunHeader) -> str:
    """ "2 x NVIDIA A100", or "none"."""
    names = [each.name for each in header.gpus]
    found = [f"{names.count(name)} x {name}" for name in sorted(set(names))]
    return ", ".join(found) or "none"


def batch_size(header: RunHeader) -> int | None:
    """Of the training's DataLoader; ``None``: not known."""
    loader = next(iter(_of_training(header.loaders)), None)
    return None if loader is None else loader.batch_size


def _cores(header: RunHeader) -> float | None:
    known = [each for each in (header.usable_cores, header.quota_cores) if each is not None]
    return min(known, default=None)


def _command(before: str, after: str) -> Iterator[Difference]:
    """Word by word where both have as many; else both commands as a whole."""
    words = _words(before), _words(after)
    if len(words[0]) != len(words[1]):
        yield from _told("command", "command", before, after)
        return
    for at, (one, two) in enumerate(zip(*words, strict=True)):
        earlier = words[0][at - 1] if at else ""
        what = earlier if earlier.startswith("-") else "command"
        yield from _told("command", what, one, two)


def _words(command: str) -> list[str]:
    try:
        return shlex.split(command)
    except ValueError:  # of a quote without its end; it was no shell that wrote it
        return command.split()


def _of_training(loaders: tuple[WatchedLoader, ...]) -> tuple[WatchedLoader, ...]:
    return tuple(each for each in loaders if each.role == "training") or loaders


def _loaders(
    before: tuple[WatchedLoader, ...], after: tuple[WatchedLoader, ...]
) -> Iterator[Difference]:
    before, after = _of_training(before), _of_training(after)
    yield from _told("loader", "DataLoaders", str(len(before)), str(len(after)))
    many = len(before) > 1
    for one, two in zip(before, after, strict=False):
        place = f" ({one.place})" if many else ""
        for name in _LOADER:
            values = str(getattr(one, name)), str(getattr(two, name))
            yield from _told("loader", name + place, *values)
        sizes = str(one.batch_size), str(two.batch_size)
        yield from _told("batch size", "batch size" + place, *sizes)


def _fields(before: RunHeader, after: RunHeader) -> Iterator[Difference]:
    one, two = dataclasses.asdict(before), dataclasses.asdict(after)
    for name, group in _FIELDS.items():
        values = (_text(each[name]) for each in (one, two))
        yield from _told(group, name.replace("_", " "), *values)


def _text(value: object) -> str:
    if value is None:
        return ""
    return f"{value:g}" if isinstance(value, float) else str(value)


def _mapped(
    group: Group, what: str, before: Mapping[str, object], after: Mapping[str, object]
) -> Iterator[Difference]:
    for name in sorted({*before, *after}):
        values = (str(each.get(name, "")) for each in (before, after))
        yield from _told(group, what.format(name), *values)


def _told(group: Group, what: str, before: str, after: str) -> Iterator[Difference]:
    if before != after:
        yield Difference(group, what, before, after)
