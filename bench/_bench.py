"""What the bench scripts share: figures with goals, how they are printed, the exit status."""

from __future__ import annotations

import argparse
import json
from dataclasses import asdict, dataclass
from typing import Any


@dataclass(frozen=True)
class Figure:
    """A measured figure and its goal, which it reaches from below (``at_most``) or above.

    ``unit`` is printed right after the number, so it brings its own space (" GiB", "%").
    """

    name: str
    value: float
    goal: float
    at_most: bool
    unit: str = ""

    @property
    def holds(self) -> bool:
        """Is the goal reached? A value that is no number reaches none."""
        return self.value <= self.goal if self.at_most else self.value >= self.goal

    @property
    def line(self) -> str:
        """``NAME: FIGURE (goal GOAL) holds``, or ``short``."""
        side = "at most" if self.at_most else "at least"
        verdict = "holds" if self.holds else "short"
        value, goal = f"{self.value:.4g}{self.unit}", f"{self.goal:g}{self.unit}"
        return f"{self.name}: {value} (goal {side} {goal}) {verdict}"


def quick_options(about: str | None) -> argparse.Namespace:
    """``--quick`` and ``--json`` of a script that takes seconds anyway."""
    parser = argparse.ArgumentParser(
        description=about, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--quick", action="store_true", help="the same: it takes seconds")
    parser.add_argument("--json", action="store_true", help="one JSON document on stdout")
    return parser.parse_args()


def finish(figures: list[Figure], as_json: bool, details: dict[str, Any] | None = None) -> int:
    """Print a line for each figure, or one JSON document; 0 if every goal holds, else 1."""
    if as_json:
        rows = [{**asdict(figure), "holds": figure.holds} for figure in figures]
        print(json.dumps({"figures": rows, "details": details or {}}, indent=2))
    else:
        for figure in figures:
            print(figure.line)
    return 0 if all(figure.holds for figure in figures) else 1
