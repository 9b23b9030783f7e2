"""What `trainfit watch` says of runs with known causes, beside published rules.

    python bench/watch_rules.py [--quick] [--json] [--verbose]

Runs are simulated (_watch_runs.py: a loop of workers, main thread and GPU; its seeds are fixed):
each cause alone, in pairs that can be told apart, 100 without any, and 100 of those on cores that
other programs use. A finding is right if it names a cause of its run or is true as well (an
oversubscribed loader also leaves the GPU waiting).
Precision is the share of right findings of a kind, recall the share of a cause's runs in which it
was named. SageMaker's, Kineto's and TraceML's rules judge the same runs, and TraceML's own package
(traceml-ai) does where it is installed. Where one of their verdicts stands for several kinds of
ours ("a|b"), it is right and names a cause if one of them does; recall is of all causes.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

from _watch_published import PUBLISHED
from _watch_runs import CAUSES, Cause, Sample, make, make_busy, pairs
from _watch_traceml import diagnoser

from trainfit.results.runs.watched import RunRecord
from trainfit.watch.judge import judge

Namer = Callable[[RunRecord], set[str]]


@dataclass
class Score:
    """Of one set of rules. Counters are by kind of finding, and by cause."""

    right: Counter[str] = field(default_factory=Counter)
    wrong: Counter[str] = field(default_factory=Counter)
    seen: Counter[str] = field(default_factory=Counter)
    named: Counter[str] = field(default_factory=Counter)
    healthy: int = 0
    silent: int = 0
    confused: dict[str, Counter[str]] = field(default_factory=lambda: defaultdict(Counter))

    def note(self, sample: Sample, kinds: set[str]) -> None:
        if not sample.causes:
            self.healthy += 1
            self.silent += not kinds
        for kind in kinds:
            is_right = not sample.allowed.isdisjoint(kind.split("|"))
            (self.right if is_right else self.wrong)[kind] += 1
            if not is_right:
                self.confused["+".join(c.name for c in sample.causes) or "none"][kind] += 1
        kinds = {one for kind in kinds for one in kind.split("|")}
        for cause in sample.causes:
            self.seen[cause.name] += 1
            found = not kinds.isdisjoint(cause.kinds)
            self.named[cause.name] += found
            if not found:
                self.confused["missed " + "+".join(c.name for c in sample.causes)][cause.name] += 1

    def precision(self, kind: str) -> float | None:
        every = self.right[kind] + self.wrong[kind]
        return self.right[kind] / every if every else None

    def recall(self, cause: str) -> float:
        return self.named[cause] / self.seen[cause]

    @property
    def worst_precision(self) -> float:
        told = [self.precision(kind) for kind in {*self.right, *self.wrong}]
        return min((each for each in told if each is not None), default=0.0)

    @property
    def overall(self) -> tuple[float, float]:
        """Precision and recall of all findings and causes together."""
        right, wrong = sum(self.right.values()), sum(self.wrong.values())
        return right / max(1, right + wrong), sum(self.named.values()) / sum(self.seen.values())


def ours(run: RunRecord) -> set[str]:
    """Findings that weigh: notes ("info") claim nothing."""
    return {each.kind for each in judge(run).findings if each.severity != "info"}


def samples(each: int, of_pairs: int, healthy: int) -> Iterable[Sample]:
    """In a fixed order; seeds differ by run."""
    for number, cause in enumerate(CAUSES):
        for turn in range(each):
            yield make((cause,), 1000 * number + turn)
    for number, (one, other) in enumerate(pairs()):
        for turn in range(of_pairs):
            yield make((one, other), 100_000 + 100 * number + turn)
    for turn in range(healthy):
        yield make((), 500_000 + turn)


def busy_silent(verbose: bool, count: int = 100) -> float:
    """Of healthy runs on a busy machine, the percentage that has no finding but the other
    programs."""
    silent = 0
    for turn in range(count):
        kinds = ours(make_busy(700_000 + turn).run) - {"cpu_contention"}
        silent += not kinds
        if kinds and verbose:
            print(f"busy, run {turn}: {', '.join(sorted(kinds))}", file=sys.stderr)
    return 100 * silent / count


def table(scores: dict[str, Score]) -> str:
    lines = ["| cause | " + " | ".join(f"recall: {name}" for name in scores) + " |"]
    lines.append("|---" * (1 + len(scores)) + "|")
    for cause in CAUSES:
        cells = [f"{score.recall(cause.name):.0%}" for score in scores.values()]
        lines.append(f"| {cause.name} | " + " | ".join(cells) + " |")
    wholes = [score.overall for score in scores.values()]
    lines.append("| all causes, recall | " + " | ".join(f"{r:.0%}" for _, r in wholes) + " |")
    lines.append("| all findings, precision | " + " | ".join(f"{p:.0%}" for p, _ in wholes) + " |")
    quiet = [f"{score.silent} of {score.healthy}" for score in scores.values()]
    lines.append("| healthy runs without a finding | " + " | ".join(quiet) + " |")
    return "\n".join(lines)


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--quick", action="store_true", help="3 runs a cause, one a pair")
    parser.add_argument("--json", action="store_true", help="one JSON document on stdout")
    parser.add_argument("--verbose", action="store_true", help="what was wrong or missed")
    options = parser.parse_args()
    namers: dict[str, Namer] = {"trainfit": ours, **PUBLISHED}
    if package := diagnoser():
        namers["traceml-ai"] = package
    scores = {name: Score() for name in namers}
    for sample in samples(*((3, 1, 100) if options.quick else (20, 4, 100))):
        for name, namer in namers.items():
            scores[name].note(sample, namer(sample.run))
    mine = scores["trainfit"]
    recalls = {cause.name: mine.recall(cause.name) for cause in CAUSES}
    figures = [
        ("watch_precision_worst", mine.worst_precision, 0.95),
        ("watch_recall_worst", min(recalls.values()), 0.90),
        ("watch_healthy_silent", 100 * mine.silent / mine.healthy, 98.0),
        ("watch_busy_silent", busy_silent(options.verbose), 98.0),
    ]
    if options.json:
        whole = {name: score.overall for name, score in scores.items()}
        print(json.dumps({
            "recall": recalls, "overall": whole,
            "precision": {kind: mine.precision(kind) for kind in {*mine.right, *mine.wrong}},
            "figures": {name: value for name, value, _ in figures},
        }))  # fmt: skip
    else:
        print(table(scores))
    if options.verbose:
        for cause, kinds in mine.confused.items():
            print(f"{cause}: {dict(kinds)}", file=sys.stderr)
        for kind in sorted({*mine.right, *mine.wrong}):
            print(f"{kind}: precision {mine.precision(kind):.3f}", file=sys.stderr)
    out = sys.stderr if options.json else sys.stdout
    for name, value, goal in figures:
        print(f"{name}: {value:.3g} (goal at least {goal:g}) "
              f"{'holds' if value >= goal else 'short'}", file=out)  # fmt: skip
    return 0 if all(value >= goal for _, value, goal in figures) else 1


def cause_of(name: str) -> Cause:
    """By its name; raises ``KeyError``."""
    return {cause.name: cause for cause in CAUSES}[name]


if __name__ == "__main__":
    sys.exit(main())
