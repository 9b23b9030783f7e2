"""Random values of large tensors on the host, drawn when something reads them.

A model that is made from its configuration fills its weights on the host, often twice, before they
move to the simulated GPU, where nobody reads them: with 8 billion parameters minutes of a core, and
32 GB of RAM. Memory that PyTorch allocates for a large tensor costs no RAM until it is written to.
"""

from __future__ import annotations

import ctypes
import dataclasses
import functools
import json
import os
import struct
import weakref
from collections.abc import Callable, Mapping
from types import ModuleType
from typing import Any, Final

import numpy as np
import torch
from torch.autograd.graph import saved_tensors_hooks

from trainfit.simgpu import constructors
from trainfit.simgpu.device.tensor import DeviceTensor, note_read
from trainfit.simgpu.patching import PatchSet
from trainfit.torch_private import operators as private
from trainfit.torch_private.operators import FILE_WRITER, NoTorchFunction, leaves_of, no_dispatch

# ---
# Copies of a checkpoint's tensors on the host: as large as they are, without their bytes. In RAM
# they are pages that nobody has written to, in files holes.


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


#: How many hooks that pack saved tensors run now, one within the other.
_packing = 0


def is_packing() -> bool:
    """Does a hook pack tensors that autograd saves? What it copies to the host (activations, by
    ``save_on_cpu`` and the like) is there for the backward pass, which has it on the GPU again."""
    return _packing > 0


def _packer(begin: Callable[..., None]) -> Callable[..., None]:
    def hooks(self: Any, pack_hook: Callable[..., Any], unpack_hook: Callable[..., Any]) -> None:
        @functools.wraps(pack_hook)
        def packs(tensor: torch.Tensor) -> Any:
            global _packing
            _packing += 1
            try:
                return pack_hook(tensor)
            finally:
                _packing -= 1

        begin(self, packs, unpack_hook)

    return hooks


def install(patches: PatchSet) -> None:
    """Files of ``torch.save`` and safetensors have holes in their place from now on, what
    safetensors reads is noted as read, and so are hooks that pack saved tensors, until ``patches``
    is restored."""
    patches.set(*FILE_WRITER, _writer(FILE_WRITER.now))
    patches.set(saved_tensors_hooks, "__init__", _packer(saved_tensors_hooks.__init__))

    def safetensors(module: ModuleType) -> None:
        if hasattr(module, "serialize_file"):
            patches.hook(module, "serialize_file", _serializer)
        if hasattr(module, "load_file"):
            patches.hook(module, "load_file", _reader)

    patches.when_imported("safetensors.torch", safetensors)


def _writer(base: Any) -> type:
    class Writer(base):  # type: ignore[misc]
        """Writes the archive that ``torch.save`` makes."""

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
        for tensor in tensors.values():
            note_read(tensor)
        return tensors

    return wrapper


