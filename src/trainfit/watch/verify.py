"""Tries one recommended change: runs with it and without in alternation, compared.

The command itself is not understood here: whoever calls hands in how it is filled.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
import re
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any, Final, Literal, Protocol

from trainfit.results.files.errors import TrainfitError
from trainfit.results.findings import Finding
from trainfit.results.runs import tables
from trainfit.results.runs.watched import RunRecord, exit_words, load_run
from trainfit.results.text import line_of
from trainfit.results.watch import AdviceVerification, Comparison, VerifiedRun, WatchResult
from trainfit.watch.compare import LEAST_STEPS, WARM_UP, compare_groups
from trainfit.watch.intervals import measured
from trainfit.watch.launch import WatchedCommand
from trainfit.watch.sampler.proc_files import process_stat
from trainfit.watch.sampler.start import start_sampler
from trainfit.watch.view import RunView

# ---
# A watched run that is ended once enough steps are recorded.


#: Seconds after which a run that was asked to end is asked more firmly.
PATIENCE_S: Final = 10.0
_LOOK_S: Final = 0.1


class ShortRunError(TrainfitError):
    """A run that failed before its steps were recorded; ``exit_code`` is the command's."""

    def __init__(self, message: str, code: int) -> None:
        super().__init__(message)
        self.exit_code = code or 2


def short_run(
    command: Sequence[str], variables: Mapping[str, str], folder: Path, steps: int
) -> RunRecord:
    """Run ``command`` with ``variables`` added to its environment, recorded in ``folder``, until
    ``steps`` steps are recorded or it ends; then SIGINT as a terminal sends it, SIGTERM and SIGKILL
    to what is still there.

    Raises :class:`ShortRunError` where it fails by itself, ``KeyboardInterrupt`` where the user
    ended it.
    """
    words = [*command]
    if variables:
        words = ["env", *(f"{name}={value}" for name, value in variables.items()), *command]
    enough = False
    with (
        _Errors() as errors,
        WatchedCommand(words, folder, errors=errors.descriptor) as watched,
        _interrupts() as seen,
    ):
        errors.begin()
        if not watched.recorded:
            raise ShortRunError("TRAINFIT_WATCH switches the recorder off; unset it", 2)
        sampler = None
        with contextlib.suppress(OSError):  # the run goes on without samples
            sampler = start_sampler(folder, watched.pid)
        try:
            while (code := watched.poll()) is None and not enough and not seen:
                time.sleep(_LOOK_S)
                enough = _recorded(folder) >= steps
            if code is None:
                errors.mute()
                code = _end(watched, not seen)
        finally:
            if watched.poll() is None:
                errors.mute()
                _end(watched, True)
            if sampler is not None:
                sampler.stop()
    if seen:
        raise KeyboardInterrupt
    if code and not enough:
        raise ShortRunError(
            f"the command failed {exit_words(code)} before {steps} steps; run it by itself, and "
            "fix it first",
            code,
        )
    return load_run(folder)


class _Errors:
    """What a command writes to stderr is passed on until we end it: what it and its workers say of
    our interrupt (tracebacks of KeyboardInterrupt) is none of its own."""

    def __init__(self) -> None:
        self._ours, self.descriptor = os.pipe()
        self._muted = False
        self._thread = threading.Thread(target=self._pass_on, daemon=True)

    def __enter__(self) -> _Errors:
        return self

    def begin(self) -> None:
        """The command has been started."""
        os.close(self.descriptor)
        self.descriptor = -1
        self._thread.start()

    def mute(self) -> None:
        """Pass on nothing more."""
        self._muted = True

    def __exit__(self, *_: Any) -> None:
        if self.descriptor >= 0:  # it could not be started
            os.close(self.descriptor)
            os.close(self._ours)
            return
        # A process that it left running keeps its end open.
        self._thread.join(timeout=1.0)

    def _pass_on(self) -> None:
        with contextlib.suppress(OSError), os.fdopen(self._ours, "rb", buffering=0) as ours:
            while data := ours.read(1 << 16):
                if not self._muted:
                    sys.stderr.flush()
                    sys.stderr.buffer.write(data)
                    sys.stderr.buffer.flush()


