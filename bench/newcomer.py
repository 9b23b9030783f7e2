"""The first ten minutes of a new user: an empty folder, README, and what it says to type.

``make plan`` in a bare clone must end with commands that work. For each PyTorch (``--torch``,
default 2.8 and the newest) a folder with an empty home is made; README's own lines clone this
repository's HEAD, make the environment and install. Then

- README, Getting started and the guides are typed in order (`_walk.py`); samples are compared with
  figures masked, as they are of another machine and PyTorch;
- ``trainfit plan`` of ACT is timed, alone and next to two busy loops: the first answer after the
  script's own second step (what ``trainfit simulate --steps 2`` needs), and the whole plan;
- 125 command lines that cannot work (`_bad_commands.py`) are typed: each must end with exit code 2
  (or 70) and at most three lines, the script's own output not counted.

An hour, for the most part installations and the guides' real runs. ``--quick``: README alone, and
no busy loops. ``--part``: one of the three only. The times want a machine with nothing else to do.
"""

from __future__ import annotations

import argparse
import re
import shutil
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import _bad_commands
from _bench import BenchFigure, busy, finish, parser, say
from _walk import PartOutcome, Walk, pages
from _walk_place import ADDRESS, INSTALLS, CloneFolder

ACT: Final = (
    "python examples/act/train.py --dataset=data/act-example '--batch_size={batch_size:8}' "
    "'--amp={amp:true}'"
)
FIRST_ANSWER_S: Final = 15.0
PLAN_S: Final = 90.0
LINES: Final = 3
PARTS: Final = ("documented", "times", "bad")
#: Around what the script itself printed, in an error message.
_OWN_OUTPUT: Final = re.compile(r"--- the script's own output ---.*?(--- end|\Z)", re.DOTALL)
_ANSWER: Final = re.compile(r"trainfit: first answer: (.*)")


@dataclass
class Newcomer:
    """One user with one PyTorch."""

    torch: str
    walk: Walk
    quick: bool
    parts: frozenset[str]
    details: dict[str, Any] = field(default_factory=dict)

    @property
    def place(self) -> CloneFolder:
        return self.walk.place

    def figures(self) -> list[BenchFigure]:
        """All that is measured, in the order in which a user meets it."""
        found = [*self._documented()] if "documented" in self.parts else []
        if not found and self.place.lent is None:
            self.walk.wanted = lambda text: INSTALLS.match(text) is not None
            for outcome in self.walk.page("README.md"):
                say(outcome.row)
        self._must(". .venv/bin/activate")
        if self.place.lent is None:
            self._must("pip install '.[example]'")
        self._must("python examples/act/make_dataset.py --out data/act-example")
        if "times" in self.parts:
            found += self._times("quiet", 0)
            if not self.quick:
                found += self._times("two busy loops", 2)
        return [*found, self._bad_commands()] if "bad" in self.parts else found

    def _documented(self) -> Iterator[BenchFigure]:
        outcomes: list[PartOutcome] = []
        # It would put its pinned PyTorch in the place of this one.
        self.walk.wanted = lambda text: text != "make plan"
        for page in pages()[: 1 if self.quick else None]:
            for outcome in self.walk.page(page):
                say(outcome.row)
                outcomes.append(outcome)
        typed = [o for o in outcomes if o.kind != "screen" and o.verdict != "not run"]
        failed = [o for o in typed if o.verdict != "ok"]
        differ = [o for o in outcomes if o.verdict == "differs"]
        self.details["failed"] = [o.row for o in failed]
        self.details["differ"] = [o.row for o in differ]
        self.details["not run"] = [
            f"{o.page}:{o.line} {o.note}" for o in outcomes if o.verdict == "not run"
        ]
        share = 100 * (len(typed) - len(failed)) / max(len(typed), 1)
        yield BenchFigure(
            self._name(f"{len(typed)} documented commands work"), share, 100, False, "%"
        )
        yield BenchFigure(self._name("sample screens that differ"), len(differ), 0, True)

    def _times(self, when: str, loops: int) -> Iterator[BenchFigure]:
        with busy(loops):
            started = "trainfit simulate --gpu 'RTX 4090' --steps 2 --output two.trainfit -- "
            second_step = self.place.run(started + ACT, 600)
            stamped = (
                f"trainfit plan --gpu 'RTX 4090' -- {ACT} 2> >(while IFS= read -r line; do "
                'printf "%s %s\\n" "$EPOCHREALTIME" "$line"; done >&2); code=$?; wait; (exit $code)'
            )
            plan = self.place.run(f"printf '%s start\\n' $EPOCHREALTIME >&2; {stamped}", 900)
        self.details[f"plan, {when}"] = plan.err.splitlines()
        answer = first_answer(plan.err.splitlines())
        after = answer - second_step.seconds if answer is not None else float("nan")
        whole = plan.seconds if plan.code == 0 else float("nan")
        yield BenchFigure(
            self._name(f"ACT, {when}: first answer"), after, FIRST_ANSWER_S, True, " s"
        )
        yield BenchFigure(self._name(f"ACT, {when}: plan"), whole, PLAN_S, True, " s")

    def _bad_commands(self) -> BenchFigure:
        _bad_commands.prepare(self.place.clone)
        wrong = []
        for text in _bad_commands.COMMANDS:
            done = self.place.run(text, 120)
            said = _OWN_OUTPUT.sub("", done.out + done.err)
            lines = [line for line in said.splitlines() if not progress(line)]
            if done.code not in (2, 70) or len(lines) > LINES:
                wrong.append(f"{text}: exit code {done.code}, {len(lines)} lines")
        self.details["bad command lines"] = wrong
        total = len(_bad_commands.COMMANDS)
        name = self._name(f"of {total} bad command lines: short, exit code 2 or 70")
        return BenchFigure(name, total - len(wrong), total, False)

    def _must(self, text: str) -> None:
        done = self.place.run(text)
        if done.code:
            raise SystemExit(f"{text}: exit code {done.code}: {done.last_words}")

    def _name(self, text: str) -> str:
        return f"torch {self.torch}: {text}"


