"""An option of a script's own command line."""

from __future__ import annotations

import dataclasses


@dataclasses.dataclass(frozen=True)
class ScriptOption:
    """An option that a script's own command line understands.

    ``flags`` are its spellings ("--num_workers", "-j"; a plain name for ``name=value`` words),
    ``name`` the attribute that its parser gives it, ``value`` what it had in the run as text
    (``None``: None), ``given`` whether the command says it, or it is the default. ``choices`` are
    its allowed values (none: any). ``switch``: it has no value.

    ``default`` is what it has where the command does not say it. ``off`` are spellings without a
    value that make it false ("--no-amp"). ``bare``: it may stand with a value and without.
    ``type`` is the name of what reads its value ("int", "str2bool"; empty: not known); "bool" is
    Python's, for which every text but the empty one is true. ``ahead``: it must come before the
    script's other arguments (a subcommand parses what follows it).
    """

    flags: tuple[str, ...]
    name: str
    value: str | None
    given: bool
    choices: tuple[str, ...] = ()
    switch: bool = False
    default: str | None = None
    off: tuple[str, ...] = ()
    bare: bool = False
    type: str = ""
    ahead: bool = False
