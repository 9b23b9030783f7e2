"""Do the commands of docs/seeds.md still answer?

The page has the claims of four articles with verdicts, and the commands that answer them. Each
command is run as it stands there, in the page's order (some read what others wrote); it has
answered if it ends with 0 or 1 and prints a JSON document. The verdicts themselves were read out of
these answers at commit 959106b7, which has the code for it (bench/_seeds_*.py).

    python bench/seeds.py [--quick] [--only NAME ...] [--json]
"""

from __future__ import annotations

import json
import os
import re
import shlex
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Final

from _bench import ROOT, BenchFigure, finish, leave, parser, say, table
from act import DATASET, make_dataset

PAGE: Final = ROOT / "docs" / "seeds.md"
#: What a command may name by a path relative to the checkout.
LINKS: Final = ("bench", "data", "examples", "tests")
#: Verbs that take seconds: recorded machines and the catalogue.
QUICK: Final = ("doctor", "gpus", "show")
#: The file that a command writes, which others read.
OUTPUT: Final = re.compile(r"--output[= ](\S+)")
LIMIT_S: Final = 900


def main(argv: Sequence[str] | None = None) -> int:
    made = parser(__doc__, quick=f"only {', '.join(QUICK)}")
    made.add_argument("--only", nargs="+", metavar="NAME", default=[], help="commands by name")
    options = made.parse_args(argv)
    there = commands(PAGE.read_text("utf-8"))
    if unknown := set(options.only) - set(there):
        leave(f"--only {', '.join(sorted(unknown))}: not on {PAGE.name}")
    named = {name: there[name] for name in options.only or there}
    if options.quick:
        written = {name for line in there.values() for name in OUTPUT.findall(line)}
        named = {
            name: line
            for name, line in named.items()
            if verb(line) in QUICK and not written.intersection(shlex.split(line))
        }
    if any("data/act-example" in line for line in named.values()):
        make_dataset(DATASET)
    rows = list(answers(named))
    failed = [name for name, why, _ in rows if why]
    details = {"failed": {name: why for name, why, _ in rows if why}}
    figures = [BenchFigure(f"of {len(rows)} commands without an answer", len(failed), 0, True)]
    return finish(figures, options.json, details, [table(("command", "failed", "seconds"), rows)])


def rows_of(page: str) -> Iterator[tuple[str, str, tuple[str, ...], str]]:
    """Kind, claim, commands and verdict of each row of the articles' tables."""
    for line in page.splitlines():
        cells = [part.strip() for part in line.replace("\\|", "\0").strip("|").split("|")]
        if line.startswith(("| practice", "| formula", "| symptom", "| command")):
            kind, claim, named, verdict = (cell.replace("\0", "|") for cell in cells)
            yield kind, claim, tuple(part.strip("`") for part in named.split(", ")), verdict


def commands(page: str) -> dict[str, str]:
    """By name the lines of the page's last block, in their order."""
    block = page.rsplit("```", 2)[1].splitlines()
    names = [line[2:] for line in block if line.startswith("# ")]
    return dict(zip(names, (line for line in block if line.startswith("trainfit ")), strict=True))


def verb(line: str) -> str:
    return shlex.split(line)[1]


def answers(named: dict[str, str]) -> Iterator[tuple[str, str, float]]:
    """Name, why there is no answer (empty: there is), and seconds."""
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        prepare(folder, article="pace-article" in named)
        for name, line in named.items():
            say(f"{name}: {line}")
            began = time.monotonic()
            yield name, run(line, folder), time.monotonic() - began


def prepare(folder: Path, *, article: bool) -> None:
    """Links to the checkout, and what `trainfit pace` gave on the model of the author's machine."""
    for name in LINKS:
        (folder / name).symlink_to(ROOT / name)
    if article:
        code = (
            "import sys; from pathlib import Path; from helpers_pace import *;"
            "found = measured(FREQUENCY, ACT, 0, hz=(30.0, 60.0), fix='governor');"
            "found.save(Path(sys.argv[1]))"
        )
        words = [sys.executable, "-c", code, str(folder / "pace-article.json")]
        subprocess.run(words, check=True, env=environment())


def run(line: str, folder: Path) -> str:
    """Why it gave no answer; empty if it did."""
    called, *rest = shlex.split(line)[1:]
    words = [sys.executable, "-m", "trainfit", called, "--json", *rest]
    try:
        done = subprocess.run(
            words, cwd=folder, env=environment(), capture_output=True, text=True, timeout=LIMIT_S
        )
        document: Any = json.loads(done.stdout)
    except subprocess.TimeoutExpired:
        return f"no answer in {LIMIT_S} s"
    except ValueError:
        return f"no JSON: {done.stderr[-200:].strip()}"
    fine = done.returncode in (0, 1) and isinstance(document, dict)
    return "" if fine else f"exit code {done.returncode}: {done.stderr[-200:].strip()}"


def environment() -> dict[str, str]:
    """This process's, with this checkout importable and without settings that change results."""
    kept = {k: v for k, v in os.environ.items() if not k.startswith(("PYTORCH_", "CUDA_"))}
    path = os.pathsep.join(map(str, (ROOT / "src", ROOT / "tests")))
    programs = os.pathsep.join((str(Path(sys.executable).parent), kept.get("PATH", "")))
    return {**kept, "PYTHONPATH": path, "PATH": programs}


if __name__ == "__main__":
    sys.exit(main())
