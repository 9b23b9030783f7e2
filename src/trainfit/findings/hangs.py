"""Diagnosis of a hanging loader, from its threads' stacks and the batches received.

A worker that is forked has the memory of the main process, but only the thread that forked: a
lock that another thread held stays locked, and a pool of threads has no threads left (POSIX,
fork(); GNU OpenMP's "fork after a parallel region"; pytorch#1355 and #17199).
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

from trainfit.findings import tracebacks
from trainfit.findings.facts import FailureContext
from trainfit.findings.fixes import OPEN_IN_WORKER
from trainfit.findings.threads import of_module
from trainfit.findings.tracebacks import ThreadStack
from trainfit.results.dataloader import LoaderSettings
from trainfit.results.findings import Place
from trainfit.results.text import count, duration
from trainfit.torch_private.needed import NEXT_INDEX

#: Libraries that do not survive a fork, with what each needs.
FORK_UNSAFE: Final[Mapping[str, str]] = {
    "cv2": f"call {of_module('cv2').line} before the loader is made and in worker_init_fn",
    "torch": "call torch.set_num_threads(1), or set OMP_NUM_THREADS=1, before the main process "
    "computes anything: its OpenMP pool does not survive a fork",
    "numba": 'set NUMBA_THREADING_LAYER=workqueue (or "forksafe" with TBB): OpenMP\'s layer does '
    "not survive a fork",
    "numpy": "set OPENBLAS_NUM_THREADS=1 and MKL_NUM_THREADS=1",
    "scipy": "set OPENBLAS_NUM_THREADS=1 and MKL_NUM_THREADS=1",
    "sklearn": "set OMP_NUM_THREADS=1 and OPENBLAS_NUM_THREADS=1",
    "tokenizers": "set TOKENIZERS_PARALLELISM=false",
    "transformers": "set TOKENIZERS_PARALLELISM=false",
    "av": f"decode with one thread ({of_module('av').line}), and {OPEN_IN_WORKER}",
    "decord": f"{of_module('decord').line}, and {OPEN_IN_WORKER}",
    "torchcodec": f"{of_module('torchcodec').line}, and {OPEN_IN_WORKER}",
    "h5py": f"HDF5 has one global lock, and caches per file: {OPEN_IN_WORKER}",
    "tables": f"HDF5 has one global lock, and caches per file: {OPEN_IN_WORKER}",
    "lmdb": f"an environment must not cross a fork: {OPEN_IN_WORKER}",
    "zarr": "set zarr.config's threading.max_workers to 1, and numcodecs.blosc.use_threads=False",
    "numcodecs": "set numcodecs.blosc.use_threads=False",
    "pyarrow": f"call {of_module('pyarrow').line} and pyarrow.set_io_thread_count(1)",
    "polars": "polars is not fork-safe; its documentation recommends spawn or forkserver",
    "grpc": f"a channel does not survive a fork: {OPEN_IN_WORKER}; or GRPC_ENABLE_FORK_SUPPORT=1",
    "google": f"a client (gRPC, HTTP) does not survive a fork: {OPEN_IN_WORKER}",
    "fsspec": f"its event loop's thread does not exist in a forked process: {OPEN_IN_WORKER}",
    "s3fs": f"its event loop's thread does not exist in a forked process: {OPEN_IN_WORKER}",
    "gcsfs": f"its event loop's thread does not exist in a forked process: {OPEN_IN_WORKER}",
    "boto3": f"a client does not survive a fork: {OPEN_IN_WORKER}",
    "botocore": f"a client does not survive a fork: {OPEN_IN_WORKER}",
    "tensorflow": "TensorFlow does not survive a fork; do not compute with it in the main process",
    "jax": "JAX is multithreaded and does not survive a fork",
    "logging": "a handler's lock was held, or what it writes to is blocked: log in workers through "
    "a QueueHandler, or not at all",
}

#: A batch that takes this many times the longest so far is taken to be stuck, and one that
#: needs so few times as long to be slow; in between it is undetermined.
_STUCK: Final = 10.0
_SLOW: Final = 3.0


@dataclass(frozen=True)
class Hang:
    """What a loader that hangs does: a fault's kind, words for it, and where it waits."""

    kind: str
    summary: str
    evidence: str
    library: str = ""
    place: Place | None = None


def explain(text: str, settings: LoaderSettings, seen: FailureContext) -> Hang:
    """Name what a run waited for at its time limit, from ``faulthandler``'s stacks."""
    threads = tracebacks.parse_stacks(text)
    workers = [thread for thread in threads if thread.role == "worker"]
    main = next((thread for thread in threads if thread.role == "iterating"), None)
    progress = _progress(settings, seen)
    if settings.num_workers == 0:
        return _alone(seen, progress)
    if main is not None and main.within("torch/utils/data/dataloader.py", NEXT_INDEX):
        where = f"The main process is in {main.where}"
        return Hang("slow_sampler", "The sampler returns no indices", f"{where}; {progress}")
    if (seen.started is not None and seen.started < settings.num_workers) or not workers:
        if main is not None or seen.started is not None:
            return _starting(main, settings, seen)
        return Hang("hung", "Hang; no worker reported where", progress)
    busy = [worker for worker in workers if not worker.is_idle]
    if not busy:
        return Hang(
            "batch_lost",
            "Batches were produced but did not arrive: the workers are idle, the main process "
            "waits",
            f"{progress}; a worker's queue thread that cannot send a batch reports it on stderr "
            "only",
        )
    return _busy(busy, settings, seen, progress)


