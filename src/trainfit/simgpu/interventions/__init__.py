"""Changes of a user's script that are made from outside while it runs, to see what they win.

Each is one class (:mod:`base` says what it has to do); a survey asks all of them whether
they apply, a trial makes one or several of them.
"""

from __future__ import annotations

from trainfit.simgpu.interventions.session import NAMES, Interventions

__all__ = ["NAMES", "Interventions"]
