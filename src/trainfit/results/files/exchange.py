"""Files by which our processes hand each other requests and outcomes."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any, Self

from trainfit.results.files.decoding import decode


def as_json(value: Any) -> str:
    """A dataclass as JSON."""
    return json.dumps(dataclasses.asdict(value), allow_nan=False)


def write_whole(path: Path, text: str) -> None:
    """The file appears whole or not at all: another process waits for it."""
    scratch = path.with_suffix(".part")
    scratch.write_text(text)
    scratch.replace(path)


class Exchanged:
    """A dataclass that one of our processes hands another as JSON, without format and version."""

    def to_json(self) -> str:
        """On one line."""
        return as_json(self)

    @classmethod
    def from_json(cls, text: str) -> Self:
        """The reverse; raises ``ValueError`` for other text."""
        return decode(cls, json.loads(text))

    def save(self, path: Path) -> None:
        """Write it; the file appears whole or not at all."""
        write_whole(path, self.to_json())

    @classmethod
    def load(cls, path: Path) -> Self:
        """Raises ``OSError`` where there is none yet."""
        return cls.from_json(path.read_text())
