"""The report page of a large job: how long it takes, how big it is, and how soon it is drawn.

A recording of 200,000 allocations (two steps of 5000 modules) becomes a page by `trainfit report`,
once with an empty cache, which is the first page on a machine, and once more. Chromium then opens
it: the time until the last chart is drawn, without the browser's start.

    python bench/report_page.py [--quick] [--json]
"""

from __future__ import annotations

import shutil
import sys
import tempfile
import time
from pathlib import Path

from _bench import BenchFigure, finish, quick_options, say, trainfit

from helpers_page import large_recording

ALLOCATIONS = 200_000
#: Seconds and MB, of the issue that asked for the page.
SECONDS, MEGABYTES = 5.0, 5.0
BROWSERS = ("chromium", "chromium-browser", "google-chrome")


def main() -> int:
    """Measure and print."""
    options = quick_options(__doc__)
    with tempfile.TemporaryDirectory() as folder:
        recording, page = Path(folder) / "large.trainfit", Path(folder) / "large.html"
        large_recording(ALLOCATIONS).save(recording)
        first = seconds_of(recording, page, folder)
        again = seconds_of(recording, page, folder)
        figures = [
            BenchFigure("first page on a machine", first, SECONDS, True, " s"),
            BenchFigure("page", again, SECONDS, True, " s"),
            BenchFigure("size", page.stat().st_size / 1e6, MEGABYTES, True, " MB"),
        ]
        drawn = drawn_after(page)
    if drawn is None:
        say("no browser: the time until it is drawn was not measured")
    else:
        figures.append(BenchFigure("drawn after", drawn, SECONDS, True, " s"))
    return finish(figures, options.json, {"allocations": ALLOCATIONS})


def seconds_of(recording: Path, page: Path, cache: str) -> float:
    """Of the whole command."""
    cached = {"XDG_CACHE_HOME": cache}
    began = time.perf_counter()
    trainfit("report", str(recording), "-o", str(page), check=True, env=cached)
    return time.perf_counter() - began


def drawn_after(page: Path) -> float | None:
    """Seconds from opening the file to the last chart; ``None`` without a browser."""
    program = next(filter(None, map(shutil.which, BROWSERS)), None)
    if program is None:
        return None
    from playwright.sync_api import sync_playwright

    with sync_playwright() as started:
        browser = started.chromium.launch(executable_path=program, args=["--no-sandbox"])
        opened = browser.new_page()
        began = time.perf_counter()
        opened.goto(page.as_uri())
        opened.wait_for_selector("html[data-charts=drawn]", timeout=60_000)
        seconds = time.perf_counter() - began
        browser.close()
    return seconds


if __name__ == "__main__":
    sys.exit(main())
