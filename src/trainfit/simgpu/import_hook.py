"""Calls back when a module has been imported, if it ever is."""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import importlib.util
import sys
from collections.abc import Callable
from types import ModuleType
from typing import Any


class ImportHook(importlib.abc.MetaPathFinder):
    """Calls ``seen`` with the module ``name``: now where it is imported already, else as soon as
    it has been."""

    def __init__(self, name: str, seen: Callable[[ModuleType], None]) -> None:
        self._name = name
        self._seen = seen
        self._busy = False

    def install(self) -> None:
        """Watch from now on, until :meth:`remove`."""
        if self._name in sys.modules:
            self._seen(sys.modules[self._name])
        else:
            sys.meta_path.insert(0, self)

    def remove(self) -> None:
        """Stop watching; safe to call twice."""
        if self in sys.meta_path:
            sys.meta_path.remove(self)

    def find_spec(
        self, name: str, path: Any = None, target: Any = None
    ) -> importlib.machinery.ModuleSpec | None:
        """The other finders' spec of the module, whose loader calls us when it is done."""
        if name != self._name or self._busy:
            return None
        self._busy = True
        try:
            spec = importlib.util.find_spec(name)
        finally:
            self._busy = False
        if spec is not None and spec.loader is not None:
            execute = spec.loader.exec_module

            loader = spec.loader

            def exec_module(module: ModuleType) -> None:
                vars(loader).pop("exec_module", None)  # it stays in the module's __spec__
                execute(module)
                if self in sys.meta_path:
                    self._seen(module)

            spec.loader.exec_module = exec_module  # type: ignore[method-assign]
        return spec
