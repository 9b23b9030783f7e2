"""hypothesis' examples in `make test` are the same whatever was imported before."""

from __future__ import annotations

import sys
import types
from pathlib import Path

import pytest
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

#: A module of this many integers: a tenth of the examples would be one of them.
CONSTANTS = range(10**6, 10**6 + 50)


def _examples() -> list[int]:
    seen = []

    @settings(max_examples=200, phases=[Phase.generate])
    @given(st.integers())
    def one(value: int) -> None:
        seen.append(value)

    one()
    return seen


def test_they_do_not_depend_on_imported_modules(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = _examples()
    module = types.ModuleType("a_local_module")
    module.__file__ = str(tmp_path / "a_local_module.py")
    Path(module.__file__).write_text(f"CONSTANTS = {list(CONSTANTS)}\n")
    monkeypatch.setitem(sys.modules, module.__name__, module)
    assert _examples() == before
    assert not set(CONSTANTS) & set(before)


def test_none_of_them_is_timed() -> None:
    assert settings.default is not None
    assert settings.default.deadline is None
    assert HealthCheck.too_slow in settings.default.suppress_health_check
