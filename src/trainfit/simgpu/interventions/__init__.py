"""Interventions: changes of a running script, made from outside, to measure their effect.

Each is one class (:mod:`base` says what it has to do); a survey asks all of them whether
they apply, a trial makes one or several of them.
"""

from __future__ import annotations

from trainfit.simgpu.interventions.session import NAMES, Interventions

__all__ = ["NAMES", "Interventions"]
