"""Values that one word of a command line says."""

from __future__ import annotations

import enum
from typing import Any, Final

#: Letters of a value beyond which it is no setting of a number or a name.
_LONGEST: Final = 200


def is_plain(value: Any) -> bool:
    """Is it a value that one word says?"""
    if isinstance(value, enum.Enum):
        value = value.value
    return value is None or (
        isinstance(value, str | int | float | bool) and len(str(value)) <= _LONGEST
    )


def text_of(value: Any) -> str | None:
    """A plain value as text."""
    if isinstance(value, enum.Enum):
        value = value.value
    return None if value is None else str(value)
