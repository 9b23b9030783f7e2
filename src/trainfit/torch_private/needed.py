"""How a private name of PyTorch is taken: found at once, or missed by its name."""

from __future__ import annotations

import contextlib
import inspect
import operator
import re
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

from trainfit.torch_private.tested import MissingNameError


class PrivateName(NamedTuple):
    """An attribute that is to be replaced: ``patches.set(*place, value)``."""

    owner: Any
    name: str

    @property
    def now(self) -> Any:
        """What stands there, ours or PyTorch's."""
        return getattr(self.owner, self.name)


@contextlib.contextmanager
def needed() -> Iterator[None]:
    """Names that are looked up inside are needed.

    Raises:
        MissingNameError: One of them is not there.
    """
    try:
        yield
    except (AttributeError, ImportError) as error:
        raise MissingNameError(_named(error)) from error


def place(owner: Any, name: str) -> PrivateName:
    """The attribute ``name`` of a module or class.

    Raises:
        MissingNameError: It is not there.
    """
    if not hasattr(owner, name):
        raise MissingNameError(f"{_path(owner)}.{name}")
    return PrivateName(owner, name)


def attribute(kind: type, name: str) -> Callable[[Any], Any]:
    """What reads the attribute ``name`` of instances of a class, as fast as writing it out.

    Raises:
        MissingNameError: The class does not have it, and its methods do not set it.
    """
    declared = (vars(base).get("__annotations__", ()) for base in kind.__mro__)
    is_there = hasattr(kind, name) or any(name in names for names in declared)
    if not is_there and name not in _mentioned(kind):
        raise MissingNameError(f"{_path(kind)}.{name}")
    return operator.attrgetter(name)


def _mentioned(kind: type) -> set[str]:
    """Names in the Python code of a class's methods: what they set is among them.

    A hooked function (``simgpu.patching``) has the hook's code, and its own in ``__wrapped__``.
    """
    functions = (value for base in kind.__mro__ for value in vars(base).values())
    codes = (
        getattr(inspect.unwrap(each), "__code__", None) for each in functions if callable(each)
    )
    return {name for code in codes if code is not None for name in code.co_names}


def _path(owner: Any) -> str:
    module = getattr(owner, "__module__", None) if isinstance(owner, type) else None
    name = getattr(owner, "__qualname__", None) or getattr(owner, "__name__", None)
    path = f"{module}.{name}" if module else str(name or type(owner).__qualname__)
    return path if path.startswith("torch") else f"torch's {path}"


def _named(error: AttributeError | ImportError) -> str:
    if isinstance(error, AttributeError):
        return f"{_path(error.obj)}.{error.name}" if error.name else str(error)
    name = re.match(r"cannot import name '(\w+)'", str(error))
    return f"{error.name}.{name[1]}" if name and error.name else error.name or str(error)
