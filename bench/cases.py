"""Is trainfit right about scripts with a known fault, and silent about the same without it?

The scripts of bench/case_scripts (or of ``--cases FOLDER``) by the commands of its ``cases.toml``:
what three steps of a training do not show, what a launch line may not change, failures, what
spoils the learning, and what a live run's time goes to. Each is run twice, as it is and with its
fault fixed, in a folder of its own.

    cases_right           of the faulty scripts, those of which the right thing was said
    cases_false_alarms    fixed scripts of which something was said that is not so

    python bench/cases.py [--quick] [--only NAME …] [--cases FOLDER] [--jobs 1] [--busy 2] [--json]

Timings decide some answers of `watch`: run those one at a time on an otherwise idle machine, and
with ``--busy 2``.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, Final

from _bench import BenchFigure, busy, finish, leave, parser, say
from _case_table import NEUTRAL, Answer, FaultCase, TableError, alarms, faults, load

FOLDER: Final = Path(__file__).with_name("case_scripts")
#: Of each section, the cases that --quick runs; seconds that one run may last.
QUICK: Final = 2
LONGEST_S: Final = 300.0
GOAL: Final = 100.0
#: Where findings stand in a result file.
_OF_FINDINGS: Final = ("findings", "faults", "fault")


def main(argv: Sequence[str] | None = None) -> int:
    made = parser(__doc__, quick=f"{QUICK} cases of each section")
    made.add_argument("--only", nargs="+", metavar="NAME", help="only these cases")
    made.add_argument("--cases", type=Path, default=FOLDER, help="a folder with a cases.toml")
    made.add_argument("--jobs", type=int, default=1, help="cases at a time (default 1)")
    made.add_argument("--busy", type=int, default=0, help="busy loops alongside (default 0)")
    options = made.parse_args(argv)
    try:
        cases = chosen(load(options.cases), options.only, quick=options.quick)
        with busy(options.busy), ThreadPoolExecutor(options.jobs) as pool:
            rows = list(pool.map(lambda case: judged(case, options.cases), cases))
    except TableError as error:
        leave(error)
    return finish(figures(rows), options.json, {"cases": rows, "busy": options.busy})


def chosen(cases: list[FaultCase], only: Sequence[str] | None, *, quick: bool) -> list[FaultCase]:
    """Those asked for; raises :class:`TableError` for a name that is none of them."""
    unknown = set(only or ()) - {case.name for case in cases}
    if unknown:
        names = ", ".join(case.name for case in cases)
        raise TableError(f"no case {', '.join(sorted(unknown))}; there are {names}")
    picked = [case for case in cases if only is None or case.name in only]
    if not quick:
        return picked
    seen: dict[int, int] = {}
    return [case for case in picked if _counted(seen, case.section) <= QUICK]


def _counted(seen: dict[int, int], section: int) -> int:
    seen[section] = seen.get(section, 0) + 1
    return seen[section]


def judged(case: FaultCase, folder: Path) -> dict[str, Any]:
    """Both runs of a case, with what was wrong with what was said."""
    began = time.monotonic()
    text = (folder / case.file).read_text(encoding="utf-8")
    row: dict[str, Any] = {"name": case.name, "section": case.section, "command": case.command}
    answer = asked(case, folder, text)
    row |= {"wrong": faults(case, answer), "screen": answer.screen, "alarms": None}
    if case.has_counterpart:
        fixed = asked(case, folder, case.fixed_script(text))
        row |= {"alarms": alarms(case, fixed), "fixed_screen": fixed.screen}
    row["seconds"] = time.monotonic() - began
    say(f"{case.name:<20}{'; '.join(row['wrong']) or 'right'}")
    if row["alarms"]:
        say(f"{'':<20}fixed: {'; '.join(row['alarms'])}")
    return row


def asked(case: FaultCase, folder: Path, text: str) -> Answer:
    """What trainfit says of the script with this text, in a copy of the folder, under a name that
    tells nothing."""
    with tempfile.TemporaryDirectory(prefix="trainfit-cases-") as scratch:
        place = Path(scratch) / "scripts"
        shutil.copytree(folder, place, ignore=shutil.ignore_patterns("__pycache__", "cases.toml"))
        (place / NEUTRAL).write_text(text, encoding="utf-8")
        out = Path(scratch) / "result.json"
        line = case.command.replace("{script}", NEUTRAL).replace("{out}", str(out))
        path = os.pathsep.join((str(Path(sys.executable).parent), os.environ.get("PATH", "")))
        state = {"XDG_STATE_HOME": scratch, "COLUMNS": "100", "PATH": path}
        screen, status = _run(line, place, {**os.environ, **state})
        return Answer(screen, findings_of(out), status)


def _run(line: str, place: Path, environment: dict[str, str]) -> tuple[str, int]:
    """What a command line prints (on stderr, where it prints nothing else), and its exit
    status."""
    process = subprocess.Popen(
        ["bash", "-c", line], cwd=place, env=environment, text=True, start_new_session=True,
        stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
    )  # fmt: skip
    try:
        screen, errors = process.communicate(timeout=LONGEST_S)
    except subprocess.TimeoutExpired:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, 9)
        screen, errors = process.communicate()
    return screen or errors, process.returncode


def findings_of(path: Path) -> tuple[tuple[str, str], ...]:
    """Kind and severity of each finding of a result file; none where there is no file."""
    if not path.is_file():
        return ()
    return tuple(_findings(json.loads(path.read_text(encoding="utf-8"))))


def _findings(value: Any) -> Iterator[tuple[str, str]]:
    if isinstance(value, dict):
        for key, each in value.items():
            if key in _OF_FINDINGS:
                rows = each if isinstance(each, list) else [each]
                yield from ((row["kind"], row["severity"]) for row in rows if row is not None)
            else:
                yield from _findings(each)
    elif isinstance(value, list):
        for each in value:
            yield from _findings(each)


def figures(rows: Sequence[dict[str, Any]]) -> list[BenchFigure]:
    """All cases, each section, and the false alarms."""
    sections = sorted({row["section"] for row in rows})
    made = [_share(f"cases_section_{n}", [r for r in rows if r["section"] == n]) for n in sections]
    false = sum(bool(row["alarms"]) for row in rows)
    return [
        *made,
        _share("cases_right", rows),
        BenchFigure("cases_false_alarms", false, 0, True),
    ]


def _share(name: str, rows: Sequence[dict[str, Any]]) -> BenchFigure:
    right = sum(not row["wrong"] for row in rows)
    return BenchFigure(name, 100 * right / len(rows) if rows else float("nan"), GOAL, False, "%")


if __name__ == "__main__":
    sys.exit(main())
