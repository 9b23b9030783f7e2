"""What is known of PyTorch without importing it: how a private name is taken, the tested
versions, and PyTorch's names in stacks and profiles."""

from __future__ import annotations

import contextlib
import inspect
import operator
import os
import re
import sys
from collections.abc import Callable, Iterator
from typing import Any, Final, NamedTuple, NoReturn

from trainfit.results.files.errors import TrainfitError
from trainfit.version import __version__

# ---
# The versions of PyTorch that the tests run on, and what is said of another.
#
# Without importing PyTorch.


#: The oldest that pyproject.toml admits, and the newest that `make test-newest` passes on.
OLDEST: Final = "2.8"
NEWEST: Final = "2.15"

_seen: set[str] = set()


def saw(version: str) -> None:
    """Note the version of PyTorch that something runs on; in trainfit's own processes only."""
    if version:
        _seen.add(version)


def newer_seen() -> str:
    """What to say of the versions that were noted, in one line; empty if the tests know them."""
    return newer_than_tested(max(_seen, key=release, default=""))


def newer_than_tested(version: str) -> str:
    """What to say of a PyTorch of this version, in one line; empty if the tests know it."""
    if release(version) <= release(NEWEST):
        return ""
    return (
        f"PyTorch {version} is newer than {NEWEST}, the newest that this trainfit was tested with: "
        "results may be wrong where it differs"
    )


def release(version: str) -> tuple[int, ...]:
    """Major and minor version: patch releases change no private name that is of interest."""
    match = re.match(r"(\d+)\.(\d+)", version)
    return (int(match[1]), int(match[2])) if match else (0, 0)


# -- a name that is not there ---------------------------------------------------------------------

#: The exit code of a child that could do nothing with its PyTorch, and what its last line begins
#: with.
_CODE: Final = os.EX_CONFIG
_MARK: Final = "trainfit: refused: "


class MissingNameError(TrainfitError):
    """PyTorch has no such name, of which trainfit makes use."""

    def __init__(self, name: str) -> None:
        version = getattr(sys.modules.get("torch"), "__version__", "")
        super().__init__(
            f"PyTorch {version} has no {name}, which trainfit {__version__} needs (it is tested "
            f"with PyTorch {OLDEST} to {NEWEST}): install PyTorch {NEWEST}, or a newer trainfit"
        )
        self.name = name


class RefusedError(TrainfitError):
    """A child process could do nothing with its PyTorch; the message is the child's."""


@contextlib.contextmanager
def tells_parent() -> Iterator[None]:
    """End this process with what :func:`check` understands where a name is missing, or where
    PyTorch is older than the oldest that has all."""
    try:
        yield
    except MissingNameError as error:
        _refuse(str(error))
    except (AttributeError, ImportError) as error:  # a public name that came later
        version = getattr(sys.modules.get("torch"), "__version__", "")
        if not version or release(version) >= release(OLDEST):
            raise
        _refuse(
            f"PyTorch {version} is older than {OLDEST}, the oldest that trainfit runs with "
            f"({error}): install PyTorch {OLDEST} to {NEWEST} for the Python that runs the script, "
            "in an environment of its own where the script needs the older one"
        )


def _refuse(why: str) -> NoReturn:
    print(f"{_MARK}{why}", file=sys.stderr, flush=True)
    sys.exit(_CODE)


def check(code: int | None, output: str) -> None:
    """Look at how a child ended, and at what it printed.

    Raises:
        RefusedError: A name of PyTorch was missing to it.
    """
    last = output.rstrip().rpartition("\n")[2]
    if code == _CODE and last.startswith(_MARK):
        raise RefusedError(last.removeprefix(_MARK))


class PrivateName(NamedTuple):
    """An attribute that is to be replaced: ``patches.set(*place, value)``."""

    owner: Any
    name: str

    @property
    def now(self) -> Any:
        """What stands there, ours or PyTorch's."""
        return getattr(self.owner, self.name)


@contextlib.contextmanager
def needed() -> Iterator[None]:
    """Names that are looked up inside are needed.

    Raises:
        MissingNameError: One of them is not there.
    """
    try:
        yield
    except (AttributeError, ImportError) as error:
        raise MissingNameError(_named(error)) from error


def place(owner: Any, name: str) -> PrivateName:
    """The attribute ``name`` of a module or class.

    Raises:
        MissingNameError: It is not there.
    """
    if not hasattr(owner, name):
        raise MissingNameError(f"{_path(owner)}.{name}")
    return PrivateName(owner, name)


def attribute(kind: type, name: str) -> Callable[[Any], Any]:
    """What reads the attribute ``name`` of instances of a class, as fast as writing it out.

    Raises:
        MissingNameError: The class does not have it, and its methods do not set it.
    """
    declared = (vars(base).get("__annotations__", ()) for base in kind.__mro__)
    is_there = hasattr(kind, name) or any(name in names for names in declared)
    if not is_there and name not in _mentioned(kind):
        raise MissingNameError(f"{_path(kind)}.{name}")
    return operator.attrgetter(name)


def _mentioned(kind: type) -> set[str]:
    """Names in the Python code of a class's methods: what they set is among them.

    A hooked function (``simgpu.patching``) has the hook's code, and its own in ``__wrapped__``.
    """
    functions = (value for base in kind.__mro__ for value in vars(base).values())
    codes = (
        getattr(inspect.unwrap(function), "__code__", None)
        for function in functions
        if callable(function)
    )
    return {name for code in codes if code is not None for name in code.co_names}


def _path(owner: Any) -> str:
    module = getattr(owner, "__module__", None) if isinstance(owner, type) else None
    name = getattr(owner, "__qualname__", None) or getattr(owner, "__name__", None)
    path = f"{module}.{name}" if module else str(name or type(owner).__qualname__)
    return path if path.startswith("torch") else f"torch's {path}"


def _named(error: AttributeError | ImportError) -> str:
    if isinstance(error, AttributeError):
        return f"{_path(error.obj)}.{error.name}" if error.name else str(error)
    name = re.match(r"cannot import name '(\w+)'", str(error))
    return f"{error.name}.{name[1]}" if name and error.name else error.name or str(error)


# ---
# Names of PyTorch as stacks and profiles show them; without importing it.
#
# One that is gone is not seen any more: nothing is looked up by it.


#: Functions of a DataLoader's worker, of the thread that pins memory, and of the main process that
#: asks the sampler for the next batch's indices.
WORKER_LOOP: Final = "_worker_loop"
PIN_MEMORY_LOOP: Final = "_pin_memory_loop"
NEXT_INDEX: Final = "_next_index"
WORKER_FILE: Final = "utils/data/_utils/worker.py"
FETCH_FILE: Final = "utils/data/_utils/fetch.py"
PIN_MEMORY_FILE: Final = "utils/data/_utils/pin_memory.py"

#: Modules whose functions cost a sample its time.
COLLATION: Final = "torch.utils.data._utils.collate"
OPERATORS: Final = "torch._ops"
#: How C modules call what PyTorch shows by another name.
SHOWN_AS: Final = (
    (("torch._C", "_VariableFunctionsClass"), "torch"),
    (("torch._C", "_VariableFunctions"), "torch"),
    (("torch._C", "TensorBase"), "torch.Tensor"),
    (("torch._C", "_TensorBase"), "torch.Tensor"),
)

#: What :func:`is_in_bad_fork` asks.
BAD_FORK: Final = "torch.cuda._is_in_bad_fork()"


def is_in_bad_fork(cuda: Any) -> bool:
    """Was this process forked from one that had started CUDA? ``cuda`` is ``torch.cuda``."""
    return bool(cuda._is_in_bad_fork())
