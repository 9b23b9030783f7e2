"""What was allocated at a moment of a snapshot's history: where memory ran out, or was at its most.

PyTorch keeps the last entries of the history only. So the walk goes back from the end, whose blocks
the snapshot has: an allocation takes its block away, a free brings it back.
"""

from __future__ import annotations

import dataclasses
import functools
import re
from typing import Final, Literal, NamedTuple

from trainfit.memory.snapshot_file import (
    DeviceSnapshot,
    SnapshotBlock,
    SnapshotEvent,
    SnapshotFrame,
    Stack,
)

#: The allocator's smallest unit (kMinBlockSize of c10/core/CachingDeviceAllocator.h).
_UNIT: Final = 512

#: Born before the history begins.
BEFORE: Final = -1


class LiveBlock(NamedTuple):
    """Memory that a tensor holds at the moment.

    ``nbytes`` is the whole block; of blocks that are gone in the end what was asked for, rounded up
    to 512. ``born`` is the place of its allocation in the history, or :data:`BEFORE`; then its
    ``stack`` is known only if the block is there in the end.
    """

    address: int
    nbytes: int
    born: int
    stack: Stack


@dataclasses.dataclass(frozen=True)
class HistoryMoment:
    """The state of one GPU at one moment.

    Attributes
    ----------
    why: "out_of_memory": the history's last failed request; "peak": the most that was allocated
        within the history; "snapshot": there is no history, so the moment when it was written.
    event: Place of the moment in the history; 0 without one.
    live: All memory of tensors then.
    pending_bytes: Freed, but not yet given back by another stream, when the snapshot was written.
    requested_bytes: What the failed request asked for; 0 if none failed.
    device_free_bytes: Free on the GPU at that request; ``None`` if not recorded.
    reserved_bytes: Reserved then; ``None`` where it cannot be told.
    failures: Requests that failed in the whole history, by their places.
    at_end: Whether the snapshot's blocks show just this moment.
    """

    why: Literal["out_of_memory", "peak", "snapshot"]
    event: int
    live: tuple[LiveBlock, ...]
    pending_bytes: int
    requested_bytes: int
    device_free_bytes: int | None
    reserved_bytes: int | None
    failures: tuple[int, ...]
    at_end: bool

    @property
    def allocated_bytes(self) -> int:
        """Bytes of all live blocks."""
        return sum(block.nbytes for block in self.live)


class DeviceHistory:
    """The history of one GPU, with what was there before it begins.

    Attributes
    ----------
    events: Allocations, frees, segments and failures, oldest first.
    before: Blocks that the first entry finds, by address.
    free_action: The entry that ends a tensor: its free is requested, or (where such entries were
        skipped) completed.
    """

    def __init__(self, device: DeviceSnapshot) -> None:
        self._device = device
        self.events = device.events
        self.free_action = _free_action(device.events)
        at_end = {block.address: block for block in device.blocks() if block.state == "allocated"}
        self._at_end = at_end
        self.before = self._walk_back(at_end)
        self._born_to_stay = self._stays()

    def _walk_back(self, at_end: dict[int, SnapshotBlock]) -> dict[int, LiveBlock]:
        live = {
            address: LiveBlock(address, block.nbytes, BEFORE, block.stack)
            for address, block in at_end.items()
        }
        for event in reversed(self.events):
            if event.action == "alloc":
                live.pop(event.address, None)
            elif event.action == self.free_action:
                live[event.address] = LiveBlock(event.address, _charged(event), BEFORE, ())
        return live

    def _stays(self) -> dict[int, SnapshotBlock]:
        """Places of the allocations whose blocks are there in the end."""
        latest: dict[int, int] = {}
        for place, event in enumerate(self.events):
            if event.action == "alloc":
                latest[event.address] = place
            elif event.action == self.free_action:
                latest.pop(event.address, None)
        return {
            place: self._at_end[address]
            for address, place in latest.items()
            if address in self._at_end
        }

    def moment(self) -> HistoryMoment:
        """The last request that failed, else the peak, else the end."""
        failures = tuple(place for place, event in enumerate(self.events) if event.action == "oom")
        if failures:
            return self.at(failures[-1], "out_of_memory", failures)
        if not any(event.action == "alloc" for event in self.events):
            return self.at(len(self.events), "snapshot", ())
        return self.at(self._peak(), "peak", ())

    def _peak(self) -> int:
        """The place after the allocation with which most was allocated."""
        sizes = {address: block.nbytes for address, block in self.before.items()}
        total = maximum = sum(sizes.values())
        peak = 0
        for place, event in enumerate(self.events):
            if event.action == "alloc":
                block = self._born_to_stay.get(place)
                nbytes = block.nbytes if block is not None else _charged(event)
                total += nbytes - sizes.get(event.address, 0)
                sizes[event.address] = nbytes
                if total > maximum:
                    maximum, peak = total, place + 1
            elif event.action == self.free_action:
                total -= sizes.pop(event.address, 0)
        return peak

    def at(
        self,
        place: int,
        why: Literal["out_of_memory", "peak", "snapshot"],
        failures: tuple[int, ...],
    ) -> HistoryMoment:
        """The state before entry ``place``."""
        live = self.live_at(place)
        failed = self.events[place] if why == "out_of_memory" else None
        after = self.events[place + 1 if failed is not None else place :]
        quiet = all(event.action in ("snapshot", "oom") for event in after)
        return HistoryMoment(
            why=why,
            event=place,
            live=tuple(live.values()),
            pending_bytes=sum(b.nbytes for b in self._device.blocks() if b.state == "pending"),
            requested_bytes=failed.nbytes if failed is not None else 0,
            device_free_bytes=failed.device_free if failed is not None else None,
            reserved_bytes=self._reserved(after),
            failures=failures,
            at_end=quiet,
        )

    def live_at(self, place: int) -> dict[int, LiveBlock]:
        """What tensors hold before entry ``place``, by address."""
        live = dict(self.before)
        for number, event in enumerate(self.events[:place]):
            if event.action == "alloc":
                stays = self._born_to_stay.get(number)
                nbytes = stays.nbytes if stays is not None else _charged(event)
                live[event.address] = LiveBlock(event.address, nbytes, number, event.stack)
            elif event.action == self.free_action:
                live.pop(event.address, None)
        return live

    def _reserved(self, after: tuple[SnapshotEvent, ...]) -> int:
        """Reserved before the entries ``after``: those of the end, less what they added."""
        reserved = sum(segment.nbytes for segment in self._device.segments)
        return reserved - sum(map(newly_reserved, after))


