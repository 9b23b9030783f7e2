"""Reversible replacement of attributes of PyTorch's modules and classes."""

from __future__ import annotations

from typing import Any

_ABSENT = object()


class PatchSet:
    """Replaces attributes and puts every one of them back, in reverse order.

    Only what an object holds in its *own* namespace counts as its former value: an
    attribute that it inherited is deleted again, not frozen into the object.
    """

    def __init__(self) -> None:
        self._saved: list[tuple[Any, str, Any]] = []

    def set(self, owner: Any, name: str, value: Any) -> None:
        """Set ``owner.name`` to ``value`` and remember what was there."""
        self._saved.append((owner, name, vars(owner).get(name, _ABSENT)))
        setattr(owner, name, value)

    def restore(self) -> None:
        """Put back everything that was replaced; safe to call twice."""
        while self._saved:
            owner, name, value = self._saved.pop()
            if value is _ABSENT:
                delattr(owner, name)
            else:
                setattr(owner, name, value)
