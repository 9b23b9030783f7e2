"""Files by which our processes hand each other requests and outcomes."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any


def as_json(value: Any) -> str:
    """A dataclass as JSON."""
    return json.dumps(dataclasses.asdict(value), allow_nan=False)


def write_whole(path: Path, text: str) -> None:
    """The file appears whole or not at all: another process waits for it."""
    scratch = path.with_suffix(".part")
    scratch.write_text(text)
    scratch.replace(path)