def newly_reserved(event: SnapshotEvent) -> int:
    """Bytes that an entry adds to what is reserved; negative: gives back."""
    if event.action in ("segment_alloc", "segment_map"):
        return event.nbytes
    return -event.nbytes if event.action in ("segment_free", "segment_unmap") else 0


def _free_action(events: tuple[SnapshotEvent, ...]) -> str:
    """Memory is a tensor's until its free is requested; a history can have completed ones only."""
    actions = {event.action for event in events}
    return "free_requested" if "free_requested" in actions else "free_completed"


def _charged(event: SnapshotEvent) -> int:
    return -(-event.nbytes // _UNIT) * _UNIT


# ---
# What made a block of memory, by the stack that PyTorch recorded with it: kind, operator, line.
#
# A stack has Python's frames and, with ``stacks="all"`` (the default), those of C++. The backward
# pass runs in a thread of its own: without C++ frames its stacks are empty.


#: Kinds as of simulated memory, and those of stacks that do not tell.
BACKWARD: Final = "backward"
LOADED: Final = "loaded"
OTHER: Final = "other"
BEFORE_HISTORY: Final = "before_history"
NO_STACK: Final = "no_stack"

_OPERATOR: Final = re.compile(r"at::_ops::(\w+)::(?:call|redispatch)\b")
_BACKWARD_NODE: Final = re.compile(r"generated::(\w+Backward\d*)::apply")
#: Scratch memory of libraries: what cuDNN, cuBLAS and cuSPARSE are given to work in.
_WORKSPACE: Final = re.compile(
    r"getNewWorkspace|getCUDABlasLtWorkspace|getWorkspace|run_conv_plan|"
    r"cudnn\w*::.*[Ww]orkspace|run_single_conv"
)
#: Files of PyTorch, and of packages that wrap a call: never the line of code that is meant.
_TORCH: Final = re.compile(r"(?:^|[\\/])torch[\\/]|(?:^|[\\/])_ops\.py$|^<")
_WRAPPERS: Final = re.compile(
    r"[\\/](?:accelerate|deepspeed|contextlib\.py|functools\.py|threading\.py|peft[\\/]tuners[\\/]"
    r"tuners_utils\.py)"
)
#: trainfit's hooks in a watched run, whether it is installed or runs from its sources.
_HOOKS: Final = re.compile(
    r"[\\/]trainfit[\\/](?:hooks|torch_private|watch|scripts|integrations)[\\/]"
)
_INSTALLED: Final = re.compile(
    r"[\\/](?:site-packages|dist-packages)[\\/]|[\\/]lib[\\/]python\d|[\\/]lib[\\/](?:runpy|"
    r"contextlib|functools)\.py$|^<"
)
_MOVES: Final = frozenset(
    {"to", "cuda", "_apply", "convert", "half", "bfloat16", "float", "to_empty"}
)
_BACKWARD_CALLS: Final = frozenset({"backward", "_engine_run_backward"})


class AllocationOrigin(NamedTuple):
    """The place in a program that memory comes from.

    ``kind`` is one of trainfit's kinds of memory ("activation", "optimizer_state", …) or one of
    this module's. ``operator`` is what allocated it ("": not known), ``line`` the innermost line of
    code outside of PyTorch, ``user_line`` that outside of installed packages (both ``None``: none).
    """

    kind: str
    operator: str
    line: str | None
    user_line: str | None


@functools.lru_cache(maxsize=65536)
def origin(stack: Stack, in_history: bool) -> AllocationOrigin:
    """The origin of a block with this stack; ``in_history``: its allocation is in the history."""
    python = tuple(frame for frame in stack if frame.is_python and not _HOOKS.search(frame.file))
    if not stack:
        return AllocationOrigin(NO_STACK if in_history else BEFORE_HISTORY, "", None, None)
    user = next((f for f in python if not _INSTALLED.search(f.file)), None)
    line = next((f for f in python if not _TORCH.search(f.file) and not _wraps(f)), None)
    if user is not None and _within_module(python, user):
        line = user  # a model of the user's own: what it calls says less
    return AllocationOrigin(
        _kind(stack, python), _operator(stack, python), _place(line), _place(user)
    )


def _within_module(python: Stack, frame: SnapshotFrame) -> bool:
    """Whether a module's call lies further out than the frame, or is the frame."""
    return any(_is_call(outer) for outer in python[python.index(frame) :])


def _wraps(frame: SnapshotFrame) -> bool:
    return _WRAPPERS.search(frame.file) is not None


def _place(frame: SnapshotFrame | None) -> str | None:
    """``folder/file.py:12``: enough to find it, short enough to read."""
    if frame is None:
        return None
    parts = re.split(r"[\\/]", frame.file)
    return f"{'/'.join(parts[-2:])}:{frame.line}"


def _kind(stack: Stack, python: Stack) -> str:
    native = [frame.name for frame in stack if not frame.is_python]
    if any(_WORKSPACE.search(name) for name in native[:8]):
        return "workspace"
    if any("AccumulateGrad" in name for name in native):
        return "gradient"
    if _is_backward(native, python):
        return BACKWARD
    if any(_in(frame, "torch/optim/") for frame in python):
        return "optimizer_state"
    if any(frame.name in _MOVES and _in(frame, "torch/nn/modules/module.py") for frame in python):
        return "parameter"
    if any(_is_load(frame) for frame in python):
        return LOADED
    if any(_in(f, "torch/nn/") and f.name in ("__init__", "reset_parameters") for f in python):
        return "parameter"
    if any(_is_call(frame) for frame in python):
        return "activation"
    return OTHER


def _is_backward(native: list[str], python: Stack) -> bool:
    if any("autograd::Engine::" in name for name in native):
        return True
    return any(f.name in _BACKWARD_CALLS and _TORCH.search(f.file) for f in python)


def _is_load(frame: SnapshotFrame) -> bool:
    reads = _in(frame, "torch/serialization.py") or "safetensors" in frame.file
    return reads or frame.name in ("load_state_dict", "from_pretrained", "load_checkpoint")


def _is_call(frame: SnapshotFrame) -> bool:
    called = _in(frame, "torch/nn/modules/module.py") and frame.name.endswith("_call_impl")
    return called or frame.name == "forward"


def _in(frame: SnapshotFrame, path: str) -> bool:
    return path in frame.file.replace("\\", "/")


def _operator(stack: Stack, python: Stack) -> str:
    """The operator that was called last, else the innermost function."""
    names = [frame.name for frame in stack if not frame.is_python]
    for name in names:
        if matched := _OPERATOR.search(name):
            inner = matched.group(1)
            if inner.startswith(("empty", "resize", "new_empty", "zeros", "_to_copy", "clone")):
                continue  # how it is allocated, not what for
            return inner
    for name in names:
        if matched := _BACKWARD_NODE.search(name):
            return matched.group(1)
    return next((f.name for f in python if f.name != "forward"), "")


def is_recomputed(stack: Stack) -> bool:
    """Whether a checkpointed part of the model runs again for its backward pass."""
    again = ("recompute_fn", "unpack_hook", "backward", "recompute_fn_and_inputs")
    return any(_in(f, "torch/utils/checkpoint.py") and f.name in again for f in stack)


def is_logits(stack: Stack) -> bool:
    """Whether the loss over a vocabulary, or the float32 copy it is computed of, made it."""
    names = ("cross_entropy", "log_softmax", "fixed_cross_entropy", "ForCausalLMLoss", "logits")
    return any(any(name in frame.name for name in names) for frame in stack[:60])


def outside_modules(stack: Stack) -> bool:
    """Whether a line of the script's own loop made it: Python, but no module's call."""
    return any(f.is_python for f in stack) and not any(_is_call(f) for f in stack)


def is_copy(stack: Stack) -> bool:
    """Whether it was made to take a copy (C++ frames say so): `.to(device)`."""
    names = [frame.name for frame in stack if not frame.is_python]
    return any("at::_ops::to_" in name or "at::_ops::_to_copy" in name for name in names)