def _recorded(folder: Path) -> int:
    """Steps that the first rank has written."""
    try:
        return (folder / "rank0.steps.bin").stat().st_size // tables.STEPS.itemsize
    except OSError:
        return 0


def _end(watched: WatchedCommand, interrupt: bool) -> int:
    """End it with all that it started, gently first; returns its exit code. Without ``interrupt``
    it has been asked to end, and gets time for that."""
    family = _family(watched.pid)
    first = signal.SIGINT if interrupt else 0
    for number in (first, signal.SIGTERM, signal.SIGKILL):
        _send(family, number)
        deadline = time.monotonic() + PATIENCE_S
        while time.monotonic() < deadline:
            code = watched.poll()
            family = _living(family)
            if code is not None and not family:
                return code
            time.sleep(_LOOK_S)
    return watched.wait()


#: Processes with the tick of the clock at which each began: a number may be given away again.
_Family = dict[int, int]


def _family(root: int) -> _Family:
    """A process and all below it."""
    known = {}
    for entry in Path("/proc").glob("[0-9]*"):
        stat = _stat(int(entry.name))
        if stat is not None:
            known[int(entry.name)] = stat
    family, wanted = {}, [root]
    while wanted:
        pid = wanted.pop()
        if pid in known and pid not in family:
            family[pid] = known[pid][1]
            wanted += [child for child, (parent, _) in known.items() if parent == pid]
    return family


def _stat(pid: int) -> tuple[int, int] | None:
    """Parent and start of a process that lives; ``None``: it has ended."""
    try:
        stat = process_stat(Path(f"/proc/{pid}/stat").read_bytes())
    except OSError:
        return None
    return None if stat is None or stat.state in (b"Z", b"X") else (stat.parent, stat.started_ticks)


def _living(family: _Family) -> _Family:
    found = {}
    for pid, started in family.items():
        stat = _stat(pid)
        if stat is not None and stat[1] == started:
            found[pid] = started
    return found


def _send(family: _Family, number: int) -> None:
    for pid in _living(family):
        with contextlib.suppress(OSError):
            os.kill(pid, number)


@contextlib.contextmanager
def _interrupts() -> Iterator[list[int]]:
    """Signals by which the user ends all of it; the command is passed them as before."""
    seen: list[int] = []
    if threading.current_thread() is not threading.main_thread():
        yield seen
        return
    former: dict[int, Any] = {}

    def note(number: int, frame: FrameType | None) -> None:
        seen.append(number)
        print("trainfit: ending the run …", file=sys.stderr)
        if callable(former[number]):
            former[number](number, frame)

    for each in (signal.SIGINT, signal.SIGTERM):
        former[each] = signal.signal(each, note)
    try:
        yield seen
    finally:
        for number, handler in former.items():
            signal.signal(number, handler)


#: After the first run, as often as asked: changed ones in the middle, so that what drifts (a page
#: cache that fills, a chip that warms up) is in both groups alike.
ORDER: Final = (False, True, True, False)
LEAST_RUNS: Final = 1 + len(ORDER)
#: Steps of a run at least.
LEAST_RECORDED: Final = LEAST_STEPS + WARM_UP
_VARIABLE: Final = re.compile(r"[A-Z][A-Z0-9_]*")
#: They change memory; a comparison of speed says nothing of them.
_OF_MEMORY: Final = frozenset(("PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF"))
#: They need workers.
_OF_WORKERS: Final = frozenset(("prefetch_factor", "persistent_workers"))


