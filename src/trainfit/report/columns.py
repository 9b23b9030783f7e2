"""Three columns: a figure, its value, and what they mean."""

from __future__ import annotations

import itertools
import textwrap

from trainfit.results.text import wrapped

_FIGURE = 19
#: Where the text begins.
_TEXT = 40
#: Columns of the value.
_VALUE = _TEXT - _FIGURE - 1


def columns_text(figure: str, value: str, text: str) -> str:
    """Lines in three columns; the value may take several lines, too."""
    values = textwrap.wrap(value, _VALUE, break_on_hyphens=False) or [""]
    left = [f"  {figure:<{_FIGURE - 2}}{values[0]}", *(" " * _FIGURE + each for each in values[1:])]
    right = [line[_TEXT:] for line in wrapped(text, " " * _TEXT, " " * _TEXT).split("\n")]
    pairs = itertools.zip_longest(left, right, fillvalue="")
    return "\n".join(f"{one:<{_TEXT}}{other}".rstrip() for one, other in pairs)
