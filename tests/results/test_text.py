"""User text is made printable, wrapped and shortened."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from trainfit.results.text import one_line, printable, short, wrapped


@given(st.text())
def test_nothing_that_a_terminal_acts_on_is_left(text: str) -> None:
    assert printable(text).isprintable()
    assert printable(printable(text)) == printable(text)
    assert printable(text, lines=True).replace("\n", "").isprintable()


def test_control_characters_are_shown() -> None:
    assert printable("a\x1b[31m\n") == "a\\x1b[31m\\x0a"
    assert printable("a\n\tb", lines=True) == "a\n        b"


def test_lines_are_indented_and_not_too_long() -> None:
    assert wrapped("one two three", "- ", "  ", 9) == "- one two\n  three"


@given(st.text(), st.integers(2, 40))
def test_shortened_text_is_short_and_on_one_line(text: str, most: int) -> None:
    assert len(short(text, most)) <= most
    assert len(one_line(text, most)) <= most
    assert short(text, most).isprintable()


def test_which_end_is_kept() -> None:
    assert short("\n  first line is long\nsecond", 8) == "first l…"
    assert one_line("Traceback\n  ValueError: no", 8) == "…ror: no"