class FillableCommand(Protocol):
    """A command whose placeholders can be filled."""

    @property
    def names(self) -> Iterable[str]:
        """The names of the command's placeholders."""

    def present(self, name: str) -> str:
        """The value of a placeholder as the command is."""

    def spelled(self, name: str, value: str) -> str:
        """``value`` as the command spells values of this placeholder ("true" for "True")."""

    def fill(self, values: Mapping[str, str]) -> Sequence[str]:
        """The command's words with these values, and current ones otherwise."""


#: Runs words with these variables added to the environment until enough steps are recorded.
Runner = Callable[[Sequence[str], Mapping[str, str]], RunRecord]


@dataclass(frozen=True)
class _Trial:
    """A finding's settings as the command can be given them."""

    finding: Finding
    values: Mapping[str, str]
    variables: Mapping[str, str]
    left_out: Mapping[str, str]

    @property
    def settings(self) -> dict[str, str]:
        return {**self.values, **self.variables}


def verify(
    command: FillableCommand,
    run: Runner,
    judge: Callable[[RunRecord], WatchResult],
    tell: Callable[[str], None],
    variables: Mapping[str, str] | None = None,
    *,
    count: int = LEAST_RUNS,
) -> AdviceVerification:
    """Run ``command`` as it is, choose the change, and prove it or not.

    ``count`` is how many runs that takes: 1 and a multiple of 4. ``variables`` is the environment
    that runs begin with (default: this process's); ``tell`` is given a line before each run. What
    ``run`` raises goes through.
    """
    environment = os.environ if variables is None else variables
    plain = command.fill({})
    tell(f"run 1 of {count}: the command as it is")
    first = run(plain, {})
    if _steps(first) < LEAST_STEPS:
        return _not_enough(plain, first)
    findings = judge(first).findings
    trial = _chosen(findings, command, environment)
    if trial is None:
        return _nothing_to_try(plain, findings, first)
    changed = command.fill(trial.values)
    runs: list[tuple[bool, RunRecord]] = []
    for number, with_change in enumerate(ORDER * ((count - 1) // len(ORDER)), 2):
        how = _setting_text(trial.settings) if with_change else "as it is"
        tell(f"run {number} of {count}: {how}")
        words, added = (changed, trial.variables) if with_change else (plain, {})
        try:
            record = run(words, added)
        except ShortRunError as error:
            if not with_change:
                raise
            reason = f"with the change, {error}"
            return _told(trial, plain, changed, "cannot tell", runs, reason=reason)
        runs.append((with_change, record))
        ignored = _ignored(record, trial) if with_change else ""
        if ignored:
            return _told(trial, plain, changed, "not tried", runs, reason=ignored)
        if _steps(record) < LEAST_STEPS:
            reason = f"run {number} has {_steps(record)} steady steps; {LEAST_STEPS} are needed"
            return _told(trial, plain, changed, "cannot tell", runs, reason=reason)
    comparison = compare_groups(
        *([record for marked, record in runs if marked == wanted] for wanted in (False, True)),
        allow_other_hardware=True,  # it is this machine
    )
    return _told(trial, plain, changed, _VERDICTS[comparison.verdict], runs, comparison=comparison)


_Verdict = Literal["proven", "no gain", "worse", "cannot tell", "not tried"]
_VERDICTS: Final[Mapping[str, _Verdict]] = {
    "faster": "proven",
    "slower": "worse",
    "no difference": "no gain",
    "cannot tell": "cannot tell",
}


def _chosen(
    findings: Sequence[Finding], command: FillableCommand, environment: Mapping[str, str]
) -> _Trial | None:
    """The first finding, as the judge orders them, of which something can be applied that is not
    so already."""
    for finding in findings:
        values: dict[str, str] = {}
        variables: dict[str, str] = {}
        left_out: dict[str, str] = {}
        # Without workers PyTorch refuses what is recommended for them.
        no_workers = "num_workers" in finding.fix.settings and "num_workers" not in command.names
        for name, value in finding.fix.settings.items():
            if name in command.names and not (no_workers and name in _OF_WORKERS):
                spelled = command.spelled(name, value)
                if spelled != command.present(name):
                    values[name] = spelled
            elif _VARIABLE.fullmatch(name) and name not in _OF_MEMORY:
                if environment.get(name) != value:
                    variables[name] = value
            else:
                left_out[name] = value
        if values or variables:
            return _Trial(finding, values, variables, left_out)
    return None


def _ignored(record: RunRecord, trial: _Trial) -> str:
    """What the changed run did not take over, as far as it is recorded; empty: nothing."""
    header = record.header
    for name, value in trial.variables.items():
        variable = header.variables.get(name)
        if variable is not None and variable != value:
            return f"the command sets {name}={variable} itself; change it there"
    workers = trial.values.get("num_workers")
    loaders = [loader for loader in header.loaders if loader.role == "training"] or header.loaders
    if workers is not None and loaders:
        counts = {str(loader.num_workers) for loader in loaders}
        if workers not in counts:
            return (
                f"the DataLoader still had {' and '.join(sorted(counts))} workers: the script does "
                "not take num_workers from its {num_workers} placeholder"
            )
    return ""


def _steps(record: RunRecord) -> int:
    return len(measured(RunView(record)))


# -- verdicts ----------------------------------------------------------------------------------


def _not_enough(plain: Sequence[str], first: RunRecord) -> AdviceVerification:
    reason = (
        f"the run has {_steps(first)} steady steps, and {LEAST_STEPS} are needed "
        f"({LEAST_RECORDED} with the warm-up): let it train longer, or raise --verify-steps"
    )
    return AdviceVerification(
        "cannot tell", line_of(plain), reason=reason, runs=(_run(False, first),)
    )


def _nothing_to_try(
    plain: Sequence[str], findings: Sequence[Finding], first: RunRecord
) -> AdviceVerification:
    """Why, and what to change by hand."""
    by_hand = next(
        (finding for finding in findings if finding.fix.settings or finding.fix.line), None
    )
    by_hand = by_hand or next((finding for finding in findings if finding.severity != "info"), None)
    made = AdviceVerification("not tried", line_of(plain), runs=(_run(False, first),))
    if by_hand is None:
        return dataclasses.replace(made, reason="nothing to change was found")
    settings = by_hand.fix.settings
    if any(name in _OF_MEMORY for name in settings):
        reason = "it changes memory, which a comparison of speed does not show"
    elif settings:
        places = " ".join(f"{{{name}:VALUE}}" for name in settings)
        reason = f"the command has no placeholder for it; mark where its value stands: {places}"
    else:
        reason = "it is a change of the script"
    return dataclasses.replace(
        made,
        kind=by_hand.kind,
        title=by_hand.title,
        left_out=settings,
        reason=reason,
        line=by_hand.fix.line or _setting_text(settings) or by_hand.fix.action,
    )


def _told(
    trial: _Trial,
    plain: Sequence[str],
    changed: Sequence[str],
    verdict: _Verdict,
    runs: Sequence[tuple[bool, RunRecord]],
    *,
    reason: str = "",
    comparison: Comparison | None = None,
) -> AdviceVerification:
    prefix = [f"{name}={value}" for name, value in trial.variables.items()]
    return AdviceVerification(
        verdict,
        line_of(plain),
        trial.finding.kind,
        trial.finding.title,
        trial.settings,
        trial.left_out,
        line_of([*prefix, *changed]),
        reason,
        trial.finding.fix.line if reason else "",
        tuple(_run(with_change, record) for with_change, record in runs),
        comparison,
    )


def _run(changed: bool, record: RunRecord) -> VerifiedRun:
    return VerifiedRun(changed, record.folder, _steps(record))


def _setting_text(settings: Mapping[str, str]) -> str:
    return " ".join(f"{name}={value}" for name, value in settings.items())
