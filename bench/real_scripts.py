"""How trainfit does on third-party training code (tests/real), family by family.

Runs the corpus (`make test-real` sets its environment up; this needs the same) and prints how
many families are right, what was wrong without a note, what was changed in the user's folders,
whether recommendations depend on the starting batch, and how long a first answer and a whole plan
take against the script's own start: the bare script on this machine's CPU to the end of its
second optimizer step, in seconds on the wall and of processor time of its process tree.

``--quick`` runs five families, ``--stored`` none: it judges what docs/compatibility.json holds of
earlier runs by what the families declare now.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests" / "real"))

from _bench import Figure, finish

from corpus.figures import middle, ratios, share
from corpus.judge import not_installed
from corpus.page import write_page
from corpus.results import chosen, judge_again, measure, stored

#: Families of ``--quick``, one of each kind: a loop, two trainers, a console script, inference.
QUICK = ("timm", "transformers-bert", "lightning", "yolo-detect", "timm-features")


def main() -> int:
    """Run, and report."""
    args = _options()
    names = QUICK if args.quick else args.families
    try:
        families = chosen(names)
    except ValueError as error:
        print(f"real_scripts: error: {error}", file=sys.stderr)
        return 2
    missing = not_installed(families)
    if missing and not args.stored:
        names = ", ".join(missing)
        print(
            f"real_scripts: error: {names}: not installed in this Python; run it with "
            ".venv-real/bin/python, which `make test-real` sets up, or give --stored",
            file=sys.stderr,
        )
        return 2
    if not args.stored:
        for family in families:
            outcome = measure(family)
            print(f"{outcome.family}: {outcome.verdict}", file=sys.stderr, flush=True)
    judge_again()
    write_page()
    found = [outcome for name, outcome in stored().items() if name in {f.name for f in families}]
    return finish(figures_of(found), args.json, {"families": found})


def figures_of(found: Sequence[dict[str, Any]]) -> list[Figure]:
    """Those of issue 20."""
    independent = [o["independent"] for o in found if o["independent"] is not None]
    evaluations = [each != "silent" for each in evaluations_of(found)]
    told = "evaluation simulated or named"
    return [
        *([Figure(told, share(evaluations), 100, at_most=False, unit="%")] if evaluations else []),
        Figure("families", len(found), 30, at_most=False),
        Figure("families right", share(o["right"] for o in found), 95, at_most=False, unit="%"),
        Figure(
            "families wrong without a note", sum(bool(o["wrong"]) for o in found), 0, at_most=True
        ),
        Figure("files changed", sum(len(o["files_changed"]) for o in found), 0, at_most=True),
        Figure("recommended whatever the start", share(independent), 100, at_most=False, unit="%"),
        *(
            Figure(f"{name}, {unit}", middle(ratios(found, what, unit)), goal, at_most=True)
            for name, what, goal in (
                ("first answer / own start on the CPU", "first", 2),
                ("plan / own start on the CPU", "", 4),
            )
            for unit in ("wall", "cpu")
        ),
    ]


def evaluations_of(found: Sequence[dict[str, Any]]) -> list[str]:
    """What each family's first plan says of the evaluation; none of those that give no plan, or
    whose stored outcome is of before it was counted."""
    said = (o["plans"][0]["figures"].get("evaluation") for o in found if o["plans"])
    return [each for each in said if each is not None]


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("families", nargs="*", help="names (default: all)")
    parser.add_argument("--quick", action="store_true", help=f"only {', '.join(QUICK)}")
    parser.add_argument("--stored", action="store_true", help="the stored outcomes, no runs")
    parser.add_argument("--json", action="store_true", help="one JSON document on stdout")
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
