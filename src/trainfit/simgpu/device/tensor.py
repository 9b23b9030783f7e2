"""The tensor that lives on the simulated device, the device's name, files with such tensors."""

from __future__ import annotations

import copy
import functools
import sys
from collections.abc import Callable
from typing import Any, Protocol

import torch
from torch.nn.parameter import is_lazy

from trainfit.hardware.gpu_topology import MOST_GPUS
from trainfit.results.gpus import GpuSpec
from trainfit.simgpu import constructors
from trainfit.simgpu.device.device_memory import DeviceMemory
from trainfit.simgpu.device.errors import SeveralGpusError, no_such_gpu, visible_gpus
from trainfit.simgpu.device.user_location import is_library, user_frame
from trainfit.simgpu.patching import PatchSet
from trainfit.torch_private import operators as private
from trainfit.torch_private.operators import no_dispatch

# ---
# The GPUs of the simulated machine, as PyTorch names devices.


GPUS = tuple(torch.device("cuda", index) for index in range(MOST_GPUS))
CUDA = GPUS[0]
META = torch.device("meta")
CPU = torch.device("cpu")


def ordinal(device: Any) -> Any:
    """The index of a GPU as a script names it; ``None``: it says none."""
    if isinstance(device, str):
        device = torch.device(device)
    return device.index if isinstance(device, torch.device) else device


def gpu_number(device: Any) -> int:
    """The number of the GPU that a script names; the current one where it says none.

    Raises :class:`SeveralGpusError` for one that the machine does not have (RuntimeError: hides).
    """
    index = ordinal(device)
    if index is None or index == -1:
        return current_engine().memory.gpu
    gpu = current_engine().gpu
    if index and not 0 < index < visible_gpus(gpu.count):
        if index < gpu.count:
            raise RuntimeError("CUDA error: invalid device ordinal")  # as CUDA does
        remedy = no_such_gpu(gpu.key, gpu.count, max(index, 0))
        raise SeveralGpusError(f"cuda:{index} (invalid device ordinal)", user_frame(), remedy)
    if index:
        use_several()
    return int(index)


#: Has the script named another GPU than the first? Where one tensor is, all others are, else.
_several = False


def use_several(now: bool = True) -> None:
    """Keep track of which GPU a tensor is on, as the process has several."""
    global _several
    _several = now


def gpu_of(tensor: torch.Tensor) -> int:
    """The number of the GPU that a simulated tensor is on."""
    return int(plain(tensor)._life.gpu) if _several else 0


def several_gpus() -> bool:
    """May tensors be on other GPUs than the first?"""
    return _several


# ---
# ``torch.save`` and ``torch.load`` with tensors of the simulated device.
#
# A file holds plausible CPU data, tagged with the device as a GPU's would be. What is loaded
# to the device is read on the CPU and copied there, one copy for each storage, so tensors
# that share a storage still do.


#: Below the priorities that PyTorch's own devices have (10 and more): asked first.
_PRIORITY = 1
_MARK = "_trainfit_on_device"
_ON = "_trainfit_gpu"


def mark(storage: torch.UntypedStorage, gpu: int = 0) -> torch.UntypedStorage:
    """Note that a CPU storage stands for one of a GPU."""
    if not hasattr(storage, _MARK):
        setattr(storage, _MARK, {})
        setattr(storage, _ON, GPUS[gpu])
    return storage


def install(patches: PatchSet) -> None:
    registry = sorted(
        [*private.PACKAGE_REGISTRY.now, (_PRIORITY, _tag, _restore)],
        key=lambda entry: entry[0],
    )
    patches.set(*private.PACKAGE_REGISTRY, registry)
    patches.set(*private.REBUILD_TENSOR, _rebuilder(private.REBUILD_TENSOR.now))
    patches.set(private.StorageBase, "cuda", lambda storage, *_, **__: mark(storage))


def _tag(storage: Any) -> str | None:
    plain = private.untyped_of(storage)
    return str(getattr(plain, _ON)) if hasattr(plain, _MARK) else None


def _restore(storage: Any, location: Any) -> Any:
    text = location.decode() if isinstance(location, bytes) else str(location)
    if not text.startswith("cuda"):
        return None
    return mark(storage, gpu_number(text))


def allocation_of(tensor: Any) -> int | None:
    """The number of the allocation that a tensor's memory is in; ``None``: of none."""
    number = plain(tensor)._life.number if isinstance(tensor, DeviceTensor) else -1
    return number if number >= 0 else None


