"""What a user names as MODULE:CALLABLE or path/to/file.py:CALLABLE."""

from __future__ import annotations

import importlib
import os
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

from trainfit.results.files.errors import TrainfitError


class UnknownNameError(TrainfitError):
    """A name that leads nowhere."""


def named(place: str, option: str, example: str) -> Any:
    """The object that ``place`` names; what its module raises while it is imported comes through.

    Args:
        option: the option that it was given with, for messages: "--loader".
        example: a name as it should be: "data.py:make_loader".

    Raises:
        UnknownNameError: a name without a colon, a file, module or attribute that is not there.
    """
    source, _, name = place.rpartition(":")
    said = f"{option} {place!r}".strip()
    if not source or not name:
        raise UnknownNameError(
            f"{said}: write MODULE:CALLABLE or path/to/file.py:CALLABLE, as in "
            f"{f'{option} {example}'.strip()}"
        )
    value: Any = _module(said, source)
    for part in name.split("."):
        if not hasattr(value, part):
            raise UnknownNameError(f"{said}: {source} has no {part!r}; check the name")
        value = getattr(value, part)
    return value


def _module(said: str, source: str) -> ModuleType:
    """Import it as any other would: workers started by spawn do so again."""
    sys.path[0] = os.getcwd()
    name = source
    if source.endswith(".py"):
        path = Path(source)
        if not path.is_file():
            raise UnknownNameError(f"{said}: there is no file {source!r}; check the path")
        sys.path[0] = str(path.resolve().parent)
        name = path.stem
    try:
        module = importlib.import_module(name)
    except ModuleNotFoundError as error:
        if error.name is not None and f"{name}.".startswith(f"{error.name}."):
            raise UnknownNameError(
                f"{said}: there is no module {error.name!r}; check the name, or give the file's "
                f"path (the working directory is {os.getcwd()})"
            ) from None
        raise
    if source.endswith(".py") and not _is_of(module, Path(source)):
        raise UnknownNameError(f"{said}: Python has another module {name!r}; rename the file")
    return module


def _is_of(module: ModuleType, path: Path) -> bool:
    file = getattr(module, "__file__", None)
    return file is not None and Path(file).resolve() == path.resolve()