def _serializer(serialize_file: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(serialize_file)
    def wrapper(tensors: Any, filename: Any, *args: Any, **kwargs: Any) -> Any:
        try:
            is_held = any(tensor.data_ptr in _held for tensor in tensors.values())
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
    for name, tensor in tensors.items():
        start, end = end, end + tensor.data_len
        header[name] = {
            "dtype": tensor.dtype, "shape": list(tensor.shape), "data_offsets": [start, end]
        }  # fmt: skip
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    with open(filename, "wb") as file:
        file.write(struct.pack("<Q", len(text)) + text)
        for name, tensor in tensors.items():
            if tensor.data_ptr not in _held:
                file.seek(8 + len(text) + header[name]["data_offsets"][0])
                file.write(ctypes.string_at(tensor.data_ptr, tensor.data_len))
        file.truncate(8 + len(text) + end)


# ---
# Random values of large tensors on the host, drawn when something reads them.


aten = torch.ops.aten

#: Bytes of a tensor from which on its values may wait, and those that are drawn at once before any
#: wait: small models have all of theirs.
LEAST_BYTES: Final = 4 << 20
AT_ONCE_BYTES: Final = 512 << 20
#: What gives all elements new values.
_FILLS: Final = frozenset(
    (aten.normal_.default, aten.uniform_.default, aten.zero_.default, aten.fill_.Scalar)
)
#: What changes each element by itself: ``torch.nn.init.trunc_normal_`` after its fill.
_EACH: Final = frozenset(
    (aten.mul_.Scalar, aten.add_.Scalar, aten.mul_.Tensor, aten.add_.Tensor,
     aten.erfinv_.default, aten.clamp_.default)
)  # fmt: skip
_COPIES: Final = frozenset((private.to_copy.default, aten.clone.default))
#: What asks a tensor for its shape and type alone.
_LIKE: Final = frozenset(
    (aten.empty_like.default, aten.zeros_like.default, aten.ones_like.default,
     aten.new_empty.default, aten.new_zeros.default)
)  # fmt: skip
_PLAIN: Final = (torch.Tensor, torch.nn.Parameter)


@dataclasses.dataclass(frozen=True)
class _Values:
    """What a tensor's values are: ``operators`` on as many elements of ``dtype``, with the random
    numbers of ``seed``."""

    dtype: torch.dtype
    seed: int
    operators: tuple[tuple[Any, tuple[Any, ...], dict[str, Any]], ...]

    def write(self, flat: torch.Tensor) -> None:
        made = (
            flat
            if flat.dtype == self.dtype
            else constructors.empty(len(flat), dtype=self.dtype, device="cpu")
        )
        generator = torch.default_generator
        state = generator.get_state()
        generator.manual_seed(self.seed)
        try:
            for func, args, kwargs in self.operators:
                func(made, *args, **kwargs)
        finally:
            generator.set_state(state)
        if made is not flat:
            flat.copy_(made)


class HostFills:
    """Runs operators on the host; those that fill large tensors wait for a reader."""

    def __init__(self) -> None:
        self._filled_bytes = self._fills = 0
        #: By a storage's address.
        self._waiting: dict[int, _Values] = {}

    def __len__(self) -> int:
        return len(self._waiting)

    def run(self, func: Any, args: Any, kwargs: Any) -> Any:
        """The operator's result. What it reads has its values by then."""
        if func in _FILLS and self._may_wait(args[0], kwargs):
            self._fills += 1
            call = (func, tuple(args[1:]), dict(kwargs))
            self._wait(args[0], _Values(args[0].dtype, self._fills, (call,)))
            return args[0]
        if not self._waiting:
            return func(*args, **kwargs)
        return self._with_values(func, args, kwargs)

    def _with_values(self, func: Any, args: Any, kwargs: Any) -> Any:
        read = [each for each in leaves_of((args, kwargs)) if self._of(each) is not None]
        if not read or func.is_view or func in _LIKE:
            return func(*args, **kwargs)
        first: Any = args[0] if args else None
        values = self._of(first)
        if values is not None and len(read) == 1 and _is_whole(first):
            if func in _EACH and first.dtype == values.dtype:
                call = (func, tuple(args[1:]), dict(kwargs))
                self._wait(first, dataclasses.replace(values, operators=(*values.operators, call)))
                return first
            if func in _COPIES:
                dtype = kwargs.get("dtype") or first.dtype
                copy = unwritten(constructors.empty(first.shape, dtype=dtype, device="meta"))
                self._wait(copy, values)
                return copy
            if func in (aten.copy_.default, *_FILLS):
                del self._waiting[_address(first)]
                return func(*args, **kwargs)
        for leaf in read:
            self.draw(leaf)
        return func(*args, **kwargs)

    def _may_wait(self, tensor: Any, kwargs: Any) -> bool:
        if not _is_whole(tensor) or tensor.nbytes < LEAST_BYTES or kwargs.get("generator"):
            return False
        self._filled_bytes += tensor.nbytes
        return self._filled_bytes > AT_ONCE_BYTES

    def _of(self, tensor: Any) -> _Values | None:
        if type(tensor) not in _PLAIN or tensor.device.type != "cpu":
            return None
        if tensor.layout != torch.strided:
            return None
        try:
            return self._waiting.get(_address(tensor))
        except (RuntimeError, NotImplementedError):  # one without a storage of its own
            return None

    def _wait(self, tensor: torch.Tensor, values: _Values) -> None:
        address = _address(tensor)
        if address not in self._waiting:
            weakref.finalize(tensor.untyped_storage(), self._waiting.pop, address, None)
        self._waiting[address] = values

    def draw(self, tensor: torch.Tensor) -> None:
        """Give the tensor its values, if they are still to be drawn."""
        values = self._of(tensor) if self._waiting else None
        if values is not None:
            del self._waiting[_address(tensor)]
            with no_dispatch(), torch.no_grad():
                storage = tensor.untyped_storage()
                flat = constructors.empty(0, dtype=tensor.dtype, device="cpu").set_(storage)
                values.write(flat)


def _address(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


def _is_whole(tensor: Any) -> bool:
    """Is it all of its storage, on the host, element by element?"""
    return (
        type(tensor) in _PLAIN
        and tensor.device.type == "cpu"
        and tensor.layout == torch.strided
        and tensor.is_contiguous()
        and tensor.untyped_storage().nbytes() == tensor.nbytes
    )


# ---
# Pinned memory, of which a copy is simulated like any other.


def pin(tensor: torch.Tensor) -> None:
    """Mark a tensor's memory as pinned from now on; the simulated copies work with any."""
    memory_of(tensor)._trainfit_pinned = True


def is_in_pinned(tensor: torch.Tensor) -> bool:
    return getattr(memory_of(tensor), "_trainfit_pinned", False)


def memory_of(tensor: torch.Tensor) -> Any:
    """What has the bytes: views of a pinned tensor (FSDP's shards) are pinned, too."""
    if isinstance(tensor, DeviceTensor) or tensor.layout is not torch.strided:
        return tensor
    with NoTorchFunction():
        return tensor.untyped_storage()