def _alone(context: FailureContext, progress: str) -> Hang:
    if context.made:
        return Hang("slow_dataset", "The data set is slow, without workers, too", progress)
    words = (
        "No batch within the time limit in the main process either; slow or stuck is undetermined"
    )
    return Hang("hung", words, progress)


def _starting(main: ThreadStack | None, settings: LoaderSettings, context: FailureContext) -> Hang:
    started = context.started or 0
    where = f"; the main process is in {main.where}" if main is not None else ""
    many = f"{started} of {count(settings.num_workers, 'worker')} had started{where}"
    if main is not None and main.within("multiprocessing/reduction.py", "dump"):
        return Hang("slow_start", "Pickling the data set for the workers needs too long", many)
    words = "The workers do not start: an import or worker_init_fn hangs"
    return Hang("start_hangs", words, many)


def _busy(
    busy: list[ThreadStack], settings: LoaderSettings, context: FailureContext, progress: str
) -> Hang:
    """Workers are in the midst of a batch: slow, or stuck?"""
    first = busy[0]
    library = next((name for stack in busy if (name := tracebacks.library(stack, FORK_UNSAFE))), "")
    if context.idle and library in _WITH_POOLS:
        # Not where the line may wait for a disk or a network.
        library = "" if _waits_for_else(first) else library
    if context.idle and library in ("", "torch"):
        library = "torch" if _lacks_threads(first, settings, context) else ""
    locked = tracebacks.waits_for_lock(first)
    place = first.user.place if first.user is not None else None
    waits = f"{len(busy)} of {count(settings.num_workers, 'worker')} in {first.where}"
    if first.where is not None and first.where.code:
        waits += f": `{first.where.code}`"
    if library:
        waits += f" ({library})"
    evidence = f"{waits}; {progress}"
    stuck = _is_stuck(context)
    if stuck is False:
        words = (
            "The data set is slow: workers produced batches, or a batch needs as long without them"
        )
        return Hang("slow_dataset", words, evidence, library, place)
    if locked or (stuck and library):
        what = f"inside {library}" if library else "for a lock"
        return Hang(
            "deadlock", f"Workers wait {what} and make no progress", evidence, library, place
        )
    if stuck and context.idle:
        words = "The workers have no CPU time: their line waits for what does not come"
        return Hang("hung", words, evidence, library, place)
    if stuck:
        words = (
            "One sample lasts longer than ten batches: whether it is slow or stuck is undetermined"
        )
        return Hang("hung", words, evidence, library, place)
    words = "No batch within the time limit; whether the workers are slow or stuck is undetermined"
    return Hang("hung", words, f"{evidence}; try a longer time limit", library, place)


#: Libraries of which only the threads they compute with do not survive a fork.
_WITH_POOLS: Final = ("torch", "numpy", "scipy", "sklearn")
#: A line that waits for something else than a library's threads.
_WAITS: Final = re.compile(
    r"lock|\.(?:acquire|get|wait|join|recv\w*|read\w*|accept|connect|send\w*)\s*\("
    r"|\b(?:open|sleep|urlopen|input|load)\s*\(",
    re.IGNORECASE,
)


def _lacks_threads(worker: ThreadStack, settings: LoaderSettings, context: FailureContext) -> bool:
    """Has a forked worker that computes with several threads of PyTorch's no CPU time, at a line
    that waits for nothing else? OpenMP waits there for threads that did not survive the fork."""
    if settings.start_method != "fork" or not context.idle or (context.threads or 1) < 2:
        return False
    return not _waits_for_else(worker)


def _waits_for_else(worker: ThreadStack) -> bool:
    """May its line wait for something else than threads of a library?"""
    code = "" if worker.where is None else worker.where.code
    return not code or _WAITS.search(code) is not None


def _is_stuck(context: FailureContext) -> bool | None:
    """Is a batch that takes this long stuck? ``None``: there is nothing to compare it with."""
    silent = context.silent_s if context.silent_s is not None else context.limit_s
    usual = [each for each in (context.longest_s, context.alone_s) if each is not None]
    if silent is None or not usual:
        return True if context.idle else None  # without CPU time a sample is not slow, it waits
    times = silent / max(usual)
    return True if times > _STUCK else False if times <= _SLOW else None


def _progress(settings: LoaderSettings, context: FailureContext) -> str:
    """What came, in words."""
    if context.fetched is None:
        text = "the number of batches produced is unknown"
    elif len(context.fetched) > 1:
        text = "batches produced by each worker: " + ", ".join(
            str(each) for each in context.fetched
        )
    else:
        text = f"{count(context.made, 'batch', 'batches')} made"
    if context.silent_s is not None and context.made:
        text += f", none in the last {duration(context.silent_s)}"
    elif context.limit_s is not None:
        text += f" in {duration(context.limit_s)}"
    if context.longest_s is not None:
        text += f", the longest in {duration(context.longest_s)}"
    if context.alone_s is not None:
        text += f"; without workers a batch needs {duration(context.alone_s)}"
    return text
