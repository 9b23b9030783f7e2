"""Every practice, formula, symptom and command of the four articles that this project began with.

Each row of the table names a claim, the trainfit command that answers it, and a check that reads
the verdict out of what the command really answers. Each command runs once, in a scratch folder
with links to this checkout, so that nothing is written here. A row is open if its command fails or
its check finds no figure. `--write docs/seeds.md` makes the page.

What needs a GPU or the robot is answered on the simulated GPU and on recorded machines
(tests/machines); the calls at 30 and 60 Hz on a model of the author's machine, whose clock follows
what the article shows of it (tests/helpers_pace.py), so that it shows the way to the cause and is
no evidence for the figure. The rows on the DataLoader are measured on this machine: quiet cores,
please.

    python bench/seeds.py [--quick] [--json] [--write FILE] [--keep DIR]
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import _seeds_card
import _seeds_conclusions
import _seeds_launch
import _seeds_loading
import _seeds_memory
import _seeds_paced
import _seeds_t4
import _seeds_tuning
from _bench import Figure, finish
from _seeds import Answer, Command, Row, Verdict
from _seeds_commands import COMMANDS, words
from _seeds_page import page
from act import make_dataset

ROOT = Path(__file__).resolve().parents[1]
#: In the order of the articles.
ROWS = (
    *_seeds_launch.ROWS,
    *_seeds_tuning.ROWS,
    *_seeds_paced.ROWS,
    *_seeds_memory.ROWS,
    *_seeds_loading.ROWS,
    *_seeds_card.ROWS,
    *_seeds_t4.ROWS,
    *_seeds_conclusions.ROWS,
)
#: What a command may name by a path relative to the checkout.
LINKS = ("bench", "data", "examples", "tests")
#: What --quick measures for a shorter time, and the workers that each simulated run starts.
SHORTER = {"--probe-time": "5"}
FEWER = {"--num_workers={num_workers:12}": "--num_workers={num_workers:2}"}
LIMIT_S = 900


@dataclass(frozen=True)
class Result:
    """A row with its verdict; ``None`` is open, for ``reason``."""

    row: Row
    verdict: Verdict | None
    reason: str = ""


def main() -> int:
    options = _options()
    make_dataset(ROOT / "data" / "act-example")
    answers, failures, seconds = run_all(options.quick, options.keep)
    results = [judged(row, answers, failures) for row in ROWS]
    if options.write is not None:
        options.write.write_text(page([(each.row, each.verdict) for each in results]), "utf-8")
    if not options.json:
        for each in results:
            said = each.verdict
            text = f"{said.outcome}: {said.text}" if said else f"OPEN: {each.reason}"
            print(f"{each.row.article:<12} {each.row.claim}\n    {text}")
        took = sorted(seconds.items(), key=lambda item: -item[1])
        print("seconds: " + ", ".join(f"{name} {value:.0f}" for name, value in took if value >= 1))
        used = resource.getrusage(resource.RUSAGE_CHILDREN)
        print(f"in all {sum(seconds.values()):.0f}, CPU {used.ru_utime + used.ru_stime:.0f}")
    return finish(figures(results, failures), options.json, _details(results, failures, seconds))


def figures(results: list[Result], failures: Mapping[str, str]) -> list[Figure]:
    """How many rows are answered, named as impossible here, and open."""
    done = [each.verdict.outcome for each in results if each.verdict is not None]
    impossible = done.count("impossible here")
    count = len(results)
    return [
        Figure("seeds_rows_answered", len(done) - impossible, 0.9 * count, False),
        Figure("seeds_rows_impossible", impossible, 0.1 * count, True),
        Figure("seeds_rows_open", count - len(done), 0, True),
        Figure("seeds_commands_failed", len(failures), 0, True),
    ]


def judged(row: Row, answers: Mapping[str, Answer], failures: Mapping[str, str]) -> Result:
    """The row's verdict, by its check on what its commands answered."""
    missing = [name for name in row.commands if name not in answers]
    if missing:
        return Result(row, None, f"{missing[0]}: {failures.get(missing[0], 'was not run')}")
    try:
        verdict = row.check(*(answers[name] for name in row.commands))
    except Exception as error:  # the answer lacks what the check needs: that is the finding
        return Result(row, None, f"{row.check.__name__}: {type(error).__name__}: {error}")
    return Result(row, verdict, "" if verdict is not None else "the check gives no verdict")


