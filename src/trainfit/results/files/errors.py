"""Errors that a user can act on: each is one line with input, reason and remedy."""

from __future__ import annotations

from pathlib import Path


class TrainfitError(Exception):
    """Bad input or a run that could not be made; ``exit_code`` is what the CLI returns."""

    exit_code = 2


class ResultFileError(TrainfitError):
    """A result file that cannot be read: missing, damaged, foreign or too new."""

    def __init__(self, path: Path, reason: str, remedy: str) -> None:
        super().__init__(f"result file {str(path)!r}: {reason}; {remedy}")
        self.path = path
