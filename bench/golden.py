"""What trainfit prints and saves, compared with what it printed and saved before: ``make golden``.

For changes of the code's form that must change no answer. Each case is a command line, run in a
process of its own in a folder with the inputs (tests/):

- every result file and recorded machine of the tests: its screen at 80 and 120 columns,
  ``--explain``, ``--json``, and its page as Markdown;
- every watched run of the tests, judged again: the same;
- scripts of the tests and the ACT example on simulated GPUs: the recording (a digest of every
  column), its memory and its JSON; and their plans without the DataLoader.

``--write`` stores what comes out, and runs each case twice: a line (of a document: a value) that
differs between the two runs is a time or a name of the moment, and is not compared. Without it the
lines that changed are printed, and the exit code is 1 if there are any. ``--quick`` leaves the
simulated scripts out. The PyTorch that the store was made with is named in it: another one
simulates other operators.
"""

from __future__ import annotations

import argparse
import contextlib
import difflib
import hashlib
import io
import json
import lzma
import multiprocessing
import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from importlib.metadata import version
from pathlib import Path
from typing import Any, Final

from _bench import BenchFigure, finish, parser

ROOT: Final = Path(__file__).resolve().parents[1]
STORE: Final = ROOT / "bench" / "golden.json.xz"
RESULTS: Final = ROOT / "tests" / "fixtures" / "results"
#: Stands for a line that differs from run to run.
MASK: Final = "~"
GPU: Final = "RTX 4090"
#: Options of scripts that need some, or are asked for more than their defaults.
SCRIPTS: Final = {
    "act": "act/train.py --dataset=data --batch_size={batch_size:8} --amp={amp:true}",
    "act with worker processes": "act/train.py --dataset=data --batch_size=8 --num_workers=2",
    "train, AMP": "scripts/train.py --batch_size={batch_size:8} --amp=true",
    **{
        name: f"scripts/{name}.py"
        for name in (
            *("accumulating", "branching", "contrastive", "gan", "generating", "infer", "mixed"),
            *("own_batches", "plain", "rebuilt", "remedies", "replaced", "semantics"),
            *("tiny", "train", "variable", "widths"),
        )
    },
}
PLANNED: Final = ("act", "accumulating", "gan", "infer", "mixed", "plain", "remedies", "tiny")
_SECONDS: Final = 900
#: Exit code and standard output.
Printed = tuple[int, str]


@dataclass(frozen=True)
class GoldenCase:
    """Command lines of trainfit that are run one after the other, and the files that they leave."""

    name: str
    lines: tuple[tuple[str, ...], ...]
    #: A recording that is digested at the end.
    recording: str | None = None
    live: bool = False
    columns: int = 80


@dataclass
class GoldenFolder:
    """A folder with the inputs, and the trainfit that is asked."""

    folder: Path
    python: str
    details: dict[str, Any] = field(default_factory=dict)

    def prepare(self, chosen: Sequence[GoldenCase]) -> None:
        """Copy the inputs; ACT's data are made for those that run scripts."""
        for target, source in (
            ("results", RESULTS),
            ("watched", ROOT / "tests" / "fixtures" / "watched_runs"),
            ("machines", ROOT / "tests" / "machines"),
            ("scripts", ROOT / "tests" / "training_scripts"),
            ("act", ROOT / "examples" / "act"),
        ):
            shutil.copytree(source, self.folder / target)
        if any(case.live for case in chosen):
            make = [self.python, "act/make_dataset.py", "--out", "data"]
            subprocess.run(make, cwd=self.folder, check=True, capture_output=True)

    def output(self, case: GoldenCase) -> list[str]:
        """What a case prints and saves, line by line, without what names this place."""
        lines: list[str] = []
        work = Path(tempfile.mkdtemp(prefix="case-", dir=self.folder))
        for link in ("results", "watched", "machines", "scripts", "act", "data"):
            (work / link).symlink_to(self.folder / link)
        variables = {
            "COLUMNS": str(case.columns),
            "TRAINFIT_STATE": str(work),
            # `python` of the commands is the one that is asked.
            "PATH": f"{Path(self.python).parent}{os.pathsep}{os.environ['PATH']}",
        }
        for words in case.lines:
            ask = self._fresh if case.live else _here
            code, text = ask(words, work, variables)
            lines += [f"$ trainfit {' '.join(words)}", f"exit code {code}"]
            lines += document(text) or text.splitlines()
        if case.recording is not None:
            saved = work / case.recording
            lines += list(digests(saved, str(self.folder))) if saved.is_file() else ["no recording"]
        shutil.rmtree(work)
        own = re.escape(str(self.folder))
        return [re.sub(rf"{own}(/case-\w+)?", "FOLDER", line) for line in lines]

    def outputs(self, chosen: list[GoldenCase], jobs: int) -> dict[str, list[str]]:
        """The output of each case by its name."""
        # A fork of a process that has trainfit imported: a tenth of the time of a fresh one.
        with multiprocessing.get_context("fork").Pool(jobs, maxtasksperchild=1) as pool:
            names = (case.name for case in chosen)
            found = dict(zip(names, pool.imap(self.output, chosen), strict=True))
            # They end by themselves: one with the caller's handler of SIGTERM outlives that.
            pool.close()
            pool.join()
            return found

    def _fresh(self, words: Sequence[str], work: Path, variables: dict[str, str]) -> Printed:
        ended = subprocess.run(
            [self.python, "-m", "trainfit", *words],
            cwd=work,
            env=os.environ | variables,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=_SECONDS,
        )
        return ended.returncode, ended.stdout


