"""C code that opens files by name: the names are those in the layer.

What is not here is refused by Landlock, with the file's name.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Callable
from typing import Any

from trainfit.scripts.sandbox.network.post_import import Patch
from trainfit.scripts.sandbox.redirection.view import LayeredView


def patches(view: LayeredView) -> dict[str, Patch]:
    """By the module after whose import they are made."""
    return {
        "torch": functools.partial(_torch, view),
        "sqlite3": functools.partial(_sqlite, view),
        "h5py": functools.partial(_h5py, view),
        "safetensors": functools.partial(_safetensors, view),
        "cv2": functools.partial(_opencv, view),
    }


def _mapped(view: LayeredView, given: Any, *, writes: bool, keep: bool = True) -> Any:
    """The name of the file in the layer; what is no name stays as it is."""
    if not isinstance(given, str | bytes | os.PathLike):
        return given
    path = view.path(given)
    if path is None:
        return given
    return view.to_write(path, copy=keep) if writes else view.place(path)


def _first(
    view: LayeredView, function: Callable[..., Any], name: str, *, writes: bool, keep: bool = True
) -> Callable[..., Any]:
    """The function, its first argument (or ``name``) mapped."""

    def called(*args: Any, **more: Any) -> Any:
        if args:
            args = (_mapped(view, args[0], writes=writes, keep=keep), *args[1:])
        elif name in more:
            more[name] = _mapped(view, more[name], writes=writes, keep=keep)
        return function(*args, **more)

    called.__doc__ = function.__doc__
    return called


def _torch(view: LayeredView, module: Any) -> None:
    c = module._C
    c.PyTorchFileWriter = _first(view, c.PyTorchFileWriter, "name", writes=True, keep=False)
    c.PyTorchFileReader = _first(view, c.PyTorchFileReader, "name", writes=False)
    for storage in (module.UntypedStorage, c.StorageBase):
        original = storage.from_file

        def from_file(
            filename: Any, shared: bool = False, *args: Any, _original: Any = original, **more: Any
        ) -> Any:
            name = _mapped(view, filename, writes=bool(shared))
            return _original(name, shared, *args, **more)

        try:
            storage.from_file = staticmethod(from_file)
        except TypeError:  # a type of C
            continue


def _sqlite(view: LayeredView, module: Any) -> None:
    original = module.connect

    @functools.wraps(original)
    def connect(database: Any, *args: Any, **more: Any) -> Any:
        text = os.fsdecode(database) if isinstance(database, bytes | os.PathLike) else database
        if text and text != ":memory:" and not str(text).startswith("file:"):
            database = _mapped(view, text, writes=True)
        return original(database, *args, **more)

    module.connect = module.dbapi2.connect = connect


def _h5py(view: LayeredView, module: Any) -> None:
    original = module.File.__init__

    @functools.wraps(original)
    def __init__(self: Any, name: Any, mode: str = "r", *args: Any, **more: Any) -> None:
        writes = mode != "r"
        name = _mapped(view, name, writes=writes, keep=mode != "w")
        original(self, name, mode, *args, **more)

    module.File.__init__ = __init__


def _safetensors(view: LayeredView, module: Any) -> None:
    serialize = module.serialize_file

    @functools.wraps(serialize)
    def serialize_file(tensors: Any, filename: Any, *args: Any, **more: Any) -> Any:
        name = _mapped(view, filename, writes=True, keep=False)
        return serialize(tensors, name, *args, **more)

    module.serialize_file = serialize_file
    module.safe_open = _first(view, module.safe_open, "filename", writes=False)


def _opencv(view: LayeredView, module: Any) -> None:
    module.imwrite = _first(view, module.imwrite, "filename", writes=True, keep=False)
    module.imread = _first(view, module.imread, "filename", writes=False)
