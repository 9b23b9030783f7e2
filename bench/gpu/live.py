"""Is trainfit right on a GPU? Short trainings, with planted faults and healthy, in little time.

    python bench/gpu/live.py --out DIR              # on the machine: ends by itself after 82 s
    python bench/gpu/live.py --out DIR --judge      # anywhere: its recorded runs, judged again

The scripts and what is to be said of each are in ``live_scripts`` (``cases.toml``). They run side
by side as the sections of that table say, so that none disturbs what another one measures; what
the time does not suffice for is listed as not run. Each case leaves its screen (``NAME.out``), its
result (``NAME.json``), its exit code and times (``NAME.run.json``) and, of `watch`, what was
recorded (``runs/NAME``), which any later version can judge.

    live_right           of the faulty scripts, those of which the right thing was said
    live_false_alarms    healthy scripts of which something was said that is not so
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final

HERE: Final = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parent))

from _bench import ROOT, BenchFigure, finish, leave, parser, say  # noqa: E402
from _case_table import NEUTRAL, Answer, FaultCase, TableError, alarms, faults, load  # noqa: E402
from cases import findings_of  # noqa: E402

SCRIPTS: Final = HERE / "live_scripts"
#: Seconds in which all has to be over, and which one case may take.
SECONDS: Final = 82.0
LONGEST_S: Final = 40.0
#: No case begins with less than that left.
LEAST_S: Final = 5.0
#: Sections that begin later, after so much of the time: GPUs that others keep busy would disturb
#: what is measured of launches.
LATER: Final[Mapping[int, float]] = {4: 0.44}
#: A recorded file above that stays where it was made.
LARGEST_BYTES: Final = 4 << 20
#: Between a request to end and the end.
GRACE_S: Final = 3.0


@dataclasses.dataclass(frozen=True)
class TimeBudget:
    """Until when (``time.monotonic()``), for how long, and where the results go."""

    began: float
    seconds: float
    out: Path

    @property
    def left(self) -> float:
        return self.began + self.seconds - time.monotonic()


def main(argv: Sequence[str] | None = None) -> int:
    made = parser(__doc__, quick="the same: --only and --seconds shorten it")
    made.add_argument("--out", type=Path, required=True, help="a folder for the results")
    made.add_argument("--judge", action="store_true", help="judge what is there, run nothing")
    made.add_argument("--seconds", type=float, default=SECONDS, help="for all of them together")
    made.add_argument("--only", nargs="+", metavar="NAME", help="only these cases")
    options = made.parse_args(argv)
    out = options.out.resolve()
    try:
        cases = [e for e in load(SCRIPTS) if options.only is None or e.name in options.only]
    except TableError as error:
        leave(error)
    if not options.judge:
        run(cases, out, options.seconds)
    rows = [row for case in cases if (row := judged(case, out, again=options.judge)) is not None]
    absent = [case.name for case in cases if not (out / f"{case.name}.run.json").is_file()]
    if absent:
        say(f"not run: {', '.join(absent)}")
    return finish(figures(rows), options.json, {"cases": rows, "not_run": absent})


def run(cases: Sequence[FaultCase], out: Path, seconds: float) -> None:
    """Each section in turn, the sections side by side."""
    (out / "runs").mkdir(parents=True, exist_ok=True)
    plan = TimeBudget(time.monotonic(), seconds, out)
    with tempfile.TemporaryDirectory(prefix="trainfit-live-") as scratch:
        lanes = [
            threading.Thread(target=_lane, args=(section, cases, plan, Path(scratch)))
            for section in sorted({case.section for case in cases})
        ]
        for lane in lanes:
            lane.start()
        for lane in lanes:
            lane.join()
    for path in (out / "runs").rglob("*"):
        if path.is_file() and path.stat().st_size > LARGEST_BYTES:
            path.unlink()


def _lane(section: int, cases: Sequence[FaultCase], plan: TimeBudget, scratch: Path) -> None:
    time.sleep(max(0.0, min(plan.left, LATER.get(section, 0.0) * plan.seconds)))
    for case in cases:
        if case.section == section and plan.left >= LEAST_S:
            _run_case(case, plan, scratch / case.name)


def _run_case(case: FaultCase, plan: TimeBudget, place: Path) -> None:
    """In a folder of its own, under a name that tells nothing."""
    place.mkdir()
    shutil.copy(SCRIPTS / case.file, place / NEUTRAL)
    line = command_line(case, plan.out)
    began = time.monotonic()
    with open(plan.out / f"{case.name}.out", "wb") as screen:
        process = subprocess.Popen(
            ["bash", "-c", line], cwd=place, env=environment(place), start_new_session=True,
            stdin=subprocess.DEVNULL, stdout=screen, stderr=subprocess.STDOUT,
        )  # fmt: skip
        in_time = _ended(process, min(LONGEST_S, plan.left))
    document = {
        "command": line,
        "status": process.returncode,
        "in_time": in_time,
        "began_s": began - plan.began,
        "seconds": time.monotonic() - began,
    }
    (plan.out / f"{case.name}.run.json").write_text(json.dumps(document), encoding="utf-8")


def _ended(process: subprocess.Popen[bytes], seconds: float) -> bool:
    """Wait for its end, and make it end: is it over in time?"""
    for number, patience in ((0, seconds), (signal.SIGTERM, GRACE_S), (signal.SIGKILL, GRACE_S)):
        if number:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, number)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(patience)
            return number == 0
    return False


def command_line(case: FaultCase, out: Path) -> str:
    """What bash gets; trainfit by this Python, as a machine that is lent has no command of it."""
    words = {
        "{trainfit}": f"{sys.executable} -m trainfit",
        "{python}": sys.executable,
        "{script}": NEUTRAL,
        "{out}": str(out / f"{case.name}.json"),
        "{folder}": str(out / "runs" / case.name),
        "{results}": str(out),
    }
    line = case.command
    for word, value in words.items():
        line = line.replace(word, value)
    return line


def environment(place: Path) -> dict[str, str]:
    """This process', with this checkout's package and folders of its own for what is kept."""
    path = os.pathsep.join(filter(None, (str(ROOT / "src"), os.environ.get("PYTHONPATH"))))
    kept = {name: str(place / "state") for name in ("XDG_STATE_HOME", "XDG_CACHE_HOME")}
    return {**os.environ, "PYTHONPATH": path, "COLUMNS": "100", **kept}


def judged(case: FaultCase, out: Path, *, again: bool = False) -> dict[str, Any] | None:
    """What was wrong with what was said of a case; ``None``: it was not run."""
    path = out / f"{case.name}.run.json"
    if not path.is_file():
        return None
    done = json.loads(path.read_text(encoding="utf-8"))
    screen = (out / f"{case.name}.out").read_text(encoding="utf-8", errors="replace")
    result = out / f"{case.name}.json"
    if again and (folder := out / "runs" / case.name).is_dir():
        screen = _read_again(folder, result)
    # The script's own lines come before ours.
    answer = Answer(_report_of(screen), findings_of(result), done["status"])
    wrong = alarms(case, answer) if is_healthy(case) else faults(case, answer)
    return {
        "name": case.name,
        "healthy": is_healthy(case),
        "wrong": wrong if done["in_time"] else ["it was stopped"],
        "first": answer.first[:200],
        "findings": answer.findings,
        **{key: done[key] for key in ("began_s", "seconds", "status")},
    }


def is_healthy(case: FaultCase) -> bool:
    return not (case.first or case.screen or case.kinds)


def _read_again(folder: Path, result: Path) -> str:
    line = [sys.executable, "-m", "trainfit", "watch", "--explain", "--output", str(result)]
    done = subprocess.run(
        [*line, "--read", str(folder)], capture_output=True, text=True, check=False,
        env=environment(folder.parent),
    )  # fmt: skip
    return done.stdout or done.stderr


def _report_of(screen: str) -> str:
    """From the first line of `watch`'s report on; all of it, of other verbs."""
    lines = screen.splitlines()
    starts = [n for n, line in enumerate(lines) if line.startswith("trainfit: ")]
    return "\n".join(lines[starts[-1] + 1 :] if starts else lines) or screen


def figures(rows: Sequence[Mapping[str, Any]]) -> list[BenchFigure]:
    """Also prints a line of each case."""
    for row in rows:
        kinds = ", ".join(kind for kind, _ in row["findings"]) or "no finding"
        say(f"{row['name']:<22}{'; '.join(row['wrong']) or 'right'}  [{kinds}]")
    faulty = [row for row in rows if not row["healthy"]]
    right = sum(not row["wrong"] for row in faulty)
    false = sum(bool(row["wrong"]) for row in rows if row["healthy"])
    share = 100 * right / len(faulty) if faulty else float("nan")
    return [
        BenchFigure("live_right", share, 100.0, False, "%"),
        BenchFigure("live_false_alarms", false, 0, True),
    ]


if __name__ == "__main__":
    sys.exit(main())
