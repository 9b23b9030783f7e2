"""Nothing of a user's leaves the machine: trackers are switched off, uploads are skipped."""

from __future__ import annotations

from trainfit.scripts.sandbox.network.offline import go_offline

__all__ = ["go_offline"]
