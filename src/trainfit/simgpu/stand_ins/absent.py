"""Packages that a script wants and that are not installed here: stand-ins take their place.

They are asked for by name (``STAND_INS_VARIABLE``): a script that goes on without a package does
so in the simulation, too, as it does where it runs.
"""

from __future__ import annotations

import dataclasses
import importlib.abc
import importlib.machinery
import importlib.metadata
import importlib.util
import os
import sys
from collections.abc import Callable, Collection, Iterator, Mapping
from pathlib import Path
from types import FrameType, ModuleType
from typing import Any, Final

import torch

from trainfit.results.runs.script import STAND_INS_VARIABLE

#: Frames of the import system between a question for a package and our finder.
_FRAMES: Final = 6


@dataclasses.dataclass(frozen=True)
class AbsentPackage:
    """A package that is not installed.

    Attributes:
        distribution: its name on PyPI, and the version that is told.
        parts: for each of its modules by its whole name the names in it; ``made`` on import.
        assumption: what the result has to state.
    """

    distribution: str
    version: str
    parts: Callable[[], Mapping[str, Mapping[str, Any]]]
    assumption: str = "its operators' shapes, FLOPs and memory are those of the package"


def named_in(environment: Mapping[str, str]) -> tuple[str, ...]:
    """The packages that stand-ins take the place of, by ``STAND_INS_VARIABLE``."""
    words = environment.get(STAND_INS_VARIABLE, "").split(",")
    return tuple(dict.fromkeys(word.strip() for word in words if word.strip()))


class AbsentPackages(importlib.metadata.DistributionFinder):
    """Comes last of all finders, so that what is installed is found before.

    ``asked`` are the packages of :data:`known` that were looked for and are not there; those of
    ``imported`` by an import, not by a question whether they are there, each with the modules that
    were being imported then (empty: none was).
    """

    def __init__(self, known: Mapping[str, AbsentPackage], assume: Callable[[str], None]) -> None:
        self._known, self._assume = known, assume
        self._chosen = [name for name in named_in(os.environ) if name in known]
        self._parts: dict[str, Mapping[str, Any]] = {}
        self.asked: dict[str, None] = {}
        self.imported: dict[str, set[str]] = {}

    def install(self) -> None:
        """Install the finder, until :meth:`remove`."""
        sys.meta_path.append(self)

    def choose(self, name: str) -> None:
        """A stand-in takes the place of this package, too, from now on."""
        if name not in self._chosen:
            self._chosen.append(name)

    def remove(self) -> None:
        """Safe to call twice; the modules that were made are forgotten."""
        if self in sys.meta_path:
            sys.meta_path.remove(self)
        for name in self._parts:
            sys.modules.pop(name, None)

    def missed(self, called: Collection[str]) -> tuple[str, ...]:
        """The packages of ``imported`` that the run did without, by the modules whose layers it
        called.

        A library may import the files of all its models: what a file with layers asks for matters
        where one of them runs.
        """
        return tuple(
            top
            for top, asking in self.imported.items()
            if any(name in called or not _has_layers(name) for name in asking)
        )

    # -- modules -------------------------------------------------------------------------------

    def find_spec(
        self, name: str, path: Any = None, target: Any = None
    ) -> importlib.machinery.ModuleSpec | None:
        """The specification of a stand-in's module; ``None`` for all others, as where the package
        is not there."""
        top = name.partition(".")[0]
        if top not in self._known:
            return None
        if top not in self._chosen:
            self.asked[top] = None
            if not _is_question():
                self.imported.setdefault(top, set()).add(_asking())
            return None
        if name not in self._of(top):
            return None
        return importlib.machinery.ModuleSpec(name, _AbsentLoader(self.fill), is_package=True)

    def fill(self, module: ModuleType) -> None:
        """Give a module its names."""
        name = module.__name__
        top = name.partition(".")[0]
        if name == top:
            known = self._known[top]
            vars(module)["__version__"] = known.version
            self._assume(
                f"{top} is not installed here, a stand-in took its place: {known.assumption}"
            )
        vars(module).update(self._of(top)[name])

    def _of(self, top: str) -> Mapping[str, Mapping[str, Any]]:
        if top not in self._parts:
            self._parts |= self._known[top].parts()
        return self._parts

    # -- versions ------------------------------------------------------------------------------

    def find_distributions(
        self, context: importlib.metadata.DistributionFinder.Context | None = None
    ) -> Iterator[importlib.metadata.Distribution]:
        """What ``importlib.metadata`` tells of them."""
        wanted = None if context is None or context.name is None else _plain(context.name)
        for name in self._chosen:
            distribution = _Distribution(name, self._known[name])
            if wanted in (None, _plain(distribution.known.distribution)) and not _is_installed(
                name
            ):
                yield distribution


class _AbsentLoader(importlib.abc.Loader):
    """One for each module: an ``ImportHook`` changes it."""

    def __init__(self, fill: Callable[[ModuleType], None]) -> None:
        self._fill = fill

    def exec_module(self, module: ModuleType) -> None:
        self._fill(module)


class _Distribution(importlib.metadata.Distribution):
    def __init__(self, name: str, known: AbsentPackage) -> None:
        self._name, self.known = name, known

    def read_text(self, filename: str) -> str | None:
        if filename == "METADATA":
            known = self.known
            return f"Metadata-Version: 2.1\nName: {known.distribution}\nVersion: {known.version}\n"
        return f"{self._name}\n" if filename == "top_level.txt" else None

    def locate_file(self, path: Any) -> Any:
        return Path(path)


def _is_installed(name: str) -> bool:
    """Does a finder that comes before ours have the module?"""
    try:
        spec = importlib.util.find_spec(name)
    except (ImportError, ValueError):
        return False
    return spec is not None and not isinstance(spec.loader, _AbsentLoader)


def _plain(name: str) -> str:
    return name.lower().replace("-", "_")


def _asking() -> str:
    """The module whose import brought the import of a package; empty where none did."""
    frame: FrameType | None = sys._getframe(2)
    while frame is not None and frame.f_code.co_name != "<module>":
        frame = frame.f_back
    spec: Any = None if frame is None else frame.f_globals.get("__spec__")
    return str(spec.name) if getattr(spec, "_initializing", False) else ""


def _has_layers(name: str) -> bool:
    found = vars(sys.modules[name]).values() if name in sys.modules else ()
    return any(
        isinstance(each, type) and issubclass(each, torch.nn.Module) and each.__module__ == name
        for each in found
    )


def _is_question() -> bool:
    """Does ``importlib.util.find_spec`` ask, not an import?"""
    frame = sys._getframe(2)
    for _ in range(_FRAMES):
        if frame.f_code is importlib.util.find_spec.__code__:
            return True
        if frame.f_back is None or "importlib" not in frame.f_code.co_filename:
            return False
        frame = frame.f_back
    return False