def _here(words: Sequence[str], work: Path, variables: dict[str, str]) -> Printed:
    from trainfit.cli.main import main as trainfit

    os.environ.update(variables)
    text = io.StringIO()
    with (
        contextlib.chdir(work),
        contextlib.redirect_stdout(text),
        contextlib.redirect_stderr(io.StringIO()),
    ):
        code = trainfit(words)
    return code, text.getvalue()


def cases(quick: bool) -> Iterator[GoldenCase]:
    """All that is compared."""
    results = [*RESULTS.glob("*.json"), *RESULTS.glob("*.trainfit")]
    shown = [f"results/{path.name}" for path in sorted(results)]
    watched = [f"watched/{path.name}" for path in sorted(RESULTS.parent.glob("watched_runs/*/"))]
    for file in [*shown, *watched]:
        yield from _renderings(
            file, ("watch", "--read", file) if file in watched else ("show", file)
        )
        yield GoldenCase(f"{file}, Markdown", (("report", file, "-o", "-"),))
    for path in sorted((ROOT / "tests" / "machines").glob("*.json")):
        machine = f"machines/{path.name}"
        yield from _renderings(machine, ("doctor", "--machine", machine))
        yield from _renderings(f"{machine}, CPU", ("doctor", "--cpu", "--machine", machine))
    yield from _renderings("GPUs", ("gpus",))
    plan, recording = "results/plan-v1.json", "results/recording-v1.trainfit"
    yield from _renderings("GPUs of a plan", ("gpus", "--for", plan))
    yield from _renderings("memory", ("memory", recording))
    yield from _renderings("memory by hand", ("memory", recording, "--by-hand"))
    noise = ("--noise-scale", "200:150:280", "--batch-size", "64", "--to", "16")
    yield from _renderings("batch", ("batch", "explain", *noise))
    for name, text in () if quick else SCRIPTS.items():
        command = ("--", "python", *text.split())
        bare = ("--", "python", *re.sub(r"\{\w+:(\w+)\}", r"\1", text).split())
        trace = ("simulate", "--gpu", GPU, "--output", "run.trainfit", "--json", *bare)
        again = [("memory", "run.trainfit", more) for more in ("--explain", "--json")]
        yield GoldenCase(f"simulated: {name}", (trace, *again), "run.trainfit", live=True)
        if name in PLANNED:
            save = ("--no-loader", "--thorough", "--json", "--output", "plan.json")
            parts = (("plan", "--gpu", GPU, *save, *command), ("show", "plan.json", "--explain"))
            yield GoldenCase(f"planned: {name}", parts, live=True)


def _renderings(name: str, words: tuple[str, ...]) -> Iterator[GoldenCase]:
    for columns in (80, 120):
        yield GoldenCase(f"{name}, {columns} columns", (words,), columns=columns)
    yield GoldenCase(f"{name}, --explain", ((*words, "--explain"),))
    yield GoldenCase(f"{name}, --json", ((*words, "--json"),))


def document(text: str) -> list[str]:
    """A JSON document as a line for each value, with the path to it; empty if it is none."""
    try:
        parsed = json.loads(text)
    except ValueError:
        return []
    return [f"{path} = {json.dumps(value)}" for path, value in _leaves(parsed, "")]


def _leaves(value: Any, path: str) -> Iterator[tuple[str, Any]]:
    if isinstance(value, dict) and value:
        for key, inner in value.items():
            yield from _leaves(inner, f"{path}.{key}")
    elif isinstance(value, list) and value:
        for number, inner in enumerate(value):
            yield from _leaves(inner, f"{path}[{number}]")
    else:
        yield path, value


