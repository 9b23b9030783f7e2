"""Results as a page in notebooks.

A page is made of reports, which lie above results: who starts the program gives the function.
"""

from __future__ import annotations

from collections.abc import Callable

Render = Callable[[object], "str | None"]

_renders: list[Render] = []


def use(render: Render) -> None:
    """``render`` makes the HTML of a result from now on (``None``: it cannot)."""
    _renders[:] = [render]


class Displayed:
    """Has its report as its representation in a notebook."""

    def _repr_html_(self) -> str | None:
        return _renders[0](self) if _renders else None
