"""Tries one recommended change: runs with it and without in alternation, compared.

The command itself is not understood here: whoever calls hands in how it is filled.
"""

from __future__ import annotations

import dataclasses
import os
import re
import shlex
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Final, Literal, Protocol

from trainfit.results.watch.comparison import Comparison
from trainfit.results.watch.result import Finding, WatchResult
from trainfit.results.watch.run import RunRecord
from trainfit.results.watch.verification import Verification, VerifiedRun
from trainfit.watch.compare.comparing import LEAST_STEPS, WARM_UP, compare_groups
from trainfit.watch.compare.measures import measured
from trainfit.watch.figures.view import RunView
from trainfit.watch.short_run import ShortRunError

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
        """Of its placeholders."""

    def present(self, name: str) -> str:
        """The value of a placeholder as the command is."""

    def spelled(self, name: str, value: str) -> str:
        """``value`` as the command spells values of this placeholder ("true" for "True")."""

    def fill(self, values: Mapping[str, str]) -> Sequence[str]:
        """Its words with these values, and current ones otherwise."""


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
) -> Verification:
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
        no_workers = "num_workers" in finding.settings and "num_workers" not in command.names
        for name, value in finding.settings.items():
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
        found = header.variables.get(name)
        if found is not None and found != value:
            return f"the command sets {name}={found} itself; change it there"
    workers = trial.values.get("num_workers")
    loaders = [each for each in header.loaders if each.role == "training"] or header.loaders
    if workers is not None and loaders:
        counts = {str(each.num_workers) for each in loaders}
        if workers not in counts:
            return (
                f"the DataLoader still had {' and '.join(sorted(counts))} workers: the script does "
                "not take num_workers from its {num_workers} placeholder"
            )
    return ""


def _steps(record: RunRecord) -> int:
    return len(measured(RunView(record)))


# -- verdicts ----------------------------------------------------------------------------------


def _not_enough(plain: Sequence[str], first: RunRecord) -> Verification:
    reason = (
        f"the run has {_steps(first)} steady steps, and {LEAST_STEPS} are needed "
        f"({LEAST_RECORDED} with the warm-up): let it train longer, or raise --verify-steps"
    )
    return Verification("cannot tell", shlex.join(plain), reason=reason, runs=(_run(False, first),))


def _nothing_to_try(
    plain: Sequence[str], findings: Sequence[Finding], first: RunRecord
) -> Verification:
    """Why, and what to change by hand."""
    by_hand = next((each for each in findings if each.settings or each.line), None)
    by_hand = by_hand or next((each for each in findings if each.severity != "info"), None)
    made = Verification("not tried", shlex.join(plain), runs=(_run(False, first),))
    if by_hand is None:
        return dataclasses.replace(made, reason="nothing to change was found")
    settings = by_hand.settings
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
        line=by_hand.line or _setting_text(settings) or by_hand.action,
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
) -> Verification:
    prefix = "".join(f"{name}={shlex.quote(value)} " for name, value in trial.variables.items())
    return Verification(
        verdict,
        shlex.join(plain),
        trial.finding.kind,
        trial.finding.title,
        trial.settings,
        trial.left_out,
        prefix + shlex.join(changed),
        reason,
        trial.finding.line if reason else "",
        tuple(_run(with_change, record) for with_change, record in runs),
        comparison,
    )


def _run(changed: bool, record: RunRecord) -> VerifiedRun:
    return VerifiedRun(changed, record.folder, _steps(record))


def _setting_text(settings: Mapping[str, str]) -> str:
    return " ".join(f"{name}={value}" for name, value in settings.items())
