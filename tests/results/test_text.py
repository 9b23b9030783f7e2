"""User text is made printable, wrapped and shortened."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from trainfit.results.text import instructions, one_line, printable, short, wrapped


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


def test_instructions_keep_the_lines_of_code() -> None:
    text = "shard by worker:\n    for index in " + "x" * 80 + ":\n\tyield\x1b\nor set num_workers=1"
    said = instructions(text, "fix: ", "     ").splitlines()
    assert said[0] == "fix: shard by worker:"
    assert said[1] == "         for index in " + "x" * 80 + ":"
    assert said[2:] == ["             yield\\x1b", "     or set num_workers=1"]
    assert "\\x0a" not in "".join(said)
