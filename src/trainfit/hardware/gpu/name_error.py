"""What can be wrong with a GPU's name."""

from __future__ import annotations

from collections.abc import Sequence

from trainfit.results.files.errors import TrainfitError

LONGEST_NAME = 120  # a longer one is no GPU's name, and matching it would take long


class GpuNameError(TrainfitError, ValueError):
    """A GPU's name that is unknown, ambiguous or malformed; `matches` are names that work."""

    def __init__(self, name: str, reason: str, matches: Sequence[str] = ()) -> None:
        super().__init__(name, reason, list(matches))
        self.name = name
        self.reason = reason
        self.matches = list(matches)

    def __str__(self) -> str:
        shown = self.name if len(self.name) <= LONGEST_NAME else self.name[:LONGEST_NAME] + "..."
        return f"{self.reason}: {shown!r}; {self._remedy()}"

    def _remedy(self) -> str:
        if self.matches:
            return f"try one of: {', '.join(self.matches)}"
        return 'give a name such as "RTX 4090", or "custom:24GiB" for a card that is not listed'
