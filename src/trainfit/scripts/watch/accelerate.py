"""Detects whether a script's Accelerate reads its mixed precision from the environment.

``Accelerator(mixed_precision=None)``, the default, reads ``ACCELERATE_MIXED_PRECISION``
(``AcceleratorState.__init__`` in accelerate/state.py): then the variable can be set in the
launch command. It has no effect where the script says which, or sets the variable itself, as
Transformers' ``TrainingArguments`` do.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Mapping
from types import ModuleType
from typing import Any

from trainfit.simgpu.import_hook import ImportHook
from trainfit.simgpu.patching import PatchSet
from trainfit.simgpu.recording.user_location import user_frame

VARIABLE = "ACCELERATE_MIXED_PRECISION"
_MODULE = "accelerate.state"


class AccelerateWatch:
    """Looks at the first ``AcceleratorState`` of a process, whenever it is imported."""

    def __init__(self) -> None:
        self._hook: ImportHook | None = None
        self._before = os.environ.get(VARIABLE)
        #: The precision that came from the environment; ``None``: none did.
        self.from_environment: str | None = None
        #: The user's line that made the first state; ``None``: there is none.
        self.where: str | None = None

    def expect(self, variables: Mapping[str, str]) -> None:
        """These are in the environment from now on, as if they had been before the process."""
        os.environ.update(variables)
        self._before = os.environ.get(VARIABLE)

    def install(self, patches: PatchSet) -> None:
        """Watch from now on, until ``patches`` is restored and :meth:`remove` is called."""
        self._before = os.environ.get(VARIABLE)
        self._hook = ImportHook(_MODULE, functools.partial(self._patch, patches))
        self._hook.install()

    def remove(self) -> None:
        """Take the import hook away; the patches are their owner's to restore."""
        if self._hook is not None:
            self._hook.remove()

    def _patch(self, patches: PatchSet, module: ModuleType) -> None:
        state = getattr(module, "AcceleratorState", None)
        if state is None:  # another version's, of which nothing is known
            return
        construct = state.__init__
        watch = self

        @functools.wraps(construct)
        def __init__(own: Any, mixed_precision: Any = None, *args: Any, **kwargs: Any) -> None:
            is_first = not getattr(state, "_shared_state", None)
            construct(own, mixed_precision, *args, **kwargs)
            if is_first:
                watch.where = user_frame()
            if is_first and mixed_precision is None and os.environ.get(VARIABLE) == watch._before:
                watch.from_environment = str(getattr(own, "mixed_precision", "no"))

        patches.set(state, "__init__", __init__)
