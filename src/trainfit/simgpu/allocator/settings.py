"""PyTorch's allocator settings: ``PYTORCH_ALLOC_CONF`` and the constants behind it.

Rules from ``c10/core/AllocatorConfig.{h,cpp}`` (``AcceleratorAllocatorConfig::parseArgs``)
and ``c10/cuda/CUDAAllocatorConfig.{h,cpp}``, checked against torch 2.8.0 to 2.15.0. What the
versions read differently, and what only the later ones know, is :data:`_SINCE` and
:data:`_SHARED_CONFIG`. All sizes are in bytes unless a name says otherwise.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any, Final

from trainfit.results.text import MIB
from trainfit.torch_private.needed import release

#: c10/core/AllocatorConfig.h: kMinBlockSize, kSmallSize, kSmallBuffer, kMinLargeAlloc,
#: kRoundLarge and the default of large_segment_size_.
MIN_BLOCK = 512
SMALL_SIZE = 1 * MIB
SMALL_BUFFER = 2 * MIB
MIN_LARGE_ALLOC = 10 * MIB
ROUND_LARGE = 2 * MIB
LARGE_SEGMENT = 20 * MIB

#: kRoundUpPowerOfTwoIntervals: one size class per power of two from 1 MiB, the last one
#: open-ended (64 GiB and more share it).
SIZE_CLASSES = 16

#: The variable that every version reads.
VARIABLE: Final = "PYTORCH_CUDA_ALLOC_CONF"
#: In the order in which torch 2.13.0 looks them up; the first one that is *set* wins, even
#: when empty. (The header's comment states the opposite order; the code is what runs.)
_VARIABLES: Final = (VARIABLE, "PYTORCH_ALLOC_CONF")

#: Since then CUDA's settings are those of all accelerators. Before, the first variable alone is
#: read, blanks alone are dropped, limits must be above 20 MiB, and ">" of
#: ``roundup_power2_divisions`` replaces the last boundary's divisions, too.
_SHARED_CONFIG: Final = (2, 10)
#: The version that a key came with, where 2.8 has it not.
_SINCE: Final[Mapping[str, tuple[int, int]]] = {
    "expandable_segments_reserve": (2, 15),
    "expandable_segments_reserve_by_class": (2, 15),
    "graph_capture_record_stream_reuse": (2, 9),
    "large_segment_size_mb": (2, 11),
    "per_process_memory_fraction": (2, 10),
    "pinned_free_catch_all": (2, 12),
    "pinned_max_cached_size_mb": (2, 13),
    "pinned_max_round_threshold_mb": (2, 13),
    "pinned_reserve_segment_size_mb": (2, 10),
    "throw_on_cudamalloc_oom": (2, 12),
}

#: Keys that PyTorch accepts and that change no device allocation: they are of the host's memory, of
#: addresses alone, or of when a lock is held.
_WITHOUT_EFFECT = frozenset(
    {
        "expandable_segments_reserve",
        "expandable_segments_reserve_by_class",
        "graph_capture_record_stream_reuse",
        "pinned_free_catch_all",
        "pinned_max_cached_size_mb",
        "pinned_max_round_threshold_mb",
        "pinned_num_register_threads",
        "pinned_reserve_segment_size_mb",
        "pinned_use_background_threads",
        "pinned_use_cuda_host_register",
        "release_lock_on_cudamalloc",
    }
)


def variables_read(torch: str) -> tuple[str, ...]:
    """Variables of the environment in which PyTorch ``torch`` looks for settings, in its order.

    Here and below a version that is empty is the newest.
    """
    return _VARIABLES if _has_shared_config(torch) else _VARIABLES[:1]


def unread_variables(env: Mapping[str, str], torch: str) -> tuple[str, ...]:
    """Variables with settings for the allocator that PyTorch ``torch`` does not look at."""
    return tuple(name for name in _VARIABLES if env.get(name) and name not in variables_read(torch))


def knows(key: str, torch: str) -> bool:
    """Does PyTorch ``torch`` take a setting of this name?"""
    return not torch or release(torch) >= _SINCE.get(key, (0, 0))


def _has_shared_config(torch: str) -> bool:
    return not torch or release(torch) >= _SHARED_CONFIG


#: Sets what a value says in the fields so far, as a version of PyTorch does.
_Parser = Callable[[str, dict[str, Any], str], None]


@dataclass(frozen=True)
class AllocatorSettings:
    """What ``PYTORCH_ALLOC_CONF`` sets, with PyTorch's defaults.

    ``max_split_bytes`` ``None`` means that blocks of every size are split.
    ``roundup_power2_divisions`` holds one entry per size class, 0 or 1 for no rounding.
    ``per_process_memory_fraction`` 1.0 means no limit below the device's memory.
    """

    max_split_bytes: int | None = None
    roundup_power2_divisions: tuple[int, ...] = (0,) * SIZE_CLASSES
    garbage_collection_threshold: float = 0.0
    expandable_segments: bool = False
    max_non_split_rounding_bytes: int = LARGE_SEGMENT
    large_segment_bytes: int = LARGE_SEGMENT
    per_process_memory_fraction: float = 1.0
    #: A request that exceeds the memory fraction fails before any cache is released
    #: (``throw_on_cudamalloc_oom``, PyTorch pull request 179473).
    rejects_early: bool = False

    @classmethod
    def from_conf(cls, text: str, torch: str = "") -> AllocatorSettings:
        """Parse a ``PYTORCH_ALLOC_CONF`` string as PyTorch ``torch`` does.

        Raises:
            ValueError: names the key and the value that PyTorch would refuse, or that
                selects an allocator other than the native one.
        """
        entries = list(_entries(text, torch))
        values: dict[str, Any] = {}
        # parseArgs reads large_segment_size_mb first: two other limits depend on it.
        entries.sort(key=lambda entry: entry[0] != "large_segment_size_mb")
        for key, value in entries:
            parser = _PARSERS.get(key)
            if not knows(key, torch):
                raise ValueError(
                    f"the allocator setting {key!r} (value {value!r}) came with PyTorch "
                    f"{'.'.join(map(str, _SINCE[key]))}; this is {torch}"
                )
            if parser is not None:
                parser(value, values, torch)
            elif key not in _WITHOUT_EFFECT:
                raise ValueError(f"unknown allocator setting {key!r} (value {value!r})")
        return cls(**values)

    @classmethod
    def from_environment(cls, env: Mapping[str, str], torch: str = "") -> AllocatorSettings:
        """The settings that a process with this environment and PyTorch ``torch`` starts with.

        Of :func:`variables_read` the first that is set decides alone; they are not merged.
        """
        for name in variables_read(torch):
            text = env.get(name)
            if text is not None:
                try:
                    return cls.from_conf(text, torch)
                except ValueError as error:
                    raise ValueError(f"{name}: {error}") from None
        return cls()

    def changed_by(self, text: str, torch: str = "") -> AllocatorSettings:
        """The settings after ``text`` is set in a running program.

        As parseArgs does, what limits splitting, rounding and garbage collection returns to
        its default where ``text`` does not name it; the rest stays.

        Raises:
            ValueError: as :meth:`from_conf`.
        """
        given = self.from_conf(text, torch)
        named = {_FIELDS[key] for key, _ in _entries(text, torch) if key in _FIELDS} | _RESET
        return replace(self, **{name: getattr(given, name) for name in named})

    def round_size(self, size: int) -> int:
        """``round_size``: the block size that a request of ``size`` bytes needs."""
        if size < MIN_BLOCK:
            return MIN_BLOCK
        # AcceleratorAllocatorConfig::roundup_power2_divisions(size): log2, from 1 MiB.
        size_class = min(max(size.bit_length() - 21, 0), SIZE_CLASSES - 1)
        divisions = self.roundup_power2_divisions[size_class]
        if divisions > 1 and size > MIN_BLOCK * divisions:
            return _round_to_division(size, divisions)
        return -(-size // MIN_BLOCK) * MIN_BLOCK

    def segment_size(self, rounded: int) -> int:
        """``get_allocation_size``: bytes asked of cudaMalloc for a block of ``rounded``."""
        if rounded <= SMALL_SIZE:
            return SMALL_BUFFER
        if rounded < MIN_LARGE_ALLOC:
            return self.large_segment_bytes
        return -(-rounded // ROUND_LARGE) * ROUND_LARGE

    def to_conf(self) -> str:
        """What ``PYTORCH_ALLOC_CONF`` has to say for these settings; empty for the defaults."""
        entries: list[tuple[str, object]] = []
        if self.expandable_segments:
            entries.append(("expandable_segments", True))
        if self.large_segment_bytes != LARGE_SEGMENT:
            entries.append(("large_segment_size_mb", self.large_segment_bytes // MIB))
        if self.max_split_bytes is not None:
            entries.append(("max_split_size_mb", self.max_split_bytes // MIB))
        if self.max_non_split_rounding_bytes != self.large_segment_bytes:
            mib = self.max_non_split_rounding_bytes // MIB
            entries.append(("max_non_split_rounding_mb", mib))
        if self.rounds_to_divisions:
            divisions = self.roundup_power2_divisions
            by_class = ",".join(f"{1 << index}:{number}" for index, number in enumerate(divisions))
            same = len(set(divisions)) == 1
            entries.append(("roundup_power2_divisions", divisions[0] if same else f"[{by_class}]"))
        if self.garbage_collection_threshold:
            entries.append(("garbage_collection_threshold", self.garbage_collection_threshold))
        if self.per_process_memory_fraction != 1:
            entries.append(("per_process_memory_fraction", self.per_process_memory_fraction))
        return ",".join(f"{key}:{value}" for key, value in entries)

    @property
    def rounds_to_divisions(self) -> bool:
        """Whether any size class rounds to more than multiples of 512 bytes."""
        return any(divisions > 1 for divisions in self.roundup_power2_divisions)


def _round_to_division(size: int, divisions: int) -> int:
    """``roundup_power2_next_division``: the next of ``divisions`` steps between powers of 2."""
    floor = 1 << (size.bit_length() - 1)
    if floor == size:
        return size
    step = floor >> (divisions.bit_length() - 1)
    return -(-size // step) * step


def _entries(text: str, torch: str) -> Iterator[tuple[str, str]]:
    """``key:value`` pairs of a configuration string; a value may be a ``[...]`` list.

    PyTorch drops all whitespace and accepts one trailing comma, and so does this.
    """
    rest = re.sub(r"\s+" if _has_shared_config(torch) else " +", "", text)
    while rest:
        match = re.match(r"([^,:\[\]]+):(\[[^\[\]]*\]|[^,:\[\]]+)(?:,|$)", rest)
        if match is None:
            raise ValueError(f"expected 'key:value' at {rest!r} in {text!r}")
        yield match[1], match[2]
        rest = rest[match.end() :]


def _integer(key: str, value: str) -> int:
    """The integer as ``std::stoull`` reads it: leading digits count, what follows them is
    ignored."""
    match = re.match(r"\+?(\d+)", value)
    if match is None:
        raise ValueError(f"{key}: expected an integer, got {value!r}")
    return int(match[1])


def _number(key: str, value: str) -> float:
    match = re.match(r"[+-]?(\d+\.?\d*|\.\d+)([eE][+-]?\d+)?", value)
    if match is None:
        raise ValueError(f"{key}: expected a number, got {value!r}")
    return float(match[0])


def _large_segment(value: str, values: dict[str, Any], _: str) -> None:
    mib = _integer("large_segment_size_mb", value)
    if mib <= MIN_LARGE_ALLOC // MIB:
        raise ValueError(f"large_segment_size_mb must be > {MIN_LARGE_ALLOC // MIB}, got {value!r}")
    values["large_segment_bytes"] = mib * MIB
    values.setdefault("max_non_split_rounding_bytes", mib * MIB)


def _split_limit(key: str, field: str) -> _Parser:
    def parse(value: str, values: dict[str, Any], torch: str) -> None:
        mib = _integer(key, value)
        least = values.get("large_segment_bytes", LARGE_SEGMENT) // MIB
        least += not _has_shared_config(torch)
        if mib < least:
            raise ValueError(f"{key} must be >= {least}, got {value!r}")
        values[field] = mib * MIB

    return parse


def _collection_threshold(value: str, values: dict[str, Any], _: str) -> None:
    threshold = _number("garbage_collection_threshold", value)
    if not 0.0 < threshold < 1.0:
        raise ValueError(f"garbage_collection_threshold must be in (0.0, 1.0), got {value!r}")
    values["garbage_collection_threshold"] = threshold


def _memory_fraction(value: str, values: dict[str, Any], _: str) -> None:
    fraction = _number("per_process_memory_fraction", value)
    if not 0.0 <= fraction <= 1.0:
        raise ValueError(f"per_process_memory_fraction must be in [0.0, 1.0], got {value!r}")
    values["per_process_memory_fraction"] = fraction


def _flag(key: str, field: str) -> _Parser:
    def parse(value: str, values: dict[str, Any], _: str) -> None:
        if value not in ("True", "False"):
            raise ValueError(f"{key} must be True or False, got {value!r}")
        values[field] = value == "True"

    return parse


def _backend(value: str, values: dict[str, Any], _: str) -> None:
    if value != "native":
        raise ValueError(f"backend: only the native allocator can be simulated, got {value!r}")


def _is_power_of_2(value: int) -> bool:
    return value > 0 and value & (value - 1) == 0


def _divisions(value: str, values: dict[str, Any], torch: str) -> None:
    """``parseRoundUpPower2Divisions``: one number, or ``[MB:divisions,...,>:divisions]``."""
    key = "roundup_power2_divisions"
    if not value.startswith("["):
        single = _integer(key, value)
        if not _is_power_of_2(single):
            raise ValueError(f"{key}: divisions must be a power of 2, got {value!r}")
        values[key] = (single,) * SIZE_CLASSES
        return
    classes = [0] * SIZE_CLASSES
    last = 0
    first = True
    for item in filter(None, value[1:-1].split(",")):
        boundary, separator, text = item.partition(":")
        divisions = _integer(key, text)
        if not separator or not (divisions == 0 or _is_power_of_2(divisions)):
            raise ValueError(f"{key}: divisions must be 0 or a power of 2, got {item!r}")
        if boundary == ">":
            # Starts after the last boundary, or after the first class if none was given.
            rest = last + _has_shared_config(torch)
            classes[rest:] = [divisions] * (SIZE_CLASSES - rest)
            continue
        megabytes = _integer(key, boundary)
        if not _is_power_of_2(megabytes):
            raise ValueError(f"{key}: boundaries must be powers of 2, got {item!r}")
        last = min(megabytes.bit_length() - 1, SIZE_CLASSES - 1)
        if first:
            classes[:last] = [divisions] * last
            first = False
        classes[last] = divisions
    values[key] = tuple(classes)


_PARSERS: dict[str, _Parser] = {
    "backend": _backend,
    "expandable_segments": _flag("expandable_segments", "expandable_segments"),
    "garbage_collection_threshold": _collection_threshold,
    "large_segment_size_mb": _large_segment,
    "max_non_split_rounding_mb": _split_limit(
        "max_non_split_rounding_mb", "max_non_split_rounding_bytes"
    ),
    "max_split_size_mb": _split_limit("max_split_size_mb", "max_split_bytes"),
    "per_process_memory_fraction": _memory_fraction,
    "roundup_power2_divisions": _divisions,
    "throw_on_cudamalloc_oom": _flag("throw_on_cudamalloc_oom", "rejects_early"),
}

#: The field that a key sets, and those that every change of the settings resets.
_FIELDS = {
    "expandable_segments": "expandable_segments",
    "garbage_collection_threshold": "garbage_collection_threshold",
    "large_segment_size_mb": "large_segment_bytes",
    "max_non_split_rounding_mb": "max_non_split_rounding_bytes",
    "max_split_size_mb": "max_split_bytes",
    "per_process_memory_fraction": "per_process_memory_fraction",
    "roundup_power2_divisions": "roundup_power2_divisions",
    "throw_on_cudamalloc_oom": "rejects_early",
}
_RESET = {"max_split_bytes", "roundup_power2_divisions", "garbage_collection_threshold"}
