"""Draw docs/pictures/report.jpg: the head of a page of `trainfit report`, as a browser shows it.

python docs/pictures/report.py plan.html
"""

from __future__ import annotations

import shutil
import sys
from pathlib import Path

from playwright.sync_api import sync_playwright

SIDE = 1180


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
        page.wait_for_selector("svg.marks, canvas", timeout=60_000)
        path = Path(__file__).with_name("report.jpg")
        page.screenshot(path=path, type="jpeg", quality=80)
        browser.close()


if __name__ == "__main__":
    main()
