"""Copies of a checkpoint's tensors on the host: as large as they are, without their bytes. In RAM
they are pages that nobody has written to, in files holes."""

from __future__ import annotations

import ctypes
import functools
import json
import os
import struct
import weakref
from collections.abc import Callable, Mapping
from types import ModuleType
from typing import Any

import numpy as np
import torch

from trainfit.simgpu.device.tensor import note_read
from trainfit.simgpu.patching import ImportHook, PatchSet
from trainfit.torch_private import tensors as private
from trainfit.torch_private.operators import no_dispatch

#: Addresses of such pages that are still held.
_held: set[int] = set()


def unwritten(meta: torch.Tensor) -> torch.Tensor:
    """Zeros like ``meta`` on the host."""
    with no_dispatch():
        like = torch.empty_like(meta)
        pages = np.zeros(like.numel() * like.itemsize, dtype=np.uint8)
        address = pages.ctypes.data
        _held.add(address)
        weakref.finalize(pages, _held.discard, address)
        return torch.from_numpy(pages).view(like.dtype).as_strided(like.shape, like.stride())


def install(patches: PatchSet) -> ImportHook:
    """Files of ``torch.save`` and safetensors have holes in their place from now on, and what
    safetensors reads is noted as read, until ``patches`` is restored and the hook is removed."""
    patches.set(*private.FILE_WRITER, _writer(private.FILE_WRITER.now))

    def safetensors(module: ModuleType) -> None:
        if hasattr(module, "serialize_file"):
            patches.hook(module, "serialize_file", _serializer)
        if hasattr(module, "load_file"):
            patches.hook(module, "load_file", _reader)

    hook = ImportHook("safetensors.torch", safetensors)
    hook.install()
    return hook


def _writer(base: Any) -> type:
    class Writer(base):  # type: ignore[misc]
        """Of the archive that ``torch.save`` makes."""

        def __init__(self, file: Any, *args: Any, **kwargs: Any) -> None:
            super().__init__(file, *args, **kwargs)
            self._is_path = isinstance(file, str | os.PathLike)

        def write_record(self, name: str, data: Any, nbytes: int) -> None:
            is_storage = isinstance(data, torch.UntypedStorage)
            if self._is_path and is_storage and data.data_ptr() in _held:
                self.write_record_metadata(name, nbytes)
            else:
                super().write_record(name, data, nbytes)

    return Writer


def _reader(load_file: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(load_file)
    def wrapper(*args: Any, **kwargs: Any) -> Any:
        tensors = load_file(*args, **kwargs)
        for each in tensors.values():
            note_read(each)
        return tensors

    return wrapper


def _serializer(serialize_file: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(serialize_file)
    def wrapper(tensors: Any, filename: Any, *args: Any, **kwargs: Any) -> Any:
        try:
            is_held = any(each.data_ptr in _held for each in tensors.values())
        except AttributeError:  # versions before 0.8 are given the bytes
            is_held = False
        if not is_held:
            return serialize_file(tensors, filename, *args, **kwargs)
        return _write(tensors, filename, *args, **kwargs)

    return wrapper


def _write(
    tensors: Mapping[str, Any], filename: Any, metadata: dict[str, str] | None = None
) -> None:
    """The file that safetensors would write: the header's length in 8 bytes, a JSON object with
    the type, shape and place of each tensor, and their bytes."""
    header: dict[str, Any] = {"__metadata__": metadata} if metadata else {}
    end = 0
    for name, each in tensors.items():
        start, end = end, end + each.data_len
        header[name] = {
            "dtype": each.dtype, "shape": list(each.shape), "data_offsets": [start, end]
        }  # fmt: skip
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    with open(filename, "wb") as file:
        file.write(struct.pack("<Q", len(text)) + text)
        for name, each in tensors.items():
            if each.data_ptr not in _held:
                file.seek(8 + len(text) + header[name]["data_offsets"][0])
                file.write(ctypes.string_at(each.data_ptr, each.data_len))
        file.truncate(8 + len(text) + end)
