"""Every family of the corpus: `make test-real`, not part of `make test`."""

from __future__ import annotations

import pytest

from corpus.families import all_families
from corpus.family import Family
from corpus.page import write_page
from corpus.results import measure


@pytest.fixture(scope="module", autouse=True)
def _page():
    yield
    write_page()


@pytest.mark.parametrize("family", all_families(), ids=lambda family: family.name)
def test_family(family: Family) -> None:
    if lacking := family.lacking():
        pytest.skip(f"{family.name} needs {lacking}")
    outcome = measure(family)
    assert outcome.failure == "" or outcome.verdict == "refused", outcome.failure
    assert outcome.wrong == (), [each for each in outcome.checks if each.name in outcome.wrong]
    assert outcome.files_changed == ()
    assert outcome.independent is not False, outcome.recommended
    assert outcome.right, f"{outcome.verdict}, expected {outcome.expected}"
