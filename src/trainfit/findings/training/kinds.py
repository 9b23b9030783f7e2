"""Kinds of misuse: each has its name once, at the function that makes its finding."""

from __future__ import annotations

from collections.abc import Callable

from trainfit.results.findings import Finding

#: Gets its kind, and what was told of one (:class:`trainfit.results.runs.learning.Misuse`).
_Finds = Callable[..., Finding]


class Kinds(dict[str, _Finds]):
    """The functions that make findings, by kind.

    Attributes
    ----------
    later: Those that an evaluation, a later epoch or the run's end may be the first to show.
    """

    def __init__(self) -> None:
        super().__init__()
        self.later: list[str] = []

    def of(self, kind: str, *, later: bool = False) -> Callable[[_Finds], _Finds]:
        """Decorates the function that makes the finding of ``kind``."""

        def put(finds: _Finds) -> _Finds:
            self[kind] = finds
            if later:
                self.later.append(kind)
            return finds

        return put