def digests(path: Path, folder: str) -> Iterator[str]:
    """A recording's columns: rows, and a digest of the values; ``folder`` is named in none."""
    import numpy as np

    from trainfit.results.runs.recording import Recording

    recording = Recording.load(path)
    for name, column in sorted(vars(recording).items()):
        if isinstance(column, np.ndarray):
            digest = hashlib.sha256(np.ascontiguousarray(column).tobytes()).hexdigest()[:16]
            yield f"column {name}: {len(column)} rows, {digest}"
    texts = (
        "\n".join(recording.strings).replace(str(path.parent), "FOLDER").replace(folder, "FOLDER")
    )
    yield f"strings: {len(recording.strings)}, {hashlib.sha256(texts.encode()).hexdigest()[:16]}"


def masked(first: list[str], second: list[str]) -> list[str]:
    """``first``, with a mask in place of what ``second`` has otherwise."""
    if len(first) != len(second):
        return [MASK]
    return [_common(one, other) for one, other in zip(first, second, strict=True)]


#: How long doctor's checks took, which two runs may have alike by chance.
_OWN_TIME = re.compile(r" good \([\d.]+ (?:µs|ms|s)\)$")


def _common(one: str, other: str) -> str:
    if one == other and not _OWN_TIME.search(one):
        return one
    path, equals, _ = one.partition(" = ")
    return f"{path} = {MASK}" if equals and other.startswith(path + equals) else MASK


def changed(stored: list[str], now: list[str]) -> list[str]:
    """A unified diff of what is compared."""
    if stored == [MASK]:
        return []
    if len(stored) == len(now):
        now = [old if old == _common(old, new) and MASK in old else new
               for old, new in zip(stored, now, strict=True)]  # fmt: skip
    return list(difflib.unified_diff(stored, now, "stored", "now", lineterm="", n=1))


def run(options: argparse.Namespace) -> int:
    """Compare, or write (with ``--only`` or ``--quick``: those cases again); the exit code."""
    folder = Path(tempfile.mkdtemp(prefix="golden-"))
    bench = GoldenFolder(folder, options.python)
    try:
        import trainfit.report.page
        import trainfit.results.kinds  # noqa: F401  (once, before the forks)

        chosen = [case for case in cases(options.quick) if options.only in case.name]
        bench.prepare(chosen)
        outputs = bench.outputs(chosen, options.jobs)
        again = bench.outputs(chosen, options.jobs) if options.write else {}
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    if options.write:
        is_part = options.only or options.quick  # the others stay as they are stored
        before = json.loads(lzma.decompress(STORE.read_bytes()))["cases"] if is_part else {}
        texts = before | {name: masked(lines, again[name]) for name, lines in outputs.items()}
        stored = {"torch": version("torch"), "cases": texts}
        STORE.write_bytes(lzma.compress(json.dumps(stored, indent=0).encode()))
        total = sum(map(len, texts.values()))
        free = sum(MASK in line for text in texts.values() for line in text)
        print(f"{len(texts)} cases, {total} lines, {free} of them not compared: {STORE.name}")
        return 0
    stored = json.loads(lzma.decompress(STORE.read_bytes()))
    if stored["torch"] != version("torch"):
        print(f"stored with PyTorch {stored['torch']}, this is {version('torch')}", file=sys.stderr)
    differ = {}
    for name, lines in outputs.items():
        diff = changed(stored["cases"].get(name, []), lines)
        if diff:
            differ[name] = diff
            shown = diff if options.whole else diff[:12]
            print(f"== {name}", *shown, sep="\n", file=sys.stderr)
    lost = (
        0 if options.quick or options.only else len(set(stored["cases"]) - {c.name for c in chosen})
    )
    figures = [
        BenchFigure(f"of {len(chosen)} cases: changed", len(differ), 0, True),
        BenchFigure("stored cases that are no longer run", lost, 0, True),
    ]
    return finish(figures, options.json, {"changed": differ})


def main() -> int:
    """Print a line for each figure; 0 if nothing changed."""
    made = parser(__doc__, quick="no simulated scripts")
    made.add_argument("--write", action="store_true", help="store what comes out")
    made.add_argument("--only", default="", metavar="TEXT", help="cases with this in the name")
    made.add_argument("--whole", action="store_true", help="whole diffs, not 12 lines each")
    made.add_argument("--jobs", type=int, default=2, help="cases side by side (default: 2)")
    made.add_argument("--python", default=sys.executable, help="the Python that has trainfit")
    return run(made.parse_args())


if __name__ == "__main__":
    sys.exit(main())
