"""The page in a real browser: charts are drawn, hovering and copying work, nothing is requested.

Screenshots are kept in ``build/report``. Without a browser (chromium on PATH, and the package
playwright) these tests are skipped.
"""

from __future__ import annotations

import dataclasses
import itertools
import re
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from helpers_page import entries, entry, tainted, texts_of
from trainfit.report.blocks import Entry
from trainfit.report.page import page_of
from trainfit.report.writers.html import html

ROOT = Path(__file__).resolve().parents[3]
SCREENSHOTS = ROOT / "build" / "report"
PROGRAM = next(
    filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None
)
OPTIONS = (
    *("--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-sync"),
    *("--disable-background-networking", "--disable-component-update"),
)
MARKUP = "</script></td><img src=x onerror=\"window.hit=1\"><b class='hit'>&amp;{{7*7}}`${1}`"


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    if PROGRAM is None:
        pytest.skip("no browser: chromium, chromium-browser or google-chrome on PATH")
    api = pytest.importorskip("playwright.sync_api", reason="the package playwright")
    with api.sync_playwright() as started:
        found = started.chromium.launch(executable_path=PROGRAM, args=list(OPTIONS))
        yield found
        found.close()


def expect(locator: Any) -> Any:
    """An assertion that waits; ``wait_for_function`` is an eval, which the page forbids."""
    api = pytest.importorskip("playwright.sync_api")
    api.expect.set_options(timeout=30_000)
    return api.expect(locator)


@dataclasses.dataclass
class Opened:
    """A page in the browser: what it wrote to the console, raised, and requested."""

    page: Any
    said: list[str]
    requested: list[str]


def opened(browser: Any, path: Path, width: int, scheme: str = "light") -> Opened:
    context = browser.new_context(
        viewport={"width": width, "height": 900},
        color_scheme=scheme,
        permissions=["clipboard-read", "clipboard-write"],
    )
    found = Opened(context.new_page(), [], [])
    found.page.on("console", lambda message: found.said.append(message.text))
    found.page.on("pageerror", lambda error: found.said.append(str(error)))
    found.page.on("request", lambda request: found.requested.append(request.url))
    found.page.goto(path.as_uri())
    expect(found.page.locator("html")).to_have_attribute("data-charts", "drawn")
    return found


