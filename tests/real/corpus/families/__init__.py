"""All families, in the order in which they are run."""

from __future__ import annotations

from importlib import import_module

from corpus.family import Family

#: Modules with a tuple ``FAMILIES``.
SUBJECTS = ("first", "vision", "language", "large_models", "others", "refused")


def all_families() -> tuple[Family, ...]:
    """Every family, each under a name of its own."""
    found = tuple(
        each
        for subject in SUBJECTS
        for each in import_module(f"corpus.families.{subject}").FAMILIES
    )
    names = [each.name for each in found]
    doubled = {name for name in names if names.count(name) > 1}
    if doubled:
        raise ValueError(f"two families are called {', '.join(sorted(doubled))}")
    return found
