"""Texts that ``generate()`` of Transformers makes, without it."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from trainfit.scripts.caches import cache_among


@pytest.mark.parametrize("name", ["cache", "past_key_values"])
def test_a_cache_is_found_by_the_name_of_each_version(name: str) -> None:
    """An assistant's is held until its text's end: unfound it would not be filled."""
    cache = object()
    found: Any = SimpleNamespace(sequences=object(), **{name: cache})
    assert cache_among(vars(found)) is cache
    assert cache_among({"cache": None, name: cache}) is cache
    assert cache_among({"attention_mask": object(), "cache": None}) is None