@pytest.fixture(scope="module")
def every_kind(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("page") / "report.html"
    path.write_text(html(page_of(entries())), encoding="utf-8")
    return path


@pytest.fixture(scope="module")
def wide(browser: Any, every_kind: Path) -> Opened:
    return opened(browser, every_kind, 1280)


@pytest.fixture(scope="module")
def narrow(browser: Any, every_kind: Path) -> Opened:
    return opened(browser, every_kind, 400, "dark")


@pytest.fixture(params=["wide", "narrow"])
def either(request: pytest.FixtureRequest) -> Opened:
    found: Opened = request.getfixturevalue(request.param)
    return found


def test_every_chart_is_drawn_without_an_error_or_a_request(
    either: Opened, every_kind: Path
) -> None:
    page, width = either.page, either.page.viewport_size["width"]
    drawn = page.eval_on_selector_all(
        "[data-chart]", "all => all.map(e => [e.dataset.drawn, e.querySelectorAll('svg *').length])"
    )
    assert len(drawn) == len(page_of(entries()).charts) > 12
    assert all(done == "yes" and parts > 20 for done, parts in drawn)
    assert not either.said
    assert either.requested == [every_kind.as_uri()]
    # Nothing is cut off: neither the page nor a chart is wider than the window.
    assert page.evaluate("document.documentElement.scrollWidth") == width
    right = page.eval_on_selector_all(
        "[data-chart] svg", "all => Math.max(...all.map(e => e.getBoundingClientRect().right))"
    )
    assert right <= width


@pytest.mark.slow
def test_screenshots_are_kept(either: Opened) -> None:
    SCREENSHOTS.mkdir(parents=True, exist_ok=True)
    path = SCREENSHOTS / f"{either.page.viewport_size['width']}.jpg"
    either.page.screenshot(path=path, full_page=True, type="jpeg", quality=75)
    assert path.stat().st_size > 100_000


def test_the_peak_shows_its_owners_on_hover(wide: Opened) -> None:
    page = wide.page
    place = page.locator("figure", has_text="Allocated memory over the step, by kind").first
    place.scroll_into_view_if_needed()
    place.locator("svg g.mark-symbol.role-mark path").first.hover(force=True)
    tip = page.locator("#tip")
    assert tip.is_visible()
    said = tip.inner_text()
    assert said.startswith("Peak") and "owners" in said
    assert entry("plan-v1.json").detail.memory.owners[0].module in said  # type: ignore[union-attr]
    page.keyboard.press("Escape")
    assert not tip.is_visible()


def test_hovering_a_course_shows_the_point_next_to_the_pointer(wide: Opened) -> None:
    place = wide.page.locator("figure", has_text="Time of steps over the run").first
    place.scroll_into_view_if_needed()
    box = place.locator("svg").bounding_box()
    wide.page.mouse.move(box["x"] + box["width"] / 2, box["y"] + box["height"] * 0.7)
    said = wide.page.locator("#tip").inner_text()
    assert re.search(r"step \d+ at ", said)


def test_the_button_copies_the_whole_command(wide: Opened) -> None:
    page = wide.page
    page.evaluate("scrollTo(0, 0)")
    page.locator("button.copy").first.click()
    expect(page.locator("#said")).to_have_text("Copied")
    plan = entry("plan-v1.json").result
    assert page.evaluate("navigator.clipboard.readText()") == plan.launch


def test_colours_follow_the_button(wide: Opened) -> None:
    page = wide.page
    before = page.evaluate("getComputedStyle(document.body).backgroundColor")
    page.locator("#theme").click()
    after = page.evaluate("getComputedStyle(document.body).backgroundColor")
    fill = "getComputedStyle(document.querySelector('.mark-area path')).fill"
    dark = page.evaluate(fill)
    page.locator("#theme").click()
    assert before != after
    assert page.evaluate(fill) != dark


def test_the_page_is_readable_by_keyboard_and_screen_reader(wide: Opened) -> None:
    page = wide.page
    assert page.locator("h1").count() == 1
    assert page.locator("main").count() == 1
    levels = page.eval_on_selector_all("h1, h2, h3", "all => all.map(e => Number(e.tagName[1]))")
    assert all(b <= a + 1 for a, b in itertools.pairwise(levels))
    ids = page.eval_on_selector_all("[id]", "all => all.map(e => e.id)")
    assert len(ids) == len(set(ids))
    unnamed = page.eval_on_selector_all(
        "[data-chart] svg, .scroll, meter, button",
        "all => all.filter(e => !(e.getAttribute('aria-label') || e.textContent.trim()"
        " || e.querySelector('[aria-label]'))).length",
    )
    assert unnamed == 0
    # Each chart has its figures as a table, and a sentence that says what there is to see.
    for figure in page.locator("figure").all():
        assert figure.locator("details table tbody tr").count() > 0
        assert figure.locator("figcaption p").inner_text().strip()
    # Whatever scrolls can be reached by the keyboard.
    assert page.eval_on_selector_all(".scroll, pre", "all => all.every(e => e.tabIndex === 0)")


def test_the_page_prints_in_light_colours_within_the_sheet(narrow: Opened) -> None:
    page = narrow.page
    page.emulate_media(media="print")
    style = "getComputedStyle(document.documentElement).getPropertyValue('--card')"
    assert page.evaluate(style).strip() == "#fff"
    assert not page.locator("nav").is_visible()
    assert not page.locator("button.copy").first.is_visible()
    right = page.eval_on_selector_all(
        "[data-chart] svg", "all => Math.max(...all.map(e => e.getBoundingClientRect().right))"
    )
    assert right <= 400
    page.emulate_media(media="screen")


def test_markup_in_texts_of_users_stays_text(browser: Any, tmp_path: Path) -> None:
    """In every text of every kind of result: names, paths, tracebacks, notes."""
    bad = [
        Entry(f"{each.name}{MARKUP}", tainted(each.result, MARKUP), tainted(each.detail, MARKUP))
        for each in entries()
    ]
    assert sum(MARKUP in text for each in bad for text in texts_of(each.result)) > 300
    path = tmp_path / "bad.html"
    path.write_text(html(page_of(bad)), encoding="utf-8")
    found = opened(browser, path, 1280)
    assert found.page.evaluate("window.hit") is None
    assert found.page.locator("img, iframe, .hit, script[src], link").count() == 0
    assert found.page.locator("script").count() == 3
    assert "{{7*7}}" in found.page.inner_text("main")
    assert not found.said
    assert found.requested == [path.as_uri()]
    for place in found.page.locator("figure").all()[:4]:
        place.scroll_into_view_if_needed()
        box = place.locator("svg").bounding_box()
        found.page.mouse.move(box["x"] + box["width"] / 2, box["y"] + box["height"] / 2)
        found.page.wait_for_timeout(20)
    assert found.page.locator("#tip img").count() == 0
    assert found.page.evaluate("window.hit") is None
    found.page.context.close()
