"""The HTML document: self-contained, escaped, small; its pictures; what is said where a package is
missing."""

from __future__ import annotations

import base64
import hashlib
import html as htmllib
import json
import re
import sys
import xml.etree.ElementTree as ET
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest

import trainfit
from helpers_page import FILES, entries, entry, large_recording, tainted
from trainfit.plan.job_detail import explained
from trainfit.report.blocks import Entry
from trainfit.report.page import page_of
from trainfit.report.writers import html as document
from trainfit.report.writers.html import ReportError, framed, html, svg
from trainfit.results.files import display
from trainfit.results.memory import RecordingSummary

MARKUP = "</script><img src=x onerror=alert(1)>\x1b[31m"


@pytest.fixture(scope="module")
def whole() -> str:
    return html(page_of(entries()))


class Elements(HTMLParser):
    """Tags with their attributes, and the text of scripts."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.scripts: list[str] = []
        self.policy = ""
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))
        if tag == "meta" and dict(attrs).get("http-equiv") == "Content-Security-Policy":
            self.policy = dict(attrs)["content"] or ""
        if tag == "script":
            self.scripts.append("")

    def handle_data(self, data: str) -> None:
        if self.cdata_elem == "script":
            self.scripts[-1] += data


def test_nothing_outside_of_the_file_is_named(whole: str) -> None:
    for tag, attributes in Elements(whole).tags:
        assert tag not in ("link", "iframe", "img", "object", "embed", "base", "form")
        assert "src" not in attributes
        assert not (attributes.get("href") or "#").startswith(("http", "//", "javascript"))
    assert len(whole.encode()) < 5_000_000


def test_the_policy_allows_the_two_scripts_and_nothing_else(whole: str) -> None:
    found = Elements(whole)
    data, *scripts = found.scripts
    assert json.loads(data)
    hashes = {
        "'sha256-" + base64.b64encode(hashlib.sha256(s.encode()).digest()).decode() + "'"
        for s in scripts
    }
    rules = dict(rule.strip().split(" ", 1) for rule in found.policy.split(";"))
    assert set(rules["script-src"].split()) == hashes and len(hashes) == 2
    assert rules["default-src"] == "'none'"
    assert "connect-src" not in rules and "unsafe-eval" not in found.policy


@pytest.mark.parametrize("name", FILES)
def test_markup_and_terminal_escapes_of_users_stay_text(name: str) -> None:
    clean = entry(name)
    bad = Entry(name + MARKUP, tainted(clean.result, MARKUP), tainted(clean.detail, MARKUP))
    text = html(page_of([bad]))
    assert "<img src=x" not in text
    assert "\x1b" not in text
    tags = {tag for tag, _ in Elements(text).tags}
    assert tags == {tag for tag, _ in Elements(html(page_of([clean]))).tags}


def test_a_page_without_a_chart_has_no_library() -> None:
    text = html(page_of([entry("profile-v1.json")]))
    assert len(text) < 100_000
    assert len(Elements(text).scripts) == 1


@pytest.mark.slow
def test_a_recording_of_many_allocations_is_a_small_page_that_keeps_its_peak() -> None:
    recording = large_recording(200_000)
    recording.check()
    summary, detail = explained(recording, "large.trainfit")
    page = page_of([Entry("large.trainfit", summary, detail)])
    text = html(page)
    assert len(text.encode()) < 5_000_000
    (course, *_) = page.charts
    drawn = max(value["to"] for layer in course.spec["layer"] for value in layer["data"]["values"]
                if "to" in value)  # fmt: skip
    assert isinstance(summary, RecordingSummary)
    assert detail is not None and detail.memory is not None
    assert detail.memory.peak_bytes == summary.memory.allocated_bytes
    assert drawn * (1 << 30) == pytest.approx(detail.memory.peak_bytes, rel=1e-5)
    assert course.note.startswith("200000 allocations and frees are drawn as 40")


@pytest.mark.parametrize(
    "name",
    [
        *("plan-v1.json", "gpu-comparison-v1.json", "recording-v1.trainfit", "loader-v1.json"),
        *("rehearsal-v1.json", "watch-v1.json", "watch-comparison-v1.json", "pace-v1.json"),
    ],
)
def test_the_first_chart_is_a_picture_of_its_own(name: str) -> None:
    picture = svg(page_of([entry(name)]).charts[0])
    root = ET.fromstring(picture)
    assert root.tag.endswith("svg")
    assert "var(--" not in picture
    assert len(list(root.iter())) > 20


def test_a_treemap_is_a_picture_too() -> None:
    charts = page_of([entry("plan-v1.json")]).charts
    (treemap,) = (chart for chart in charts if "modules" in chart.title)
    assert svg(treemap).count("<path") > 5


def test_a_chart_as_a_picture_escapes_its_texts() -> None:
    bad = tainted(entry("loader-v1.json").result, MARKUP)
    (first, *_) = page_of([Entry("bad", bad)]).charts
    assert "<img" not in svg(first)


@pytest.mark.parametrize(("package", "call"), [("jinja2", html), ("vl_convert", html)])
def test_a_missing_package_is_named_with_the_remedy(
    package: str, call: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    document._library.cache_clear()
    monkeypatch.setitem(sys.modules, package, None)
    with pytest.raises(ReportError, match=r"pip install 'trainfit\[report\]'"):
        call(page_of([entry("loader-v1.json")]))


def test_the_library_is_kept_for_the_next_page(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where it cannot be kept it is there."""
    made: list[str] = []
    monkeypatch.setattr("vl_convert.javascript_bundle", lambda code: made.append(code) or "code")
    (tmp_path / "file").touch()
    for home, times in ((tmp_path / "cache", 1), (tmp_path / "file", 3)):
        monkeypatch.setenv("XDG_CACHE_HOME", str(home))
        for _ in range(2):
            document._library.cache_clear()
            assert document._library() == "code"
        assert len(made) == times
    document._library.cache_clear()


def test_a_result_is_a_page_in_a_notebook() -> None:
    """In a frame, so that its styles and scripts do not reach the notebook."""
    result = trainfit.load(Path(__file__).parents[2] / "fixtures" / "results" / "loader-v1.json")
    shown = result._repr_html_()
    assert shown is not None
    assert shown.startswith("<iframe") and shown.count("<") == 2
    inside = htmllib.unescape(re.search(r'srcdoc="([^"]*)"', shown)[1])  # type: ignore[index]
    assert inside.startswith("<!doctype html>") and "DataLoader" in inside
    assert 'sandbox="allow-scripts"' in shown


def test_a_notebook_without_the_packages_shows_the_text(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "jinja2", None)
    assert entry("loader-v1.json").result._repr_html_() is None


def test_without_a_renderer_a_result_has_no_page(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(display, "_renders", [])
    assert entry("loader-v1.json").result._repr_html_() is None


def test_a_frame_escapes_its_document() -> None:
    page = page_of([entry("gpus-v1.json")])
    assert '"' not in framed(page).split('srcdoc="')[1].split('" sandbox')[0]
