"""What determines the result of a cell: its words, its machine, its files, its packages.

Cells are kept by a hash of it, so that a sweep goes on where it ended, and a script that was edited
is planned afresh. Of files, those are looked at that the command names and that its script imports
by name; what else it opens is not known before it runs.
"""

from __future__ import annotations

import functools
import hashlib
import json
import site
from collections.abc import Iterator
from importlib import metadata
from pathlib import Path
from typing import Final

from trainfit.lint.imports import UnreadableError, read_files
from trainfit.plan.command.interpreter import Interpreter
from trainfit.plan.command.parsing import Command
from trainfit.plan.sweep.cell_run import VARIABLES, CellJob
from trainfit.version import __version__

#: Of larger files, length and time of the last change stand for what is in them.
_LARGE: Final = 64 << 20


def key_of(job: CellJob, command: Command, defaults: str = "") -> str:
    """The name of the cell's file: the same whenever its result would be.

    Args:
        defaults: of the verb's options, from a file of the user's.
    """
    said = {
        "trainfit": __version__,
        "job": [job.verb, *job.options, job.gpu, *job.words, job.folder],
        "defaults": defaults,
        "variables": {
            name: value for name, value in job.variables.items() if name.startswith(VARIABLES)
        },
        "packages": _packages(command.interpreter),
        "files": {
            str(path): _digest(path, (state := path.stat()).st_size, state.st_mtime_ns)
            for path in _files(command, job)
        },
    }
    return hashlib.sha256(json.dumps(said, sort_keys=True).encode()).hexdigest()[:20]


def _files(command: Command, job: CellJob) -> Iterator[Path]:
    named = [Path(word.rpartition("=")[2]) for word in (*job.words, *job.options)]
    script = Path(command.name)
    if command.kind == "module":
        place = Path(*command.name.split("."))
        parts = (place.with_suffix(".py"), place / "__main__.py")
        script = next((each for each in parts if each.is_file()), script)
    yield from (each.resolve() for each in (script, *named) if each.is_file())
    try:
        files, _ = read_files(script)
    except UnreadableError:
        return
    yield from (file.source.path.resolve() for file in files)


@functools.cache
def _digest(path: Path, length: int, changed_ns: int) -> str:
    if length > _LARGE:
        return f"{length} {changed_ns}"
    return hashlib.sha256(path.read_bytes()).hexdigest()


@functools.cache
def _packages(interpreter: Interpreter) -> list[str]:
    """Of the command's Python: its path, its version, PyTorch's, and what is installed next to it,
    as far as its folder tells."""
    if interpreter.is_own:
        # Not those that a library has put on the path since.
        folders = [*site.getsitepackages(), site.getusersitepackages()]
        found = [f"{each.name}-{each.version}" for each in metadata.distributions(path=folders)]
    else:
        folder = Path(interpreter.path).parent.parent
        found = [each.name for each in folder.glob("lib/python*/site-packages/*.dist-info")]
    version = ".".join(map(str, interpreter.version))
    return [interpreter.path, version, interpreter.torch, *sorted(found)]
