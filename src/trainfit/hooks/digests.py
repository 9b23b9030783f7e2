"""Digests of samples and batches, to compare them."""

from __future__ import annotations

import dataclasses
import hashlib
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch


def digest(sample: Any) -> str | None:
    """The digest of a sample's content; ``None`` where it holds what has no content that we
    know."""
    state = hashlib.blake2b(digest_size=16)
    return state.hexdigest() if _add(state, sample) else None


def _add(state: Any, value: Any) -> bool:
    state.update(type(value).__name__.encode())
    if isinstance(value, torch.Tensor):
        if value.layout != torch.strided:
            return False
        data = value.detach().cpu().contiguous().reshape(-1)
        state.update(repr((tuple(value.shape), value.dtype)).encode())
        state.update(data.view(torch.uint8).numpy().tobytes() if data.numel() else b"")
        return True
    if isinstance(value, np.ndarray):
        if value.dtype.hasobject:
            return _add(state, value.tolist())
        state.update(repr((value.shape, value.dtype.str)).encode() + value.tobytes())
        return True
    if isinstance(value, bytes | bytearray):
        state.update(len(value).to_bytes(8, "little") + bytes(value))
        return True
    if isinstance(value, str | int | float | complex | bool | type(None) | np.generic):
        state.update(repr(value).encode(errors="surrogatepass") + b"\0")
        return True
    return _add_container(state, value)


def _add_container(state: Any, value: Any) -> bool:
    if isinstance(value, Mapping):
        parts = [part for pair in value.items() for part in pair]
    elif isinstance(value, list | tuple):
        parts = list(value)
    elif dataclasses.is_dataclass(value) and not isinstance(value, type):
        parts = [getattr(value, field.name) for field in dataclasses.fields(value)]
    elif hasattr(value, "tobytes") and hasattr(value, "size"):  # an image of Pillow's
        parts = [repr(value.size), value.tobytes()]
    else:
        return False
    state.update(len(parts).to_bytes(8, "little"))
    return all(_add(state, part) for part in parts)
