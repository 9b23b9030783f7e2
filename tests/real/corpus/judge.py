"""Compares what trainfit said of a family with its hand sum."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from typing import Any, Final

from corpus.family import Family, HandSum
from corpus.measure import Bare, Planned
from trainfit.results.configuration import FEW_STEPS

#: Recommendations of two starting values are the same within a step of four a doubling.
GRID_STEP = 2**0.25


@dataclass(frozen=True)
class Check:
    """One figure; ``found`` is ``None`` where trainfit said that it cannot tell."""

    name: str
    wanted: str
    found: str
    holds: bool
    noted: str = ""


@dataclass(frozen=True)
class Outcome:
    """What became of a family. ``wrong`` are checks that failed without a note."""

    family: str
    packages: dict[str, str]
    expected: str
    verdict: str
    right: bool
    checks: tuple[Check, ...]
    wrong: tuple[str, ...]
    files_changed: tuple[str, ...]
    independent: bool | None
    recommended: dict[str, int | None]
    notes: tuple[str, ...]
    failure: str
    bare: Bare
    plans: tuple[Planned, ...]


def judged(family: Family, bare: Bare, plans: Sequence[Planned]) -> Outcome:
    """The verdict of all runs of a family."""
    failed = [each for each in plans if not each.figures]
    checks = [] if failed else _all_checks(family, bare, plans)
    notes = tuple(note for each in plans for note in each.notes)
    checks = [_with_note(family, each, notes) for each in checks]
    wrong = tuple(each.name for each in checks if not each.holds and not each.noted)
    verdict = _verdict(family, failed, checks)
    independent = _independent(family, plans) if not failed and family.hand else None
    if independent is False and all(map(_says_why, plans)):
        independent = None
    files = tuple(dict.fromkeys(path for each in plans for path in each.files_changed))
    right = verdict == family.expected or (verdict, family.expected) == ("works", "note")
    return Outcome(
        family=family.name,
        packages={name: _version(name) for name in family.packages},
        expected=family.expected,
        verdict=verdict,
        right=right and not wrong and not files and independent is not False,
        checks=tuple(checks),
        wrong=wrong,
        files_changed=files,
        independent=independent,
        recommended={str(each.start): each.figures.get("recommended_batch") for each in plans},
        notes=tuple(dict.fromkeys(notes)),
        failure=failed[0].error if failed else "",
        bare=bare,
        plans=tuple(plans),
    )


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return ""


def _verdict(family: Family, failed: Sequence[Planned], checks: Sequence[Check]) -> str:
    if failed:
        asked = family.refusal and all(re.search(family.refusal, each.error) for each in failed)
        return "refused" if asked else "failed"
    if any(not each.holds and not each.noted for each in checks):
        return "wrong"
    return "note" if any(each.noted for each in checks) else "works"


def _all_checks(family: Family, bare: Bare, plans: Sequence[Planned]) -> list[Check]:
    checks = list(_of_bare(family, bare))
    for each in plans:
        checks += [_named(check, each.start) for check in _of_plan(family, each)]
    return [each for each in checks if each.name.partition(" @")[0] not in family.left_out]


def _named(check: Check, start: int) -> Check:
    return Check(f"{check.name} @{start}", check.wanted, check.found, check.holds)


def _of_bare(family: Family, bare: Bare) -> Iterator[Check]:
    """Is the hand sum itself right? What the instrument counted on the CPU says."""
    hand, found = family.hand, bare.found
    if hand is None or not found:
        return
    yield _equal("bare: parameters", hand.parameters, found["parameters"])
    if not family.inference:
        yield _equal("bare: trained", hand.updated, found["trained"])
        state = hand.reached * hand.state_bytes
        yield _equal("bare: state bytes", state, found["state_bytes"], family.tolerance)


def _of_plan(family: Family, plan: Planned) -> Iterator[Check]:
    hand, found = family.hand, plan.figures
    if hand is None:
        return
    yield from _of_memory(family, hand, found)
    if family.simulates:
        yield from _of_kinds(family, plan)
        return
    yield from _of_samples(family, hand, plan)
    yield from _of_recommendation(hand, found)


def _of_memory(family: Family, hand: HandSum, found: dict[str, Any]) -> Iterator[Check]:
    share = family.tolerance
    called = hand.parameters + hand.evaluated
    yield _equal("parameters", called, found.get("parameters"), share)
    yield _equal(
        "weight bytes", hand.parameters * hand.weight_bytes, found.get("weight_bytes"), share
    )
    if hand.cache_bytes is not None:
        cache = hand.cache_bytes * family.starts[0]
        yield _equal("cache bytes", cache, found.get("cache_bytes"), share)
    if family.inference:
        return
    gradients, state = hand.reached * hand.gradient_bytes, hand.reached * hand.state_bytes
    yield _equal("trained", hand.updated, found.get("trained"), share)
    yield _equal("gradient bytes", gradients, found.get("gradient_bytes"), share)
    yield _equal("state bytes", state, found.get("state_bytes"), max(share, 1e-3))


def _of_kinds(family: Family, plan: Planned) -> Iterator[Check]:
    """What there is of memory, and what has to be said of the run."""
    hand, found = family.hand, plan.figures
    if hand is not None and hand.effective:
        yield _equal("effective batch", hand.effective, found["effective_batch"])
    for kind in family.kinds:
        yield Check(f"has {kind}", kind, ", ".join(found["kinds"]), kind in found["kinds"])
    for pattern in family.said:
        holds = any(re.search(pattern, note) for note in plan.notes)
        yield Check(f"says {pattern}", pattern, "", holds)


def _of_samples(family: Family, hand: HandSum, plan: Planned) -> Iterator[Check]:
    found, micro = plan.figures, hand.micro or plan.start
    yield _equal("micro-batch", micro, found["batch_size"])
    if not family.inference:
        effective = hand.effective or micro * hand.accumulation
        yield _equal("effective batch", effective, found["effective_batch"])
        if found.get("samples_of_a_step_s") is not None:
            yield _equal("samples/s × step", effective, found.get("samples_of_a_step_s"), 1e-3)
    if hand.samples is not None:
        yield _equal("samples", hand.samples, found["samples"])


def _of_recommendation(hand: HandSum, found: dict[str, Any]) -> Iterator[Check]:
    batch, largest = found["recommended_batch"], found["largest_batch"]
    if batch is None:
        return
    if hand.samples is not None:
        yield _at_most("recommended within the data set", hand.samples, batch)
        steps = hand.samples / batch
        if steps < FEW_STEPS:
            said = (found["limits"] or {}).get("epoch_steps")
            yield Check("few steps an epoch are told", f"{steps:.3g}", str(said), said is not None)
    if largest is not None:
        yield _at_most("recommended within memory", largest, batch)
    if found["recommended_bytes"] is not None:
        yield _at_most("its memory", found["gpu_memory_bytes"], found["recommended_bytes"])


_OF_THE_START: Final = re.compile(r"\bkeep(s|ing)\b|leaves an epoch of")


def _independent(family: Family, plans: Sequence[Planned]) -> bool | None:
    """Is the recommendation (the option's, where the launch line keeps the batch size) that of any
    starting value? ``None``: none was given from any."""
    batches = [_furthest(each.figures) for each in plans]
    if len(batches) < 2 or family.hand is None or all(each is None for each in batches):
        return None
    if any(not each for each in batches):
        return False
    return max(batches) <= min(batches) * GRID_STEP + 1e-9


def _furthest(found: dict[str, Any]) -> int | None:
    option = (found.get("limits") or {}).get("option")
    batch: int | None = option["batch_size"] if option else found.get("recommended_batch")
    return batch


def _says_why(plan: Planned) -> bool:
    """Does a plan say what of its start its batch size comes from: that it is kept and why, the
    samples of a step that the command has, or the steps that an epoch is to have?"""
    reason = (plan.figures.get("limits") or {}).get("reason")
    return any(_OF_THE_START.search(note) for note in (*plan.notes, reason or ""))


def _with_note(family: Family, check: Check, notes: Sequence[str]) -> Check:
    pattern = family.noted.get(check.name.partition(" @")[0], "")
    said = next((note for note in notes if pattern and re.search(pattern, note)), "")
    return Check(check.name, check.wanted, check.found, check.holds, "" if check.holds else said)


def _equal(name: str, wanted: float, found: float | None, share: float = 0.0) -> Check:
    holds = found is not None and abs(found - wanted) <= share * wanted + 1e-9
    return Check(
        name, f"{wanted:,.10g}", "cannot tell" if found is None else f"{found:,.10g}", holds
    )


def _at_most(name: str, limit: float, found: float) -> Check:
    return Check(name, f"at most {limit:,.10g}", f"{found:,.10g}", found <= limit)
