"""Changes a library right after the user's script has imported it."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Mapping
from types import ModuleType
from typing import Any

from trainfit.simgpu.import_hook import ImportHook

Patch = Callable[[Any], None]


def after_import(patches: Mapping[str, Patch]) -> None:
    """Call ``patches[name]`` with the module of that name once it is imported, or now.

    A library that is not as expected stays as it is.
    """
    for name, patch in patches.items():
        ImportHook(name, _careful(patch)).install()


def _careful(patch: Patch) -> Callable[[ModuleType], None]:
    def careful(module: ModuleType) -> None:
        with contextlib.suppress(Exception):
            patch(module)

    return careful


def with_arguments(function: Callable[..., Any], **forced: Any) -> Callable[..., Any]:
    """The function, called with these keyword arguments whatever the caller says."""

    def called(*args: Any, **more: Any) -> Any:
        return function(*args, **{**more, **forced})

    return functools.update_wrapper(called, function)
