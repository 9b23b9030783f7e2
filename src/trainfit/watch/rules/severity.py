"""How much a share of lost time weighs."""

from __future__ import annotations

from trainfit.results.watch.result import Severity
from trainfit.watch.rules import thresholds


def severity(share: float) -> Severity:
    """Of a finding that loses this share of the run's time."""
    if share >= thresholds.CRITICAL_SHARE:
        return "critical"
    return "warning" if share >= thresholds.WARNING_SHARE else "info"
