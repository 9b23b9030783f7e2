"""What remedies can save, told before they are simulated: one at most, several together about."""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Final

from trainfit.plan.changes.catalogue import BY_NAME
from trainfit.results.changes import Remedy
from trainfit.results.memory import MemoryFigures

#: Bytes of allocated memory at its peak, by kind (:data:`trainfit.results.runs.recording.KINDS`).
Kinds = Mapping[str, int]

_BATCH: Final = ("activation", "temporary", "input", "kv_cache", "workspace")
_GRAPH: Final = ("activation", "temporary", "kv_cache", "workspace")
#: Remedies that are about the optimizer's states.
FEWER_STATES: Final = ("optimizer-8bit", "paged-optimizer", "adafactor", "adam", "momentum", "sgd")
#: What each remedy makes less of; those that are not named may lower anything.
_LOWERS: Final[Mapping[str, tuple[str, ...]]] = {
    **dict.fromkeys(("amp-bf16", "amp-fp16"), _BATCH),
    **dict.fromkeys(("accumulate", "lower-resolution", "fewer-cameras"), _BATCH),
    **dict.fromkeys(("shorter-sequences", "fewer-generations", "shorter-completions"), _BATCH),
    "reference-logprobs": (*_GRAPH, "parameter", "buffer"),
    "freeze-backbone": (*_GRAPH, "gradient", "optimizer_state"),
    **dict.fromkeys(("checkpoint", "inplace", "no-grad-eval", "channels-last"), _GRAPH),
    **dict.fromkeys(("attention-weights", "fused-attention", "chunked-loss"), _GRAPH),
    "set-to-none": ("gradient",),
    "optimizer-in-backward": ("gradient",),
    "fused-optimizer": (),
    **dict.fromkeys(FEWER_STATES, ("optimizer_state",)),
}
#: Those that change the optimizer's step, whose temporaries count where the peak is in it.
_OPTIMIZERS: Final = (*FEWER_STATES, "fused-optimizer", "optimizer-in-backward", "set-to-none")
#: What lowers activations and changes nothing that is learned, first what lowers most of them.
_WITH_ADAPTERS: Final = ("checkpoint", "chunked-loss", "accumulate")
#: Remedies in a combination: more lines than these nobody changes at once.
_MOST_TOGETHER: Final = 4
#: Combinations that are simulated at most.
_MOST_COMBINATIONS: Final = 3


def most_saved(name: str, kinds: Kinds, phase: str) -> int:
    """Bytes of the peak of ``kinds``, in ``phase`` of the step, that a remedy can save at most.

    At that moment of the changed job there is at least what it does not lower; so its peak is no
    less than that.
    """
    lowered = _LOWERS.get(name)
    if lowered is None:
        return sum(kinds.values())
    if phase == "optimizer" and name in _OPTIMIZERS:
        lowered = (*lowered, "temporary")
    return sum(kinds.get(kind, 0) for kind in lowered)


@dataclasses.dataclass(frozen=True)
class Before:
    """The job as it is: its peak by kind, and its figures."""

    kinds: Kinds
    figures: MemoryFigures


def expected_bytes(
    before: Before,
    items: Mapping[str, Remedy],
    kinds: Mapping[str, Kinds],
    names: Sequence[str],
) -> int:
    """Bytes of device memory of the remedies ``names`` together, about.

    Of each kind of memory each leaves the share that it left alone: two that lower activations to a
    quarter leave a sixteenth, and one more of the optimizer's states its own share of these.
    ``kinds`` are the peaks with each remedy alone. Reserved memory is to allocated as with the one
    of them that packs best, where they are settings of the allocator, else as before.
    """
    allocated = 0.0
    for kind in {*before.kinds, *(kind for name in names for kind in kinds[name])}:
        now = before.kinds.get(kind, 0)
        left = [kinds[name].get(kind, 0) for name in names]
        if now:
            allocated += now * math.prod(each / now for each in left)
        else:  # the peak has moved to where there is some of it
            allocated += max(left)
    packing = before.figures.reserved_bytes / max(before.figures.allocated_bytes, 1)
    for name in names:
        figures = items[name].memory
        if items[name].status == "replayed" and figures is not None:
            packing = min(packing, figures.reserved_bytes / max(figures.allocated_bytes, 1))
    context = before.figures.device_bytes - before.figures.reserved_bytes
    return round(allocated * packing) + context


def combinations(
    wins: Sequence[Remedy],
    expected: Callable[[Sequence[str]], int],
    capacity_bytes: int,
) -> list[tuple[str, ...]]:
    """Names of remedies to try together, of those that each save something.

    The cheapest first of those whose ``expected`` bytes fit in ``capacity_bytes``, each next one
    expected to need less than those before it; last what is expected to need least.
    """
    able = [
        chain
        for count in range(2, _MOST_TOGETHER + 1)
        for chain in itertools.combinations(wins, count)
        if _go_together(chain)
    ]
    if not able:
        return []
    named = {tuple(item.name for item in chain): chain for chain in able}
    bytes_of = {names: expected(names) for names in named}
    least = min(named, key=lambda names: (bytes_of[names], _price(named[names])))
    tried: list[tuple[str, ...]] = []
    for names in sorted(named, key=lambda names: (_price(named[names]), bytes_of[names])):
        most = bytes_of[tried[-1]] - 1 if tried else capacity_bytes
        if bytes_of[names] <= most and len(tried) < _MOST_COMBINATIONS:
            tried.append(names)
    return list(dict.fromkeys([*tried, least]))


def gentler(able: Collection[str], fitting: Collection[str]) -> list[tuple[str, ...]]:
    """Names of remedies to try together where only such fit alone, ``fitting``, that change the
    training: adapters on the weights as they are, with more and more of what changes nothing.

    None where adapters fit alone, or are not among the ``able`` ones.
    """
    if "lora" not in able or "lora" in fitting:
        return []
    more = [name for name in _WITH_ADAPTERS if name in able]
    return [("lora", *more[:count]) for count in range(1, len(more) + 1)]


def _price(chain: Sequence[Remedy]) -> float:
    return sum(item.cost_percent or 0.0 for item in chain)


def _go_together(chain: Sequence[Remedy]) -> bool:
    """Does none of them exclude another?"""
    taken: set[str] = set()
    for item in chain:
        kind = BY_NAME[item.name]
        if not kind.combines or kind.slots & taken:
            return False
        taken |= kind.slots
    return True
