"""Redirects a process's file calls into a layer, guarded by Landlock."""

from __future__ import annotations

import dataclasses
import os
import tempfile
from pathlib import Path

from trainfit.scripts.sandbox.errors import UnavailableError
from trainfit.scripts.sandbox.layer import Layer
from trainfit.scripts.sandbox.network.post_import import after_import
from trainfit.scripts.sandbox.redirection import landlock, libraries
from trainfit.scripts.sandbox.redirection.file_calls import FileCalls
from trainfit.scripts.sandbox.redirection.view import LayeredView

#: Devices, shared memory, processes: as they are.
_SYSTEM = ("/dev", "/proc", "/sys")


@dataclasses.dataclass(frozen=True)
class Redirected:
    """``folder`` is the layer's; ``unguarded`` says why other code may write as it likes
    ("": it may not)."""

    folder: str
    earlier: tuple[str, ...]
    unguarded: str
    view: LayeredView
    calls: FileCalls


def enter(
    layer: Layer, folder: Path, guard: bool = True, before: Redirected | None = None
) -> Redirected:
    """Redirect the file calls of this process and of those that it forks.

    ``folder`` stays as it is, for real. With ``before`` the process was forked from one that
    had entered: its layer is laid over that one's.
    """
    own = str(layer.widest)
    earlier = (before.folder, *before.earlier) if before is not None else ()
    temporary = f"{own}/tmp"
    os.makedirs(temporary, exist_ok=True)
    real = [str(folder.resolve()), *_SYSTEM, *map(str, layer.folders)]
    if before is not None:
        view, calls, unguarded = before.view, before.calls, before.unguarded
        view.become((own, *earlier), tuple(real))
    else:
        view = LayeredView((own,), tuple(real))
        unguarded = _guard(own, folder) if guard else "not requested"
        after_import(libraries.patches(view))
        calls = FileCalls(view)
        calls.install()
        # Rust code writes the cache otherwise, which no redirect reaches.
        os.environ["HF_HUB_DISABLE_XET"] = "1"
    # What only Python redirects is out of reach of a child program; here it may write.
    os.environ["TMPDIR"] = tempfile.tempdir = temporary
    return Redirected(own, earlier, unguarded, view, calls)


def _guard(layer: str, folder: Path) -> str:
    # The runs that are forked from here have folders next to this one.
    runs = folder if folder.name.startswith("trainfit-") else folder.parent
    try:
        landlock.allow_writes_only_in([layer, str(runs), *filter(os.path.isdir, _SYSTEM[:2])])
    except UnavailableError as error:
        return str(error)
    return ""
