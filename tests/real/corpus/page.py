"""Writes docs/compatibility.md from the stored outcomes."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from corpus.families import all_families
from corpus.figures import memory_error, middle, ratios
from corpus.results import STORE, stored

_ABOUT = """# What was tried

Third-party training and inference code, unmodified, from the packages named, with synthetic data
and models built from scratch: each is planned from two batch sizes and compared with a hand sum
(parameters, gradients, optimizer state, micro-batch, accumulation, size of the data set) and with
the state of its folders before and after. `make test-real` runs all of it and writes this page;
the figures are in `compatibility.json`, what each family is in `tests/real/corpus/families/`.

"works": every figure is the hand sum's. "works with a note": one is not, or cannot be told, and
trainfit says so. "refused": one line says why there is no answer. "Memory" is the largest
departure of weights, gradients and optimizer state from the hand sum. "Runs" are the simulated
runs of the first plan. The times are those of one plan on a small computer, divided by what the
bare script takes to its second optimizer step on that computer's CPU: first answer, whole plan.
"""

_SAID = {
    "works": "works",
    "note": "works with a note",
    "refused": "refused",
    "wrong": "**wrong**",
    "failed": "**fails**",
}


def write_page() -> None:
    """Regenerate it."""
    found, families = stored(), {each.name: each for each in all_families()}
    rows = [_row(outcome, families[name].about) for name, outcome in found.items()]
    head = "| Family | Package | Verdict | Note | Memory | Runs | Times |"
    table = "\n".join([head, "|" + " --- |" * 7, *rows])
    right = sum(each["right"] for each in found.values())
    evaluations = evaluations_of(found.values())
    named = sum(each != "silent" for each in evaluations)
    of_evaluations = (
        f" Of {len(evaluations)} families measured since this is counted, {named} have their "
        "evaluation simulated, or named in the first line."
    )
    summary = (
        f"\n{right} of {len(found)} families are right; median times: first answer "
        f"{middle(ratios(found.values(), 'first', 'wall')):.1f}, "
        f"plan {middle(ratios(found.values(), '', 'wall')):.1f} "
        f"({middle(ratios(found.values(), '', 'cpu')):.1f} in processor time)."
        f"{of_evaluations if evaluations else ''}\n\n"
    )
    STORE.with_suffix(".md").write_text(_ABOUT + summary + table + "\n", encoding="utf-8")


def evaluations_of(outcomes: Iterable[Mapping[str, Any]]) -> list[str]:
    """What each family's first plan says of the evaluation; none of those that give no plan, or
    whose stored outcome is of before it was counted."""
    said = (each["plans"][0]["figures"].get("evaluation") for each in outcomes if each["plans"])
    return [each for each in said if each is not None]


def _row(outcome: Mapping[str, Any], about: str) -> str:
    packages = ", ".join(f"{name} {number}" for name, number in outcome["packages"].items())
    error, plan = memory_error(outcome), outcome["plans"][0]
    memory = "–" if error is None else f"{error:.2f}%"
    cells = (
        f"{outcome['family']}: {about}",
        packages,
        _SAID[outcome["verdict"]],
        _note(outcome),
        memory,
        str(plan["runs"] or "–"),
        _times([outcome]),
    )
    return "| " + " | ".join(cell.replace("|", "\\|").replace("\n", " ") for cell in cells) + " |"


def _note(outcome: Mapping[str, Any]) -> str:
    if outcome["failure"]:
        return outcome["failure"][:200]
    said = [check["noted"] for check in outcome["checks"] if check["noted"]]
    wrong = [f"{name.partition(' @')[0]} is wrong" for name in outcome["wrong"]]
    if outcome["independent"] is False:
        wrong.append(f"recommends {' or '.join(map(str, outcome['recommended'].values()))}")
    elif outcome["independent"] is None and len(set(outcome["recommended"].values())) > 1:
        said.append("keeps the batch size it is given, and says why")
    if outcome["files_changed"]:
        wrong.append(f"{len(outcome['files_changed'])} files changed")
    return "; ".join(dict.fromkeys((*wrong, *said)))


def _times(outcomes: list[Mapping[str, Any]]) -> str:
    first, whole = ratios(outcomes, "first", "wall"), ratios(outcomes, "", "wall")
    return f"{first[0]:.1f}, {whole[0]:.1f}" if first and whole else "–"
