"""Programs that end in ``accelerate launch`` of one process (``trl sft …``): its script runs here.

Accelerate starts the script in a process of its own (``simple_launcher`` in
accelerate/commands/launch.py), where no GPU is simulated. With one process that is only a clean
start: the script runs in this process instead, with the environment and the words that it would
get there.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Callable, Sequence
from types import ModuleType
from typing import Any

from trainfit.results.runs.trace import Target
from trainfit.simgpu.import_hook import ImportHook
from trainfit.simgpu.patching import PatchSet

_MODULE = "accelerate.commands.launch"


class LaunchInPlace:
    """Replaces Accelerate's start of a single process by ``execute``, wherever it is imported.

    Args:
        execute: runs a target as Python would.
    """

    def __init__(self, execute: Callable[[Target], None]) -> None:
        self._execute = execute
        self._hook: ImportHook | None = None

    def install(self, patches: PatchSet) -> None:
        """From now on, until ``patches`` is restored and :meth:`remove` is called."""
        self._hook = ImportHook(_MODULE, functools.partial(self._patch, patches))
        self._hook.install()

    def remove(self) -> None:
        """Take the import hook away; the patches are their owner's to restore."""
        if self._hook is not None:
            self._hook.remove()

    def _patch(self, patches: PatchSet, module: ModuleType) -> None:
        start = getattr(module, "simple_launcher", None)
        prepare = getattr(module, "prepare_simple_launcher_cmd_env", None)
        if start is None or prepare is None:  # another version's, of which nothing is known
            return

        @functools.wraps(start)
        def simple_launcher(args: Any) -> None:
            if args.no_python or getattr(args, "mpirun_hostfile", None) is not None:
                start(args)  # another program, which Python cannot run here
                return
            command, environment = prepare(args)
            os.environ.update(environment)
            self._execute(_target(command))

        patches.set(module, "simple_launcher", simple_launcher)


def _target(command: Sequence[str]) -> Target:
    """What ``python [-m] name args…`` runs."""
    if command[1] == "-m":
        return Target("module", command[2], tuple(command[3:]))
    return Target("script", command[1], tuple(command[2:]))