def make_plan(python: str) -> BenchFigure:
    """Does ``make plan`` in a bare clone end with commands that work?"""
    folder = Path(tempfile.mkdtemp(prefix="newcomer-"))
    try:
        place = CloneFolder(folder / "user", python=python)
        said = ""
        for text in (f"git clone {ADDRESS}", "cd trainfit", "make plan", ". .venv/bin/activate"):
            done = place.run(text, 1800)
            if done.code:
                say(f"{text}: exit code {done.code}: {done.last_words}")
                return BenchFigure("make plan, and what it says to type next", 0, 1, False)
            said = done.out if text == "make plan" else said
        works = ". .venv/bin/activate" in said and place.run("trainfit --version").code == 0
        return BenchFigure("make plan, and what it says to type next", works, 1, False)
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def first_answer(lines: list[str]) -> float | None:
    """Seconds from the start to the line with the first answer; None without one."""
    stamps = [line.split(" ", 1) for line in lines if re.match(r"\d+[.,]\d+ ", line)]
    times = [(float(stamp.replace(",", ".")), text) for stamp, text in stamps]
    answers = [when for when, text in times if _ANSWER.search(text)]
    return answers[0] - times[0][0] if answers else None


def progress(line: str) -> bool:
    """Is this a line that says what is being done?"""
    return not line.strip() or (line.startswith("trainfit: ") and line.endswith(" …"))


def newcomer(torch: str, folder: Path, options: argparse.Namespace) -> Newcomer:
    """A user in ``folder`` whose pip brings this PyTorch."""
    lent = options.lend
    place = CloneFolder(folder, lent, python=options.python)
    if torch != "newest" and lent is None:
        limits = folder / "constraints.txt"
        limits.write_text(f"torch=={torch}.*\n")
        place.run(f"export PIP_CONSTRAINT={limits}")
    return Newcomer(
        torch, Walk(place, exact=False), options.quick, frozenset(options.part or PARTS)
    )


def main() -> int:
    """Print a line for each figure; 0 if every goal holds."""
    made = parser(__doc__, quick="README alone, no busy loops")
    versions = "2.8, newest, …; repeat for several (default: these two)"
    made.add_argument("--torch", action="append", metavar="VERSION", help=versions)
    made.add_argument("--python", default="python3", help="makes the environments")
    packages = "install nothing: the packages of this Python, whose PyTorch --torch names"
    made.add_argument("--lend", type=Path, metavar="PYTHON", help=packages)
    part = "only this: the documented commands, ACT's times, the bad lines; repeat for several"
    made.add_argument("--part", action="append", choices=PARTS, help=part)
    options = made.parse_args()
    figures: list[BenchFigure] = []
    details: dict[str, Any] = {}
    if not options.quick and options.part is None and options.lend is None:
        figures.append(make_plan(options.python))
    for torch in options.torch or ["2.8", "newest"]:
        folder = Path(tempfile.mkdtemp(prefix="newcomer-"))
        try:
            user = newcomer(torch, folder / "user", options)
            figures += user.figures()
            details[torch] = user.details
        finally:
            shutil.rmtree(folder, ignore_errors=True)
    return finish(figures, options.json, details)


if __name__ == "__main__":
    sys.exit(main())
