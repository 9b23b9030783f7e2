"""What every bench shares: options, child runs, tables, figures with goals, exit status.

    options = parser(__doc__, quick="what is left out").parse_args()
    return finish([Figure("NAME", value, goal, at_most=True, unit="%")], options.json, details)

The last lines of a bench are ``NAME: FIGURE (goal GOAL) holds``, or ``short``; the line before them
says on which machine and by which versions. Exit status: 0 every goal holds, 1 one does not, 2 bad
input (one line, by :func:`leave`), 3 what the bench needs is not here.

Who imports it gets the trainfit of this checkout, whatever is installed, and the tests' helpers.
"""

from __future__ import annotations

import argparse
import contextlib
import datetime
import importlib.util
import json
import os
import platform
import subprocess
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from importlib import metadata
from pathlib import Path
from typing import Any, Final, NoReturn

ROOT: Final = Path(__file__).resolve().parents[1]
SOURCE: Final = str(ROOT / "src")
ABSENT: Final = 3
GIB: Final = 1 << 30

if SOURCE not in sys.path:
    sys.path.insert(0, SOURCE)
sys.path.append(str(ROOT / "tests"))


@dataclass(frozen=True)
class BenchFigure:
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


def parser(
    about: str | None, *, quick: str = "the same: it takes seconds", data: str = ""
) -> argparse.ArgumentParser:
    """With ``--quick`` and ``--json``, and a required ``--data`` where ``data`` says of what."""
    made = argparse.ArgumentParser(
        description=about, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    if data:
        made.add_argument("--data", "--truth", type=Path, required=True, help=data)
    made.add_argument("--quick", action="store_true", help=quick)
    made.add_argument("--json", action="store_true", help="one JSON document on stdout")
    return made


def quick_options(about: str | None) -> argparse.Namespace:
    """``--quick`` and ``--json`` of a script that takes seconds anyway."""
    return parser(about).parse_args()


def leave(why: object, status: int = 2) -> NoReturn:
    """End with one line on stderr that names the bench and the reason."""
    print(f"bench/{Path(sys.argv[0]).name}: {why}", file=sys.stderr)
    raise SystemExit(status)


def needs(*packages: str) -> None:
    """End with status 3 and one line where a package is not installed."""
    for package in packages:
        if importlib.util.find_spec(package) is None:
            leave(f"{package} is not installed: pip install {package}", ABSENT)


def trainfit(
    *words: str, env: Mapping[str, str] | None = None, **how: Any
) -> subprocess.CompletedProcess[str]:
    """The command in a process of its own, with its standard output; ``how``: of
    ``subprocess.run``."""
    path = os.pathsep.join(filter(None, (SOURCE, os.environ.get("PYTHONPATH"))))
    return subprocess.run(
        [sys.executable, "-m", "trainfit", *words],
        env={**os.environ, "PYTHONPATH": path, **(env or {})},
        **{"stdout": subprocess.PIPE, "text": True, **how},
    )


def answer(verb: str, *words: str) -> dict[str, Any]:
    """The command's JSON document; raises ``CalledProcessError`` where it fails."""
    document: dict[str, Any] = json.loads(trainfit(verb, "--json", *words, check=True).stdout)
    return document


@contextlib.contextmanager
def busy(count: int) -> Iterator[None]:
    """So many processes that do nothing but keep a core busy, as long as the block runs."""
    loops = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(count)]
    try:
        yield
    finally:
        for loop in loops:
            loop.kill()
            loop.wait()


def say(text: str) -> None:
    """What is going on, on stderr: stdout has the results alone."""
    print(text, file=sys.stderr, flush=True)


def table(heads: Sequence[str], rows: Iterable[Sequence[object]]) -> str:
    """Columns under their heads: the first to the left, the others to the right.

    Floats have four digits, what is ``None`` stays empty.
    """
    cells = [list(heads), *([_cell(each) for each in row] for row in rows)]
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    return "\n".join(
        "  ".join(
            cell.rjust(width) if index else cell.ljust(width)
            for index, (cell, width) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in cells
    )


def _cell(value: object) -> str:
    if value is None:
        return ""
    return f"{value:.4g}" if isinstance(value, float) else str(value)


def machine() -> str:
    """The day, the processor, its load, and the versions, in one line."""
    model = next(
        (line.split(":")[1].strip() for line in _lines("/proc/cpuinfo") if "model name" in line),
        platform.machine(),
    )
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    torch = metadata.version("torch") if importlib.util.find_spec("torch") else "none"
    return (
        f"{datetime.date.today()}: {cores} cores of {model}, load {os.getloadavg()[0]:.1f}; "
        f"Python {platform.python_version()}, PyTorch {torch}"
    )


def _lines(path: str) -> list[str]:
    try:
        return Path(path).read_text(errors="replace").splitlines()
    except OSError:
        return []


def finish(
    figures: Sequence[BenchFigure],
    as_json: bool,
    details: dict[str, Any] | None = None,
    tables: Iterable[str] = (),
) -> int:
    """Print tables, the machine and a line for each figure, or one JSON document with figures and
    details; 0 if every goal holds, else 1."""
    if as_json:
        rows = [{**asdict(figure), "holds": figure.holds} for figure in figures]
        document = {"machine": machine(), "figures": rows, "details": details or {}}
        print(json.dumps(document, indent=2, default=str))
    else:
        for each in tables:
            print(each, end="\n\n")
        print(machine())
        for figure in figures:
            print(figure.line)
    return 0 if all(figure.holds for figure in figures) else 1