def note_read(tensor: torch.Tensor) -> None:
    """Note that a tensor, if it is a GPU's, was read from a file straight to it."""
    if (number := allocation_of(tensor)) is not None:
        current_engine().memory.read.add(number)


def _rebuilder(rebuild: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    def rebuild_tensor(storage: Any, offset: int, size: Any, stride: Any) -> torch.Tensor:
        plain = private.untyped(storage)
        copies = getattr(plain, _MARK, None)
        if copies is None:
            return rebuild(storage, offset, size, stride)
        dtype = storage.dtype
        if dtype not in copies:
            count = plain.nbytes() // dtype.itemsize
            if copies:
                first = next(iter(copies.values()))
                copies[dtype] = first.view(torch.uint8).view(dtype)
            else:
                copies[dtype] = rebuild(storage, 0, (count,), (1,)).to(getattr(plain, _ON))
                note_read(copies[dtype])
        return copies[dtype].as_strided(size, stride, offset)  # type: ignore[no-any-return]

    return rebuild_tensor


_specs: dict[tuple[Any, ...], Spec] = {}


class Executor(Protocol):
    """What simulated tensors report to: the engine of the simulation."""

    gpu: GpuSpec
    memory: DeviceMemory
    #: ``target.data = value`` where one of them is simulated.
    replace_data: Callable[[torch.Tensor, torch.Tensor], None]
    #: See :meth:`trainfit.simgpu.session.Simulation.on_result`.
    on_result: Callable[[Any, Any, Any, Any], None]

    def run(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any: ...

    def run_plain(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any: ...

    def run_sparse(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any: ...

    def set_data(self, target: DeviceTensor, value: DeviceTensor) -> None: ...

    def move(self, tensor: DeviceTensor, device: torch.device) -> torch.Tensor: ...

    def library_workspace(self, model: str, arguments: tuple[int, ...]) -> None: ...

    def assume(self, text: str) -> None: ...


# Set by the session while it is active.
_engine: Executor | None = None


class SimulationEndedError(RuntimeError):
    """A simulated tensor was used after its simulation ended."""


def set_engine(engine: Executor | None) -> None:
    """Make ``engine`` the one that simulated tensors report to."""
    global _engine
    _engine = engine
    use_several(False)


def current_engine() -> Executor:
    """The active engine; raises :class:`SimulationEndedError` when there is none."""
    if _engine is None:
        raise SimulationEndedError(
            "a tensor of a simulated GPU was used after its simulation ended; "
            "use it inside the `with trainfit.simulate(...)` block"
        )
    return _engine


def _is_contiguous(size: tuple[int, ...], stride: tuple[int, ...]) -> bool:
    expected = 1
    for extent, step in zip(reversed(size), reversed(stride), strict=True):
        if extent != 1:
            if step != expected:
                return False
            expected *= extent
    return True


def _has_leading_dimension(size: tuple[int, ...], stride: tuple[int, ...]) -> bool:
    (rows, columns), (down, across) = size[-2:], stride[-2:]
    if across == 1 and down >= max(1, columns):
        return True
    if down == 1 and across >= max(1, rows):
        return True
    # A contiguous tensor with a side of 1 has any stride there.
    return bool(down and across and rows * columns == max(rows, columns))


class Spec:
    """Interned geometry of a strided tensor; equal geometry is the same object."""

    __slots__ = ("contiguous", "dtype", "nbytes", "numel", "offset", "size", "stride", "suits_blas")

    def __init__(
        self, size: tuple[int, ...], stride: tuple[int, ...], offset: int, dtype: torch.dtype
    ) -> None:
        self.size = size
        self.stride = stride
        self.offset = offset
        self.dtype = dtype
        self.numel = 1
        for extent in size:
            self.numel *= extent
        self.nbytes = self.numel * dtype.itemsize
        self.contiguous = self.numel == 0 or _is_contiguous(size, stride)
        #: Is the matrix, or each of a batch, row- or column-major? Others are copied for
        #: cuBLAS (prepare_matrix_for_cublas in ATen/native/cuda/Blas.cpp).
        self.suits_blas = self.numel == 0 or len(size) < 2 or _has_leading_dimension(size, stride)

    def __repr__(self) -> str:
        return f"{str(self.dtype).removeprefix('torch.')}{list(self.size)}"


def spec_of(meta: torch.Tensor) -> Spec:
    """The interned :class:`Spec` of a plain tensor."""
    key = (meta.shape, meta.stride(), meta.storage_offset(), meta.dtype)
    spec = _specs.get(key)
    if spec is None:
        spec = Spec(tuple(key[0]), key[1], int(key[2]), key[3])
        _specs[key] = spec
    return spec


_DICT = vars(torch.Tensor)["__dict__"]
_swapping = False


def swapping(swap: Callable[..., None]) -> Callable[..., None]:
    """What lets two tensors be each other, with all that is in their ``__dict__``."""

    @functools.wraps(swap)
    def swapped(*args: Any) -> None:
        global _swapping
        before, _swapping = _swapping, True
        try:
            swap(*args)
        finally:
            _swapping = before

    return swapped


class DeviceTensor(torch.Tensor):
    """What Python sees of a tensor on a simulated GPU.

    Two kinds there are: :class:`SimulatedTensor`, which every operator makes, and the classes of
    :mod:`trainfit.simgpu.device.subclasses`, for tensors of the user's own classes.
    """

    def _give_dict(self, given: dict[str, Any]) -> None:
        """``tensor.__dict__ = other.__dict__`` is the user's way to pass on attributes (fastai):
        what the simulation keeps in it stays each tensor's own."""
        if not _swapping:
            ours = _DICT.__get__(self)
            own = {name: ours[name] for name in _OWN if name in ours and "_life" in ours}
            # Of a class of the user's "_meta" may be an attribute.
            others = _OWN if "_life" in given else ()
            given = {name: each for name, each in given.items() if name not in others} | own
        _DICT.__set__(self, given)

    __dict__ = property(lambda self: _DICT.__get__(self), _give_dict)

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        if len(types) > 1 and wrapped(types):
            return NotImplemented  # a tensor that holds simulated ones knows what to do
        return current_engine().run_plain(func, args, kwargs or {})

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        # Tensor's own, which PyTorch disables for classes that have a __torch_dispatch__.
        return private.torch_function(cls, func, types, args, kwargs)

    # What Python code asks of a CUDA tensor. C++ getters would say "meta".
    @property
    def device(self) -> torch.device:  # type: ignore[override]
        return GPUS[plain(self)._life.gpu] if _several else CUDA

    @property
    def is_cuda(self) -> bool:  # type: ignore[override]
        return True

    @property
    def is_meta(self) -> bool:  # type: ignore[override]
        return False

    @property
    def is_cpu(self) -> bool:  # type: ignore[override]
        return False

    def get_device(self) -> int:
        return gpu_of(self)

    def is_pinned(self, *_: Any, **__: Any) -> bool:
        return False

    def data_ptr(self) -> int:
        if not is_library(sys._getframe(1).f_code.co_filename):
            current_engine().assume(
                "data_ptr() of a GPU tensor is read: if that is for a kernel of another library "
                "than PyTorch (CuPy, ctypes), its time and memory are left out"
            )
        simulated = plain(self)
        block = simulated._life.block
        offset: int = simulated._spec.offset * self.element_size()
        return 0 if block is None else block.address + offset

    def type(self, dtype: Any = None, *args: Any, **kwargs: Any) -> Any:
        if dtype is None:
            return f"torch.cuda.{super().type().rpartition('.')[2]}"
        if isinstance(dtype, str) and dtype.startswith("torch.cuda."):
            dtype = dtype.replace("torch.cuda.", "torch.", 1)
            dtype = constructors.empty(0).type(dtype).dtype
        return self.to(dtype)

    def cuda(self, device: Any = None, *_: Any, **__: Any) -> torch.Tensor:
        number = gpu_number(device)
        return self.to(GPUS[number]) if _several else self

    def to(self, *args: Any, **kwargs: Any) -> Any:
        return to_device(self, args, kwargs)

    def tolist(self) -> Any:
        return self.detach().cpu().tolist()

    def numpy(self, *, force: bool = False) -> Any:
        if not force:
            raise TypeError(
                f"can't convert {self.device} device type tensor to numpy. "
                "Use Tensor.cpu() to copy the tensor to host memory first."
            )
        return self.detach().cpu().resolve_conj().resolve_neg().numpy()

    def __array__(self, dtype: Any = None) -> Any:
        return self.numpy()

    def __dlpack__(self, *_: Any, **__: Any) -> Any:
        raise BufferError("a tensor of the simulated GPU has no data to share through DLPack")

    def new_tensor(  # type: ignore[override]
        self, data: Any, *, dtype: Any = None, device: Any = None, **kwargs: Any
    ) -> Any:
        device = self.device if device is None else device
        return constructors.tensor(data, dtype=dtype or self.dtype, device=device, **kwargs)

    def new(self, *args: Any, **kwargs: Any) -> Any:
        only = args[0] if len(args) == 1 else None
        if isinstance(only, (list, tuple)) and not isinstance(only, torch.Size):
            return self.new_tensor(only)
        if isinstance(only, torch.Tensor):
            return only.detach()
        return constructors.empty(*(args or (0,)), dtype=self.dtype, device=self.device)

    def record_stream(self, stream: Any) -> None:
        current_engine().memory.record_stream(plain(self)._life, stream.stream_id)

    def share_memory_(self) -> DeviceTensor:
        return self

    def is_shared(self) -> bool:
        return True

    @property
    def data(self) -> torch.Tensor:
        if is_lazy(self):  # it refuses whatever is not to move it
            with private.NoTorchFunction():
                return private.data(self)
        return private.data(self)

    @data.setter
    def data(self, value: torch.Tensor) -> None:
        current_engine().replace_data(self, value)

    def __copy__(self) -> torch.Tensor:
        return _like(self, self.detach(), vars_of(self))

    def __deepcopy__(self, memo: dict[int, Any]) -> torch.Tensor:
        if id(self) in memo:
            return memo[id(self)]  # type: ignore[no-any-return]
        if not self.is_leaf:
            raise RuntimeError(
                "Only Tensors created explicitly by the user (graph leaves) "
                "support the deepcopy protocol at the moment."
            )
        with torch.no_grad():
            memo[id(self)] = made = _like(self, _copied(plain(self), memo), {})
        if private.is_parameter(self):
            current_engine().on_result(torch.nn.Parameter.__deepcopy__, (self, memo), {}, made)
            return made  # as Parameter.__deepcopy__: neither gradient nor attributes
        if self.grad is not None:
            made.grad = copy.deepcopy(self.grad, memo)
        vars(made).update(copy.deepcopy(vars_of(self), memo))
        return made

    def __reduce_ex__(self, protocol: Any) -> Any:
        # Checkpoints written during the simulated steps get plausible CPU data.
        host = plain(self).detach().cpu()
        mark(host.untyped_storage(), gpu_of(self))
        return _like(self, host, vars_of(self)).__reduce_ex__(protocol)

    def __repr__(  # type: ignore[override]
        self, *, tensor_contents: Any = None
    ) -> str:
        spec = plain(self)._spec
        return (
            f"tensor(..., device='{self.device}', size={spec.size}, dtype={spec.dtype}, simulated)"
        )

    def __format__(self, format_spec: str) -> str:
        if self.dim() == 0:
            return self.item().__format__(format_spec)
        return object.__format__(self, format_spec)


class SimulatedTensor(DeviceTensor):
    """A tensor on a simulated GPU: geometry and a storage life, no data.

    Attributes: ``_meta`` is the plain meta tensor that shares the storage, ``_spec`` its
    interned geometry, ``_life`` the allocation behind the storage.
    """

    _meta: torch.Tensor
    _spec: Spec
    _life: Any

    __torch_function__ = private.disabled_torch_function

    def __new__(cls, *args: Any, **kwargs: Any) -> Any:
        """What code makes that asks a tensor for its type: a parameter, or a plain tensor."""
        kind = torch.nn.Parameter if "requires_grad" in kwargs else torch.Tensor
        return kind(*args, **kwargs)

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        if len(types) > 1 and wrapped(types):
            return NotImplemented
        return current_engine().run(func, args, kwargs or {})

    def _content(self) -> torch.Tensor | None:
        """The tensor's numbers, as a tensor of the host; ``None``: not known."""
        value, spec = self._life.value, self._spec
        if value is None or value.dtype != spec.dtype:
            return None
        with no_dispatch():
            content: torch.Tensor = value.as_strided(spec.size, spec.stride, spec.offset)
        return content


def wrapped(types: Any) -> bool:
    """Is there a tensor of another class with operators of its own (a DTensor) among ``types``?"""
    return not all(issubclass(kind, DeviceTensor) for kind in types)


def to_device(tensor: DeviceTensor, args: tuple[Any, ...], kwargs: dict[str, Any]) -> torch.Tensor:
    """``Tensor.to`` for a simulated tensor: a move to its own device is no move.

    C++ cannot see that, for it believes the tensor to be on ``meta``.
    """
    if args and isinstance(args[0], torch.Tensor):
        other, args = args[0], args[1:]
        args = (other.device, other.dtype, *args)
    elif "other" in kwargs:
        kwargs = dict(kwargs)
        other = kwargs.pop("other")
        args = (other.device, other.dtype, *args)
    names: tuple[str, ...] = ("device", "dtype", "non_blocking", "copy")
    if args and isinstance(args[0], torch.dtype):
        names = names[1:]
    given = dict(zip(names, args, strict=False)) | kwargs
    device = given.pop("device", None)
    if device is not None:
        device = torch.device("cuda", device) if isinstance(device, int) else torch.device(device)
        if device.type == "meta":
            meta = plain(tensor)._meta
            return torch.empty_like(meta, dtype=given.get("dtype"), device=META)
        if device.type == "cuda" and gpu_number(device) != gpu_of(tensor):
            # Converted first: fewer bytes pass, mostly.
            tensor = to_device(tensor, (), {**given, "copy": False})  # type: ignore[assignment]
            return current_engine().move(tensor, GPUS[gpu_number(device)])
        if device.type != "cuda":
            if gpu_of(tensor) and tensor.requires_grad:
                tensor = to_device(tensor, (), {**given, "copy": False})  # type: ignore[assignment]
                return current_engine().move(tensor, device)
            given["device"] = device
    return super(DeviceTensor, tensor).to(**{"dtype": tensor.dtype} | given)


#: Attributes that belong to the simulation, not to the user.
_OWN = ("_meta", "_spec", "_life", private.PARAMETER_MARK)


def vars_of(tensor: torch.Tensor) -> dict[str, Any]:
    """The attributes that the user gave a tensor."""
    if type(tensor) is not SimulatedTensor:
        return dict(vars(tensor))
    return {name: value for name, value in vars(tensor).items() if name not in _OWN}


def _like(tensor: torch.Tensor, data: torch.Tensor, attributes: dict[str, Any]) -> torch.Tensor:
    """A leaf over the data of ``data`` that is to Python what ``tensor`` is, on either side."""
    requires_grad = tensor.requires_grad
    if private.is_parameter(tensor):
        made: torch.Tensor = torch.nn.Parameter(data, requires_grad=requires_grad)
    elif type(tensor) is SimulatedTensor:
        made = data.detach().requires_grad_(requires_grad)
    else:
        made = private.MAKE_SUBCLASS.now(type(tensor), data, requires_grad)
    vars(made).update(attributes)
    return made


def _copied(tensor: SimulatedTensor, memo: dict[int, Any]) -> torch.Tensor:
    """A deep copy is one of the whole storage, so that views of one storage stay together."""
    spec, life = tensor._spec, tensor._life
    if (life.nbytes == spec.nbytes and spec.contiguous) or life.nbytes % spec.dtype.itemsize:
        return tensor.clone()
    whole = memo.get(id(life))
    if whole is None or whole.dtype is not spec.dtype:
        count = life.nbytes // spec.dtype.itemsize
        whole = memo[id(life)] = tensor.as_strided((count,), (1,), 0).clone()
    return whole.as_strided(spec.size, spec.stride, spec.offset).detach()


def wrap(meta: torch.Tensor, spec: Spec, life: Any) -> SimulatedTensor:
    """A simulated tensor over ``meta``'s storage (no allocation happens here).

    It has CUDA's dispatch keys, for autocast, yet C++ finds it on "meta": a class that is asked for
    its device (``dispatch_device``) would be asked twice as often as it runs operators.
    """
    tensor: SimulatedTensor = private.make_subclass(
        SimulatedTensor, meta, False, device_for_backend_keys=CUDA
    )
    tensor._meta = meta
    tensor._spec = spec
    tensor._life = life
    return tensor


def plain(tensor: torch.Tensor) -> SimulatedTensor:
    """A tensor on the device as the engine knows them: itself, or one over the same storage."""
    if type(tensor) is SimulatedTensor:
        return tensor
    with private.NoTorchFunction():  # a lazy module's parameter refuses to tell
        is_inference = tensor.is_inference()
    # Views that inference mode makes of an ordinary tensor are ordinary ones.
    with private.InferenceMode(is_inference):
        meta = view_of(tensor)
        return wrap(meta, spec_of(meta), current_engine().memory.adopt(meta))


def view_of(tensor: torch.Tensor) -> torch.Tensor:
    """A plain meta tensor with the present C++ geometry and storage of ``tensor``."""
    with private.NoTorchFunction(), no_dispatch():
        meta = constructors.empty(0, dtype=tensor.dtype, device=META)
        meta.set_(tensor.untyped_storage(), tensor.storage_offset(), tensor.size(), tensor.stride())
    return meta
