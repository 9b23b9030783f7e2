"""Explains a live training run: a recorder in it, a sampler next to it, and rules.

``trainfit.watch()`` in a script records it without the command `trainfit watch`.
"""

from __future__ import annotations

import sys
from types import ModuleType
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from trainfit.watch.in_script import Watching


class _Watch(ModuleType):
    """``trainfit.watch`` is both a package and what it does when it is called."""

    def __call__(self, *arguments: Any, **options: Any) -> Watching:
        # Imported by the recorder in every process of a watched command: so nothing else here.
        from trainfit.watch.in_script import watch

        return watch(*arguments, **options)


sys.modules[__name__].__class__ = _Watch
