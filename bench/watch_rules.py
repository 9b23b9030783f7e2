"""What `trainfit watch` says of runs with known causes.

    python bench/watch_rules.py [--quick] [--json]

Runs are simulated (_watch_runs.py: a loop of workers, main thread and GPU; its seeds are fixed):
each cause alone, in pairs that can be told apart, 100 without any, and 100 of those on cores that
other programs use. A finding is right if it names a cause of its run or is true as well (an
oversubscribed loader also leaves the GPU waiting).
Precision is the share of right findings of a kind, recall the share of a cause's runs in which it
was named.
"""

from __future__ import annotations

import sys
from collections import Counter, defaultdict
from collections.abc import Iterable
from dataclasses import dataclass, field

from _bench import BenchFigure, finish, parser, say, table
from _watch_runs import CAUSES, KnownRun, make, make_busy, pairs

from trainfit.results.runs.watched import RunRecord
from trainfit.watch.judge import judge


@dataclass
class Score:
    """Counters are by kind of finding, and by cause."""

    right: Counter[str] = field(default_factory=Counter)
    wrong: Counter[str] = field(default_factory=Counter)
    seen: Counter[str] = field(default_factory=Counter)
    named: Counter[str] = field(default_factory=Counter)
    healthy: int = 0
    silent: int = 0
    confused: dict[str, Counter[str]] = field(default_factory=lambda: defaultdict(Counter))

    def note(self, sample: KnownRun, kinds: set[str]) -> None:
        if not sample.causes:
            self.healthy += 1
            self.silent += not kinds
        for kind in kinds:
            is_right = kind in sample.allowed
            (self.right if is_right else self.wrong)[kind] += 1
            if not is_right:
                self.confused["+".join(c.name for c in sample.causes) or "none"][kind] += 1
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
        values = [self.precision(kind) for kind in {*self.right, *self.wrong}]
        return min((value for value in values if value is not None), default=0.0)


def ours(run: RunRecord) -> set[str]:
    """Findings that weigh: notes ("info") claim nothing."""
    return {finding.kind for finding in judge(run).findings if finding.severity != "info"}


def samples(each: int, of_pairs: int, healthy: int) -> Iterable[KnownRun]:
    """In a fixed order; seeds differ by run."""
    for number, cause in enumerate(CAUSES):
        for turn in range(each):
            yield make((cause,), 1000 * number + turn)
    for number, (one, other) in enumerate(pairs()):
        for turn in range(of_pairs):
            yield make((one, other), 100_000 + 100 * number + turn)
    for turn in range(healthy):
        yield make((), 500_000 + turn)


def busy_silent(count: int = 100) -> float:
    """Of healthy runs on a busy machine, the percentage that has no finding but the other
    programs."""
    silent = 0
    for turn in range(count):
        kinds = ours(make_busy(700_000 + turn).run) - {"cpu_contention"}
        silent += not kinds
        if kinds:
            say(f"busy, run {turn}: {', '.join(sorted(kinds))}")
    return 100 * silent / count


def main() -> int:
    options = parser(__doc__, quick="3 runs a cause, one a pair").parse_args()
    score = Score()
    for sample in samples(*((3, 1, 100) if options.quick else (20, 4, 100))):
        score.note(sample, ours(sample.run))
    recalls = {cause.name: score.recall(cause.name) for cause in CAUSES}
    for cause, kinds in score.confused.items():
        say(f"{cause}: {dict(kinds)}")
    figures = [
        BenchFigure("watch_precision_worst", score.worst_precision, 0.95, False),
        BenchFigure("watch_recall_worst", min(recalls.values()), 0.90, False),
        BenchFigure("watch_healthy_silent", 100 * score.silent / score.healthy, 98.0, False, "%"),
        BenchFigure("watch_busy_silent", busy_silent(), 98.0, False, "%"),
    ]
    precisions = {kind: score.precision(kind) for kind in {*score.right, *score.wrong}}
    shown = table(
        ("cause", "recall"), ((name, f"{recall:.0%}") for name, recall in recalls.items())
    )
    details = {"recall": recalls, "precision": precisions}
    return finish(figures, options.json, details, [shown])


if __name__ == "__main__":
    sys.exit(main())
