"""What made a block of memory, by the stack that PyTorch recorded with it: kind, operator, line.

A stack has Python's frames and, with ``stacks="all"`` (the default), those of C++. The backward
pass runs in a thread of its own: without C++ frames its stacks are empty.
"""

from __future__ import annotations

import functools
import re
from typing import Final, NamedTuple

from trainfit.memory.snapshot.file import Frame, Stack

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


class Origin(NamedTuple):
    """Where memory comes from.

    ``kind`` is one of trainfit's kinds of memory ("activation", "optimizer_state", …) or one of
    this module's. ``operator`` is what allocated it ("": not known), ``line`` the innermost line of
    code outside of PyTorch, ``user_line`` that outside of installed packages (both ``None``: none).
    """

    kind: str
    operator: str
    line: str | None
    user_line: str | None


@functools.lru_cache(maxsize=65536)
def origin(stack: Stack, in_history: bool) -> Origin:
    """The origin of a block with this stack; ``in_history``: its allocation is in the history."""
    python = tuple(frame for frame in stack if frame.is_python and not _HOOKS.search(frame.file))
    if not stack:
        return Origin(NO_STACK if in_history else BEFORE_HISTORY, "", None, None)
    user = next((f for f in python if not _INSTALLED.search(f.file)), None)
    line = next((f for f in python if not _TORCH.search(f.file) and not _wraps(f)), None)
    if user is not None and _within_module(python, user):
        line = user  # a model of the user's own: what it calls says less
    return Origin(_kind(stack, python), _operator(stack, python), _place(line), _place(user))


def _within_module(python: Stack, frame: Frame) -> bool:
    """Whether a module's call lies further out than the frame, or is the frame."""
    return any(_is_call(outer) for outer in python[python.index(frame) :])


def _wraps(frame: Frame) -> bool:
    return _WRAPPERS.search(frame.file) is not None


def _place(frame: Frame | None) -> str | None:
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


def _is_load(frame: Frame) -> bool:
    reads = _in(frame, "torch/serialization.py") or "safetensors" in frame.file
    return reads or frame.name in ("load_state_dict", "from_pretrained", "load_checkpoint")


def _is_call(frame: Frame) -> bool:
    called = _in(frame, "torch/nn/modules/module.py") and frame.name.endswith("_call_impl")
    return called or frame.name == "forward"


def _in(frame: Frame, path: str) -> bool:
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
