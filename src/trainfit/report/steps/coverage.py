"""What was among the simulated steps, as one line."""

from __future__ import annotations

from trainfit.results.format import count
from trainfit.results.runs.coverage import Coverage

#: Steps of an epoch up to which simulating one of them whole is worth a word.
_REACHABLE = 2000

#: By whether an evaluation, and a checkpoint, were seen.
_SEEN = {
    (True, True): "evaluation and checkpoint",
    (True, False): "evaluation but no checkpoint",
    (False, True): "checkpoint but no evaluation",
    (False, False): "no evaluation or checkpoint",
}


def coverage_text(coverage: Coverage | None, steps: int, what: str = "step") -> str:
    """What was simulated, and how to reach what was not; empty where nobody looked."""
    if coverage is None:
        return ""
    text = f"{_SEEN[coverage.evaluated, coverage.saved]} in {count(steps, what)}"
    epoch = coverage.steps_per_epoch
    if (coverage.evaluated and coverage.saved) or epoch is None:
        return text
    if steps > epoch:
        return f"{text} (an epoch has {count(epoch, what)})"
    if epoch <= _REACHABLE:
        return f"{text}; --steps {epoch + 1} ends an epoch"
    return f"{text} (an epoch has {epoch:,}; see --steps)"
