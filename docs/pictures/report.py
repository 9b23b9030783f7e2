"""Draw docs/pictures/report.jpg: a page of `trainfit report` as a browser shows it, abridged.

python docs/pictures/report.py plan.html
"""

from __future__ import annotations

import shutil
import sys
from pathlib import Path

from playwright.sync_api import sync_playwright

SIDE = 1180
#: The section below the answer; the ones before it are left out of the picture.
SHOWN = "Memory over the step"
LEAVE_OUT = """shown => {
    const sections = [...document.querySelectorAll("section")];
    const last = sections.findIndex(s => s.querySelector("h2")?.textContent.includes(shown));
    sections.slice(0, last).filter(s => s.querySelector("h2")).forEach(s => s.remove());
}"""


def main() -> None:
    """Write the picture next to this file."""
    page_file = Path(sys.argv[1]).resolve()
    programs = ("chromium", "chromium-browser", "google-chrome")
    program = next(filter(None, map(shutil.which, programs)), None)
    if program is None:
        raise SystemExit(f"no browser: none of {', '.join(programs)} is on PATH")
    with sync_playwright() as started:
        # A container's root has no user namespaces for the sandbox; the page is our own.
        browser = started.chromium.launch(executable_path=program, args=["--no-sandbox"])
        page = browser.new_page(viewport={"width": SIDE, "height": SIDE})
        page.goto(page_file.as_uri())
        chart = page.locator("section", has_text=SHOWN).locator("svg.marks, canvas").first
        chart.wait_for(timeout=60_000)
        page.evaluate(LEAVE_OUT, SHOWN)
        size = chart.bounding_box()
        if size is None:
            raise SystemExit(f"{page_file}: the chart {SHOWN!r} is not visible")
        # The owners at this moment are shown as a reader sees them who points at the curve.
        page.mouse.move(size["x"] + 0.5 * size["width"], size["y"] + 0.3 * size["height"])
        page.wait_for_timeout(500)
        page.screenshot(path=Path(__file__).with_name("report.jpg"), type="jpeg", quality=80)
        browser.close()


if __name__ == "__main__":
    main()