def run_all(
    quick: bool, keep: Path | None
) -> tuple[dict[str, Answer], dict[str, str], dict[str, float]]:
    """What the commands answered, why others did not, and how long each took."""
    answers: dict[str, Answer] = {}
    failures: dict[str, str] = {}
    seconds: dict[str, float] = {}
    with tempfile.TemporaryDirectory() as scratch:
        folder = keep or Path(scratch)
        prepare(folder)
        for command in COMMANDS.values():
            kept = folder / f"{command.name}.answer.json"
            if kept.exists():
                answers[command.name] = json.loads(kept.read_text("utf-8"))
                continue
            print(f"{command.name}: {command.line}", file=sys.stderr, flush=True)
            began = time.monotonic()
            code, text, error = run(command, folder, quick)
            seconds[command.name] = time.monotonic() - began
            if code not in command.exits:
                failures[command.name] = f"exit code {code}: {error[-300:].strip()}"
                continue
            answers[command.name] = json.loads(text)
            if keep is not None:
                kept.write_text(text, "utf-8")
    return answers, failures, seconds


def prepare(folder: Path) -> None:
    """Links to the checkout, and what `trainfit pace` gave on the model of the author's machine."""
    folder.mkdir(parents=True, exist_ok=True)
    for name in LINKS:
        link = folder / name
        if not link.is_symlink():
            link.symlink_to(ROOT / name)
    result = folder / "pace-article.json"
    if not result.exists():
        code = (
            "import sys; from pathlib import Path; from helpers_pace import *;"
            "found = measured(FREQUENCY, ACT, 0, hz=(30.0, 60.0), fix='governor');"
            "found.save(Path(sys.argv[1]))"
        )
        subprocess.run([sys.executable, "-c", code, str(result)], check=True, env=environment())


def typed(command: Command, quick: bool) -> list[str]:
    """The words after ``trainfit``, for an answer in JSON."""
    verb, *rest = words(command)
    if quick:
        for name, value in SHORTER.items():
            if name in rest:
                rest[rest.index(name) + 1] = value
        rest = [FEWER.get(word, word) for word in rest]
    return [verb, "--json", *rest]


def run(command: Command, folder: Path, quick: bool) -> tuple[int, str, str]:
    """Exit code and what it printed, asked for as JSON."""
    done = subprocess.run(
        [sys.executable, "-m", "trainfit", *typed(command, quick)],
        cwd=folder,
        env=environment(),
        capture_output=True,
        text=True,
        timeout=LIMIT_S,
    )
    return done.returncode, done.stdout, done.stderr


def environment() -> dict[str, str]:
    """This process's, with this checkout importable and without settings that change results."""
    kept = {k: v for k, v in os.environ.items() if not k.startswith(("PYTORCH_", "CUDA_"))}
    path = os.pathsep.join(map(str, (ROOT / "src", ROOT / "tests")))
    programs = os.pathsep.join((str(Path(sys.executable).parent), kept.get("PATH", "")))
    return {**kept, "PYTHONPATH": path, "PATH": programs}


def _details(
    results: list[Result], failures: Mapping[str, str], seconds: Mapping[str, float]
) -> dict[str, Any]:
    rows = [
        {
            "article": each.row.article,
            "kind": each.row.kind,
            "claim": each.row.claim,
            "commands": each.row.commands,
            "outcome": each.verdict.outcome if each.verdict else "open",
            "verdict": each.verdict.text if each.verdict else each.reason,
        }
        for each in results
    ]
    return {"rows": rows, "failures": failures, "seconds": seconds}


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--quick", action="store_true", help="shorter, with fewer workers")
    parser.add_argument("--json", action="store_true", help="one JSON document on stdout")
    parser.add_argument("--write", type=Path, metavar="FILE", help="make the page")
    parser.add_argument(
        "--keep",
        type=Path,
        metavar="DIR",
        help="keep what commands answer in DIR, and take what is there already",
    )
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
