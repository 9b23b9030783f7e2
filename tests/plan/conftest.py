"""What tests of commands share."""

from __future__ import annotations

from pathlib import Path

import pytest


@pytest.fixture
def script(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An empty ``train.py`` in the folder that commands run in."""
    (tmp_path / "train.py").touch()
    monkeypatch.chdir(tmp_path)
