"""What is said of a result on a terminal: blocks give way to a screen, and nothing is lost."""

from __future__ import annotations

import re

import pytest

from helpers_page import FILES, entry, tainted
from trainfit.report.blocks import (
    PAGE,
    Chart,
    Entry,
    Facts,
    Headline,
    Item,
    Items,
    Output,
    Row,
    Section,
    Snippet,
    Subject,
    Text,
    figures,
    table,
)
from trainfit.report.layout import LINES, bars, plain_text
from trainfit.report.page import subject_of
from trainfit.report.writers.terminal import screen, whole
from trainfit.results.files.contents import Note
from trainfit.results.text import laid_out_for

TABLE = table(("A", "B"), [(f"row {n}", str(n)) for n in range(30)], "Thirty rows", (1,), detail=20)
PICTURE = bars([(("one",), 1.0, "1 s"), (("two",), 2.0, "2 s")], "l", ("which",), ("time",))
PLAIN = figures(("X",), [("9",)], "Nine")
ALL = Subject(
    Headline("Plan", "good", "Fits: 1.", "What limits: it", "python train.py",
             (Snippet("python train.py --a 1", "Run"),), ("edit train.py",)),
    (
        Section("Facts", (Facts((Row("first", "now", 0), Row("second", "never on a screen"))),)),
        Section("Table", (TABLE,)),  # type: ignore[arg-type]
        Section("Picture", (Chart("Bars", "Says so.", {}, PLAIN, sketch=PICTURE, detail=5),)),
        Section("Findings", (Items(tuple(
            Item(f"found {n}", "bad", "kind", (Row("fix", "do", 5), ("why", "so")), detail=10)
            for n in range(9)), "finding"),)),
        Section("On the page alone", (Text("a secret", detail=PAGE), Output("x", PAGE))),
        Section("Figures", (Chart("Nines", "Of nine.", {}, PLAIN),)),
    ),
    (Note("note", "a note"),),
    (Row("torch", "2.13"),),
)  # fmt: skip


def test_a_screen_has_the_answer_first_and_names_what_had_no_room() -> None:
    with laid_out_for(80):
        lines = plain_text(screen(ALL)).splitlines()
    assert len(lines) == LINES
    assert lines[0] == "Fits: 1." and "  python train.py --a 1" in lines
    assert "  first       now" in lines and "  one    █████████████              1 s" in lines
    assert re.search(r"^\d more findings?, figures, …: --explain|^\d more f", lines[-1])
    assert "never on a screen" not in "\n".join(lines) and "why" not in "\n".join(lines)


def test_all_of_it_is_explained_but_for_what_is_for_the_page() -> None:
    text = plain_text(whole(ALL))
    for words in ("never on a screen", "row 29", "found 8", "why", "Nines", "Of nine.", "a note",
                  "Thirty rows", "torch", "2.13"):  # fmt: skip
        assert words in text
    assert "secret" not in text and "alone" not in text


@pytest.mark.parametrize("around", ["{}", "({})", "`{}`", "at {}, {}", "'{}'"])
def test_a_place_is_without_its_folders_on_a_screen_and_keeps_what_is_around_it(
    around: str,
) -> None:
    subject = Subject(
        Headline("Memory", "good", "Fits: 1.", around.replace("{}", "/w/a-b/x/t.py:3")), ()
    )
    assert plain_text(screen(subject)).splitlines()[1].strip() == around.replace("{}", "x/t.py:3")


def test_a_table_gives_way_from_its_end() -> None:
    lines = plain_text(screen(Subject(ALL.headline, ALL.sections[1:2]))).splitlines()
    shown = [int(line.split()[-1]) for line in lines if line.startswith("  row")]
    assert shown and shown == list(range(len(shown))) and len(lines) <= LINES


@pytest.mark.parametrize("name", FILES)
@pytest.mark.parametrize("width", [60, 80, pytest.param(120, marks=pytest.mark.slow)])
def test_no_text_of_a_user_controls_the_terminal_or_leaves_the_screen(
    name: str, width: int
) -> None:
    clean = entry(name)
    bad = Entry(name, tainted(clean.result, "\x1b[2J\r\n\x07evil"), None)
    with laid_out_for(width):
        for subject in (subject_of(clean), subject_of(bad)):
            for lines in (screen(subject), whole(subject)):
                assert all(line.text.isprintable() for line in lines)
            most = LINES if width >= 80 else LINES * 80 // width
            assert len(screen(subject)) <= most
