"""Which words of a command are marked by their options' names alone."""

from __future__ import annotations

import pytest

from trainfit.plan.command.options import marked
from trainfit.plan.command.tunables import fill, placeholders

pytestmark = pytest.mark.usefixtures("script")


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (("--num-workers", "4"), ("--num-workers", "{num_workers:4}")),
        (("--seed=1", "-j=2"), ("--seed=1", "-j={num_workers:2}")),
        (("++data.num_workers=4",), ("++data.num_workers={num_workers:4}",)),
        (("--pin_memory=false",), ("--pin_memory={pin_memory:false}",)),
        (("--prefetch-factor=3",), ("--prefetch-factor={prefetch_factor:3}",)),
    ],
)
def test_options_of_a_loader_by_name(words: tuple[str, ...], expected: tuple[str, ...]) -> None:
    found = marked(["python", "train.py", *words])
    assert found == ("python", "train.py", *expected)
    assert [fill(word, placeholders(found)) for word in found] == ["python", "train.py", *words]


@pytest.mark.parametrize(
    "words",
    [
        ("--workers=2", "--num_workers=4"),  # which?
        ("--w={num_workers:2}", "--num_workers=4"),  # the user said which
        ("--num_workers", "auto"),
        ("--val-workers=3", "--pin-memory", "--batch-size=8"),
        ("--", "--num-workers=4"),
        ("--num_workers={num_worker:4}",),  # misspelt, and said by who reads it
    ],
)
def test_what_stays_as_it_is(words: tuple[str, ...]) -> None:
    assert marked(["python", "train.py", *words]) == ("python", "train.py", *words)


def test_a_command_that_is_not_understood_may_run_all_the_same() -> None:
    for words in (("no-such-program", "--workers=2"), ("python", "other.py", "-j", "2"), ()):
        assert marked(words) == words
