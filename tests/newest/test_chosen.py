"""The tests that run on the newest PyTorch use every private name (``make test-newest``)."""

from __future__ import annotations

import itertools
from pathlib import Path

from tests.newest import touched

CHOSEN = Path(__file__).with_name("chosen.txt").read_text().split()


def test_what_is_chosen_is_there() -> None:
    assert all((touched.ROOT / path).exists() for path in CHOSEN)
    assert len(set(CHOSEN)) == len(CHOSEN)


def test_every_name_of_the_room_is_taken_outside_of_it() -> None:
    taken = touched.uses()
    assert [name for name in sorted(touched.names()) if name not in taken] == []
    assert touched.UNREACHED.keys() <= touched.names()


def test_a_name_counts_as_used_where_a_line_ran_that_takes_it() -> None:
    every: dict[Path, set[int]] = {}
    for use in itertools.chain.from_iterable(touched.uses().values()):
        every.setdefault(use.path, set()).add(use.line)
    assert touched.untouched(every) == {}
    missed = touched.untouched({})
    assert missed.keys() == touched.names() - touched.UNREACHED.keys()
    assert all(missed.values())
