"""The commands that README and docs show: each is one that this version takes."""

from __future__ import annotations

import contextlib
import io
import re
import shlex
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest

from helpers_cli import ROOT
from trainfit.cli.parser import read_words
from trainfit.results.files.errors import TrainfitError

TUTORIAL = ROOT / "docs" / "getting-started.md"
PAGES = [
    ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md")),
    *sorted((ROOT / "docs" / "guide").glob("*.md")),
    *sorted((ROOT / "docs" / "how-it-works").glob("*.md")),
]  # fmt: skip


def commands(page: Path) -> Iterator[str]:
    """Lines of code blocks that begin with `trainfit`, continued lines joined, remarks left out."""
    fenced, text = False, ""
    for line in page.read_text("utf-8").splitlines():
        if line.startswith("```"):
            fenced = not fenced
            continue
        if not (fenced or line.startswith("    ")):
            text = ""
            continue
        text += line.strip()
        if text.endswith("\\"):
            text = text[:-1]
            continue
        if text.startswith("trainfit "):
            yield text.partition("  #")[0].strip()
        text = ""


COMMANDS = [
    pytest.param(command, id=f"{page.relative_to(ROOT)}: {command}"[:120])
    for page in PAGES
    for command in commands(page)
]


def test_there_are_commands_to_look_at() -> None:
    assert len(COMMANDS) > 60
    assert len(list(commands(TUTORIAL))) >= 8


@pytest.mark.parametrize("command", COMMANDS)
def test_its_options_are_known(command: str) -> None:
    words = shlex.split(command)[1:]
    said = io.StringIO()
    try:
        with contextlib.redirect_stderr(said):
            read_words(words)
    except (SystemExit, TrainfitError) as error:
        pytest.fail(f"{command}: {said.getvalue().strip() or error}")


#: Where the project is read: links to it hold on GitHub and on a package index.
REPOSITORY = "https://github.com/trainfit/trainfit"
LINK = re.compile(r"\]\(([^)\s]+)\)|(?<=src=\")[^\"]+")


def target(link: str) -> Path | None:
    """The file of this repository that a link is to; None for another place."""
    raw = REPOSITORY.replace("github.com", "raw.githubusercontent.com") + "/main/"
    for start in (f"{REPOSITORY}/blob/main/", f"{REPOSITORY}/tree/main/", raw):
        if link.startswith(start):
            return ROOT / link.removeprefix(start).partition("#")[0]
    return None


def links(page: Path) -> list[str]:
    return [link for link in LINK.findall(page.read_text("utf-8")) if link]


def anchors(page: Path) -> set[str]:
    """What GitHub calls the headings of a page, and what the site does."""
    headings = re.findall(r"^#+ (.+)$", page.read_text("utf-8"), flags=re.MULTILINE)
    words = [re.sub(r"[^\w -]", "", heading.lower()) for heading in headings]
    return {form for text in words for form in (text.replace(" ", "-"), re.sub("[ -]+", "-", text))}


def test_links_of_the_readme_hold_on_a_package_index() -> None:
    found = links(ROOT / "README.md")
    assert len(found) > 20
    for link in found:
        assert link.startswith("https://"), f"{link}: an index shows the README without its folder"
        path = target(link)
        assert path is None or path.exists(), link


def test_addresses_of_the_project_are_files_of_it() -> None:
    urls = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]["urls"]
    assert set(urls) == {"Homepage", "Documentation", "Repository", "Issues", "Changelog"}
    for url in urls.values():
        path = target(url)
        assert path.is_file() if path else url in (REPOSITORY, f"{REPOSITORY}/issues"), url


@pytest.mark.parametrize("page", PAGES[1:], ids=lambda page: str(page.relative_to(ROOT)))
def test_links_of_the_pages_are_to_something(page: Path) -> None:
    for link in links(page):
        path, _, anchor = link.partition("#")
        if link.startswith(f"{REPOSITORY}#"):
            assert anchor in anchors(ROOT / "README.md"), link
        elif "://" in link:
            there = target(link)
            assert there is None or there.exists(), link
        else:
            there = (page.parent / path).resolve() if path else page
            assert there.exists(), link
            assert not anchor or there.suffix != ".md" or anchor in anchors(there), link
