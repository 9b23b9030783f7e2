"""The page as Markdown: the same sections, and nothing of a user's text means something in it."""

from __future__ import annotations

import re

import pytest
from markdown_it import MarkdownIt

from helpers_page import FILES, entries, entry, tainted
from trainfit.report.blocks import (
    Chart,
    Entry,
    Facts,
    Headline,
    Item,
    Items,
    Output,
    Page,
    Row,
    Section,
    Snippet,
    Table,
    Text,
    Tile,
)
from trainfit.report.page import page_of
from trainfit.report.writers.markdown import markdown

MARKUP = "</b><img src=x> `ticks` | pipe\n# not a heading [a](http://b)"


def rendered(text: str) -> str:
    return MarkdownIt("commonmark").enable("table").render(text)


def test_every_section_and_chart_is_there() -> None:
    page = page_of(entries())
    headings = re.findall(r"<h[23]>(.*?)</h[23]>", rendered(markdown(page)))
    wanted = [section.title for section in page.sections] + [chart.title for chart in page.charts]
    found = {heading.replace("&amp;", "&") for heading in headings}
    assert set(wanted) <= found


@pytest.mark.parametrize("name", FILES)
def test_texts_of_users_mean_nothing_to_markdown(name: str) -> None:
    clean = entry(name)
    bad = tainted(clean.result, MARKUP), tainted(clean.detail, MARKUP)
    text = rendered(markdown(page_of([Entry(name, *bad)])))
    assert "<img" not in text and "<a " not in text
    wanted = rendered(markdown(page_of([clean])))
    assert re.findall(r"<h\d|<table", text) == re.findall(r"<h\d|<table", wanted)


def test_each_block_as_markdown() -> None:
    table = Table(
        ("A", "B"), (("x|y", "1"), ("z", "2")), "Two rows", frozenset({1}), frozenset({0})
    )
    blocks = (
        Snippet("run `it`", "Run"),
        Text("a *b*"),
        Output("col  umn\nnext"),
        Facts((Row("label", "text"), Row("", "more"))),
        Items((Item("found", "bad", "kind", (("why", "so"), ("none", "")), (Snippet("fix"),)),)),
        Chart("Picture", "What it says.", {}, table, "A note."),
    )
    head = Headline(
        "Plan", "good", "Fits: 1.", "limit", "subject", (Snippet("go", "Run"),), ("edit",),
        (Tile("Memory", "5 GiB", "of 8"),),
    )  # fmt: skip
    text = markdown(Page("t", (head,), (Section("S", blocks, "answer"),), (("f", "Plan"),), "1"))
    assert "## Plan: Fits: 1." in text
    assert "- Memory: **5 GiB** (of 8)" in text
    assert "```\nrun `it`\n```" in text
    assert "a \\*b\\*" in text
    assert "| **x\\|y** | **1** |" in text
    assert "| --- | ---: |" in text
    assert "- label: text\n  - more\n" in text
    assert "- **found** (kind)\n  - why: so\n  - `fix`" in text
    assert "none" not in text
    assert "### Picture" in text and "A note." in text
    assert text.endswith("made from `f` (Plan).\n")


def test_a_fence_is_longer_than_any_in_the_text() -> None:
    page = Page("t", (), (Section("S", (Output("```\nx"),)),), (), "1")
    assert "````\n```\nx\n````" in markdown(page)
