"""Types the commands of a page of the documentation, in order, and looks at its sample screens."""

from __future__ import annotations

import ast
import re
import shlex
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final, Literal

from _walk_pages import Picture, PythonBlock, SavedFile, Screen, TypedCommand, parts
from _walk_place import ROOT, CloneFolder, Done
from _walk_screens import different, rewritten

#: Where a new reader starts, and the order of the site from there.
_FIRST: Final = ("README.md", "docs/index.md", "docs/getting-started.md")
Kind = Literal["command", "screen", "python", "picture"]
Verdict = Literal["ok", "failed", "differs", "not run"]


@dataclass(frozen=True)
class PartOutcome:
    """What became of one part of a page."""

    page: str
    line: int
    kind: Kind
    text: str
    verdict: Verdict
    #: Why it was not run, or the lines that show the failure.
    note: str = ""
    seconds: float = 0.0

    @property
    def row(self) -> str:
        """One line, and the note below it where something is wrong."""
        place = f"{self.page}:{self.line}"
        line = f"{self.verdict:<8} {self.seconds:6.1f} s  {place:<34} {self.kind:<8} {self.text}"
        wrong = self.verdict in ("failed", "differs")
        return line + ("\n    " + self.note.replace("\n", "\n    ") if wrong else "")


def pages() -> list[str]:
    """README, the home page, Getting started, the guides in the order of the site, the example."""
    site = (ROOT / "mkdocs.yml").read_text("utf-8")
    guides = re.findall(r": ((?:guide/\S+|agents)\.md)$", site, re.MULTILINE)
    return [*_FIRST, *(f"docs/{guide}" for guide in guides), "examples/act/README.md"]


def everything(_: str) -> bool:
    """Type all commands."""
    return True


@dataclass
class Walk:
    """A walk through pages in one place.

    ``exact``: figures of samples count, where the machine does not decide them. They hold for the
    PyTorch that the samples were made with.
    """

    place: CloneFolder
    exact: bool = True
    #: Which commands are typed; a screen is looked at where its command was.
    wanted: Callable[[str], bool] = everything
    #: Are the pictures drawn?
    pictures: bool = False
    limit_s: float = 900.0
    #: New texts of screens by page, for :meth:`write`.
    _written: dict[str, list[tuple[Screen, list[str]]]] = field(default_factory=dict)

    def prepare(self) -> None:
        """Have what README's reader has: the environment, the files, the example's data."""
        self.save_files()
        self._must("python examples/act/make_dataset.py --out data/act-example")

    def save_files(self) -> None:
        """Activate the environment and save the files of README, nothing more."""
        self._must(". .venv/bin/activate")
        for part in parts((ROOT / "README.md").read_text("utf-8")):
            if isinstance(part, SavedFile):
                self.place.save(part.name, part.text)

    def page(self, name: str) -> Iterator[PartOutcome]:
        """Walk one page; its outcomes as they come."""
        done: dict[str, Done] = {}
        left: dict[str, str] = {}
        pictures: list[Picture] = []
        for part in parts((ROOT / name).read_text("utf-8")):
            match part:
                case SavedFile():
                    self.place.save(part.name, part.text)
                case TypedCommand():
                    yield self._command(name, part, done, left)
                case Screen():
                    yield self._screen(name, part, done, left)
                case PythonBlock():
                    yield self._python(name, part)
                case Picture():
                    pictures.append(part)
        # Last: README's stands above the script that it shows.
        for picture in pictures if self.pictures else ():
            yield self._typed(name, picture.line, "picture", picture.command, {0})

    def write(self) -> list[str]:
        """Put what was printed into the pages; their names."""
        for name, screens in self._written.items():
            lines = (ROOT / name).read_text("utf-8").split("\n")
            for screen, text in reversed(screens):
                new = [f"{screen.indent}{line}".rstrip() for line in text]
                lines[screen.first : screen.end] = new
            (ROOT / name).write_text("\n".join(lines), "utf-8")
        return list(self._written)

    def _must(self, text: str) -> None:
        done = self.place.run(text, self.limit_s)
        if done.code:
            raise RuntimeError(f"{text}: exit code {done.code}: {done.last_words}")

    def _command(
        self, page: str, part: TypedCommand, done: dict[str, Done], left: dict[str, str]
    ) -> PartOutcome:
        reason = part.reason
        reason = reason or self.place.has(part.text)
        if reason is None and not self.wanted(part.text):
            reason = "left out of this walk"
        if reason is not None:
            left[part.text] = reason
            return PartOutcome(page, part.line, "command", part.text, "not run", reason)
        return self._typed(page, part.line, "command", part.text, part.codes, done)

    def _typed(
        self,
        page: str,
        line: int,
        kind: Kind,
        text: str,
        codes: frozenset[int] | set[int],
        done: dict[str, Done] | None = None,
    ) -> PartOutcome:
        ended = self.place.run(text, self.limit_s)
        if done is not None:
            done[text] = ended
        if ended.code in codes and "Traceback" not in ended.err:
            return PartOutcome(page, line, kind, text, "ok", seconds=ended.seconds)
        last = "\n".join((ended.out + ended.err).splitlines()[-12:])
        note = f"exit code {ended.code}\n{last}"
        return PartOutcome(page, line, kind, text, "failed", note, ended.seconds)

    def _screen(
        self, page: str, part: Screen, done: dict[str, Done], left: dict[str, str]
    ) -> PartOutcome:
        text = f"what `{part.command}` prints"
        if part.command in left:
            return PartOutcome(page, part.first, "screen", text, "not run", left[part.command])
        if part.command not in done:
            if not self.wanted(part.command):
                why = "left out of this walk"
                return PartOutcome(page, part.first, "screen", text, "not run", why)
            done[part.command] = self.place.run(part.command, self.limit_s)
        printed = done[part.command].out.splitlines()
        # What a failed command printed is no sample.
        if done[part.command].code in (0, 1):
            self._written.setdefault(page, []).append((part, rewritten(part.text, printed)))
        missing = different(part.text, printed, part.measured or not self.exact)
        if not missing:
            return PartOutcome(page, part.first, "screen", text, "ok")
        return PartOutcome(page, part.first, "screen", text, "differs", "\n".join(missing))

    def _python(self, page: str, part: PythonBlock) -> PartOutcome:
        first = part.text.partition("\n")[0]
        try:
            ast.parse(part.text)
        except SyntaxError as error:
            return PartOutcome(page, part.line, "python", first, "failed", str(error))
        if part.reason is not None or not self.wanted("python block"):
            why = part.reason or "left out of this walk"
            return PartOutcome(page, part.line, "python", first, "not run", why)
        file = Path(self.place.folder) / f"block-{Path(page).stem}-{part.line}.py"
        file.write_text(part.text, "utf-8")
        outcome = self._typed(page, part.line, "python", f"python {shlex.quote(str(file))}", {0})
        return PartOutcome(
            page, part.line, "python", first, outcome.verdict, outcome.note, outcome.seconds
        )
