"""The fix of each fault, as instructions."""

from __future__ import annotations

import math
import re
import signal
from collections.abc import Mapping
from typing import Final

from trainfit.findings.worker_start import named_in
from trainfit.results.dataloader import LoaderSettings
from trainfit.results.text import size

#: "Can't pickle local object 'main.<locals>.<lambda>'", "Can't pickle <function <lambda> at …>".
_FUNCTION: Final = re.compile(r"local object|<lambda>|<function ")
_OTHER_START: Final = 'pass multiprocessing_context="forkserver" (or "spawn") to the DataLoader'

HANGS: Final[Mapping[str, str]] = {
    "deadlock": f"{_OTHER_START}: workers then do not inherit locks and threads; or open "
    "and start what it waits for in the worker (worker_init_fn, or at the first sample) and "
    "use persistent_workers=True so that it happens once",
    "hung": f"try a longer time limit; if it is stuck, {_OTHER_START}, or num_workers=0",
    "slow_dataset": "slow, not stuck: make the data set faster, or use more workers or time",
    "slow_sampler": "compute the sampler's indices before the epoch (a list), or faster",
    "slow_start": "keep the data set object small for spawned workers: store paths or "
    "a memory-mapped file, not the data; or use fork and persistent_workers=True",
    "start_hangs": "check what worker_init_fn and the script's imports do in a worker: "
    "no download, no lock, no GPU",
}

NOTEBOOK: Final = (
    "delete the line: nbconvert writes get_ipython() for a notebook's % and ! lines; what they "
    "install or set, do in the shell before the run"
)
SCHEDULE: Final = (
    "as many steps as the training has (total_steps=epochs * len(loader), divided by the "
    "micro-batches of a step) where scheduler.step() comes after each batch, or one an epoch"
)
NOT_RESTARTABLE: Final = (
    "a generator is exhausted after one pass: pass an object whose __iter__ returns a new "
    "iterator each time (or a list)"
)
NO_BATCHES: Final = (
    "check whether the data set is empty, whether drop_last drops its only batch, and "
    "whether __getitem__ raises StopIteration, which ends the loop silently"
)
DIED: Final = "run it with num_workers=0 to see the error message"
BATCH: Final = (
    "return tensors, arrays, numbers, strings, and containers of those from the data set and "
    "collate_fn (no lambda, generator, open file or lock): a worker pickles each batch"
)
LOST: Final = (
    "check stderr: a worker's queue thread prints there why it could not send a batch; "
    "then raise ulimit -n, or return only tensors, arrays, numbers and strings"
)
CLOSE_FILES: Final = (
    "close each file that is opened (with open(…) as file:), also those of PIL.Image.open, h5py, "
    "np.load of an .npz and subprocess.Popen; what a list or a dictionary keeps stays open. Where "
    "so many are needed at once, raise the limit (ulimit -n 65536 before the command)"
)
OPEN_FILES: Final = (
    "raise the limit (ulimit -n 65536 before the command), or call "
    'torch.multiprocessing.set_sharing_strategy("file_system") at the top of the script; fewer '
    "tensors per batch (pack or stack them) or a smaller num_workers × prefetch_factor also help; "
    "a script that keeps batches in a list keeps their files open: clone what it keeps"
)
OPEN_IN_WORKER: Final = (
    "open it in the worker, at the first __getitem__ (the attribute is None until then), or in "
    "worker_init_fn: one handle per worker"
)
MORE_SHARDS: Final = (
    "split the data into more files (several a worker), or share out samples instead of files; "
    "until then no more workers than shards"
)
SHARD_BY_WORKER: Final = """shard by worker in __iter__:
    worker = torch.utils.data.get_worker_info()
    number, workers = (worker.id, worker.num_workers) if worker is not None else (0, 1)
    for index, sample in enumerate(source):
        if index % workers == number:
            yield sample
better: assign each worker its own files, files[number::workers]; with DistributedDataParallel
also by rank. Until then num_workers=1"""
GENERATOR_IN_WORKER: Final = (
    "make it in the worker, at the first __getitem__: self.rng = "
    "numpy.random.default_rng(torch.initial_seed()); that seed differs by worker and epoch"
)
SEED_OF_WORKER: Final = (
    "leave global generators to PyTorch, which seeds them by worker and epoch; or seed them in "
    "worker_init_fn with torch.initial_seed() % 2**32, not with a constant or the worker's number"
)
NOT_PICKLABLE: Final = (
    "make every attribute picklable: module-level functions instead of lambdas, locks and "
    "generators made in the worker at the first sample, files and connections opened there, too; "
    "what cannot be changed needs fork, which an open file or connection does not survive"
)
NO_LAMBDA: Final = (
    "use a module-level function (functools.partial for its arguments) instead of the lambda or "
    "local function; or start the workers with fork"
)
UNGUARDED: Final = "Spawned workers import the script, which starts workers again"
MAIN_GUARD: Final = (
    'put top-level code of the script below `if __name__ == "__main__":`, or use fork '
    '(multiprocessing_context="fork")'
)
NOT_IMPORTABLE: Final = (
    "move the class or function to a module of its own that the script imports (what a notebook "
    "or an interactive session defines cannot be imported), or use fork"
)
SPAWN_START: Final = (
    "check stderr for the workers' traceback: usually the script lacks "
    '`if __name__ == "__main__":`, or defines what a worker cannot import; or use fork'
)
TIMEOUT: Final = (
    "set DataLoader(timeout=…) above the time of the slowest batch, including the first ones; "
    "if a batch never arrives, set timeout=0 and let a time limit print the stacks"
)
PIN_THREAD: Final = (
    "pin_memory=False; check stderr: too many open files (ulimit -n) also stop that thread"
)
PINNING: Final = (
    "pin_memory=False, or give the batch's type a pin_memory() method that returns "
    "itself; on CUDA also check that this much memory can be locked"
)
OWN_PINNING: Final = (
    "pin what is a tensor there (a part may be None), and return self; or leave the method out, or "
    "pin_memory=False"
)
GETATTR: Final = (
    "pickle makes the object without __init__ and asks it for names before it has any: begin "
    '__getattr__ with `if name.startswith("__") or "inner" not in vars(self): raise '
    "AttributeError(name)`, with the attribute that it looks in instead of inner"
)
REBUILT: Final = (
    "pickle makes the object without __init__: let __setstate__ or __reduce__ make what this line "
    "needs; or start the processes with fork"
)
OWN_ERROR: Final = (
    "fix what this line is given; `python -m pdb -c continue SCRIPT` stops there and shows the "
    "variables"
)
OWN_ERROR_IN_WORKER: Final = (
    "fix what this line is given; with num_workers=0 `python -m pdb -c continue SCRIPT` stops "
    "there and shows the sample"
)
EXITED: Final = (
    "something called exit(), or a library terminated the process: run it with num_workers=0 to "
    "see the error message"
)
KILLED: Final = (
    "find what sent the signal: a scheduler's memory or time limit, a container's limit (its "
    "count of OOM kills), a script; if it was memory, fewer workers need less"
)
CRASHED: Final = (
    "native code crashed: run with num_workers=0 and `python -X faulthandler` to see where; if "
    f"it works there, {_OTHER_START} and open files, decoders and clients in the worker"
)
#: Where the line is known.
CRASHED_AT: Final = (
    "look at what this line hands to native code: pointers, sizes and types (ctypes, own "
    "extensions), memory that was freed or is written by another thread, an index outside of an "
    "array; where it is a library's function, install another version of it, of the same build as "
    "PyTorch"
)
CRASHES: Final[Mapping[int, str]] = {
    signal.SIGSEGV: "crashed in native code (segmentation fault)",
    signal.SIGABRT: "was aborted by native code",
    signal.SIGILL: "used an instruction that this CPU does not support: a package was "
    "built for another CPU",
    signal.SIGFPE: "crashed in native code (division by zero)",
    signal.SIGBUS: "crashed in native code (bus error)",
}
EXCEPTION: Final = "raises for every DataLoader setting; fix this line"


