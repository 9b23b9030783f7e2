"""What a user names as MODULE:CALLABLE or path/to/file.py:CALLABLE: found, imported, called."""

from __future__ import annotations

import contextlib
import difflib
import importlib
import inspect
import io
import os
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any, Final, NoReturn

from trainfit.results.files.errors import TrainfitError
from trainfit.results.text import exception_text, one_line
from trainfit.scripts.fault import own_fault, script_traceback
from trainfit.simgpu.device.user_location import line_of_user

#: Names that are listed of a module that lacks the one asked for.
_LISTED: Final = 6


class UnknownNameError(TrainfitError):
    """A name that leads nowhere."""


class UserCodeError(TrainfitError):
    """The user's code raised while it was imported or called; ``script_output`` is the traceback
    of its own frames, empty where the message says it all."""

    def __init__(self, message: str, script_output: str = "") -> None:
        super().__init__(message)
        self.script_output = script_output


def named(place: str, option: str, example: str) -> Any:
    """The object that ``place`` names.

    Args:
        option: the option that it was given with, for messages: "--loader".
        example: a name as it should be: "data.py:make_loader".

    Raises:
        UnknownNameError: a name without a colon, a file, module or attribute that is not there.
        UserCodeError: the module cannot be imported.
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
            raise UnknownNameError(f"{said}: {source} has no {part!r}; {_others(value, part)}")
        value = getattr(value, part)
    return value


def called(said: str, function: Callable[..., Any], *arguments: Any) -> Any:
    """Call what the user has named, ``said`` how.

    Raises :class:`UserCodeError` for what it raises, and :class:`UnknownNameError` where it is not
    called with so many arguments.
    """
    check_arguments(said, function, len(arguments))
    try:
        return function(*arguments)
    except SystemExit as error:
        raise UserCodeError(f"{said} exited (exit code {error.code}) where it was called") from None
    except Exception as error:
        _raise(said, "failed", error)


def check_arguments(said: str, function: Callable[..., Any], count: int) -> None:
    """Raise :class:`UnknownNameError` for a function that needs more arguments, or takes fewer."""
    try:
        signature = inspect.signature(function)
    except (TypeError, ValueError):  # written in C: it will say so itself
        return
    try:
        signature.bind(*[None] * count)
    except TypeError as error:
        with_what = {0: "without arguments", 1: "with one argument"}.get(count, f"with {count}")
        raise UnknownNameError(
            f"{said} is called {with_what}, and its signature is {one_line(str(signature))} "
            f"({error}); name a function that suits"
        ) from None


def _raise(phrase: str, what: str, error: Exception) -> NoReturn:
    if isinstance(error, TrainfitError) or own_fault(error, (__file__,)) is not None:
        raise error
    place = line_of_user(error.__traceback__)
    if isinstance(error, SyntaxError) and error.filename:
        place = f"{error.filename}:{error.lineno}"
    at = f" at {place}" if place else ""
    raised = one_line(exception_text(type(error).__name__, error))
    if isinstance(error, SyntaxError | ImportError):
        raise UserCodeError(f"{phrase} {what}{at} ({raised}); fix that line, then try once more")
    text = script_traceback(error)
    raise UserCodeError(f"{phrase} {what}{at} ({raised}); its traceback is below", text) from error


def _module(text: str, source: str) -> ModuleType:
    """Import it as any other would: workers started by spawn do so again."""
    sys.path[0] = os.getcwd()
    name = source
    if source.endswith(".py"):
        path = Path(source)
        if not path.is_file():
            raise UnknownNameError(f"{text}: there is no file {source!r}; check the path")
        sys.path[0] = str(path.resolve().parent)
        name = path.stem
    module = _imported(text, source, name)
    if source.endswith(".py") and not _is_of(module, Path(source)):
        raise UnknownNameError(f"{text}: Python has another module {name!r}; rename the file")
    return module


def _imported(text: str, source: str, name: str) -> ModuleType:
    if name.startswith(".") or ("/" in source and not source.endswith(".py")):
        what = "a folder" if os.path.isdir(source) else "neither a .py file nor a module"
        raise UnknownNameError(
            f"{text}: {source!r} is {what}; write a file or a module before the colon, as in "
            "policy.py:act"
        )
    # What reads the command line there would read trainfit's.
    sys.argv = [source]
    # A parser that refuses prints its usage, which is of no use to who did not call it.
    printed = io.StringIO()
    try:
        try:
            with contextlib.redirect_stderr(printed):
                module = importlib.import_module(name)
        except SystemExit as error:
            last = next(iter(reversed(printed.getvalue().split("\n")[:-1])), "")
            printed.truncate(0)
            why = one_line(f"exit code {error.code}" + (f": {last}" if last else ""))
            raise UserCodeError(
                f"{text}: {source} exits when it is imported ({why}); put what it runs below "
                'if __name__ == "__main__":'
            ) from None
        finally:
            sys.stderr.write(printed.getvalue())
    except ModuleNotFoundError as error:
        if error.name is not None and f"{name}.".startswith(f"{error.name}."):
            raise UnknownNameError(
                f"{text}: there is no module {error.name!r}; check the name, or give the file's "
                f"path (the working directory is {os.getcwd()})"
            ) from None
        _raise(text, "could not be imported", error)
    except Exception as error:
        _raise(text, "could not be imported", error)
    return module


def _is_of(module: ModuleType, path: Path) -> bool:
    file = getattr(module, "__file__", None)
    return file is not None and Path(file).resolve() == path.resolve()


def _others(value: Any, name: str) -> str:
    """What there is in place of a name that is not there."""
    there = [each for each in vars(value) if not each.startswith("_")] if _has_names(value) else []
    near = difflib.get_close_matches(name, there, n=1)
    if near:
        return f"did you mean {near[0]!r}?"
    module = getattr(value, "__name__", "")
    own = [each for each in there if callable(getattr(value, each))
           and getattr(getattr(value, each), "__module__", "") == module]  # fmt: skip
    more = ", …" if len(own) > _LISTED else ""
    return f"it has {', '.join(own[:_LISTED])}{more}" if own else "check the name"


def _has_names(value: Any) -> bool:
    return hasattr(value, "__dict__")