RAM: Final = (
    "allocate less there: load a part at a time, a memory-mapped file (numpy.memmap, mmap=True of "
    "torch.load), a smaller dtype; or use a machine, a container or a job with more memory"
)


LISTS: Final = (
    "a data set in Python lists is copied into each worker as reference counts change: store it in "
    "one NumPy array, tensor or memory-mapped file"
)


def not_picklable(said: str) -> str:
    """The fix for an object that pickle refuses, by what the exception says of it."""
    if named_in(said):
        return OPEN_IN_WORKER
    return NO_LAMBDA if _FUNCTION.search(said) else NOT_PICKLABLE


def memory(settings: LoaderSettings | None) -> str:
    """The fix where all workers together need too much RAM."""
    fewer = "fewer workers"
    if settings is not None and settings.num_workers:
        fewer += f" ({settings.num_workers // 2} instead of {settings.num_workers})"
    return f"{fewer}, a smaller prefetch_factor, or more memory; {LISTS}"


def shm(settings: LoaderSettings | None, need_bytes: int | None) -> str:
    """The fix where /dev/shm is too small; with the size that is needed, if it is known."""
    if need_bytes is None:
        amount = "docker run --shm-size=8g (or more, as needed)"
    else:
        # A quarter more, in whole GiB: allocations are rounded up, other processes have some.
        gib = max(1, math.ceil(need_bytes * 1.25 / (1 << 30)))
        amount = f"docker run --shm-size={gib}g ({size(need_bytes)} needed)"
    present = "" if settings is None else f" is {settings.tokens}"
    return (
        f"{amount} or --ipc=host; outside of a container mount -o remount,size=… /dev/shm; or "
        f"fewer prefetched batches (num_workers × prefetch_factor{present}), or "
        "smaller ones (uint8 instead of float32); "
        'torch.multiprocessing.set_sharing_strategy("file_system") uses the same memory'
    )
