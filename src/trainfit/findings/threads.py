"""Libraries with threads of their own, and what holds them down in a DataLoader's workers.

PyTorch sets its own threads to 1 in each worker (`torch/utils/data/_utils/worker.py`), and no
other library's.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final, Literal

from trainfit.results.findings import Fix

Where = Literal["environment", "worker_init_fn", "script"]


@dataclass(frozen=True)
class ThreadedLibrary:
    """A library with threads of its own, and how they are held down in a worker.

    ``pools`` are the names that a probe may give its pool, ``modules`` those of its functions.
    ``is_shared``: several libraries share the pool's name, and the functions tell which it is.
    ``variable`` sets them, too, where ``name`` is no variable of the environment.
    """

    title: str
    pools: tuple[str, ...]
    modules: tuple[str, ...]
    name: str
    value: str
    where: Where
    line: str
    is_shared: bool = False
    variable: str = ""


LIBRARIES: Final = (
    # cv2.setNumThreads(0) runs OpenCV's loops in the calling thread (modules/core/src/parallel).
    ThreadedLibrary(
        "OpenCV", ("opencv", "cv2"), ("cv2",), "cv2.setNumThreads", "0", "worker_init_fn",
        "cv2.setNumThreads(0)", variable="OPENCV_FOR_THREADS_NUM",
    ),
    ThreadedLibrary(
        "OpenBLAS", ("openblas",), (), "OPENBLAS_NUM_THREADS", "1", "environment",
        "export OPENBLAS_NUM_THREADS=1",
    ),
    ThreadedLibrary(
        "MKL", ("mkl",), (), "MKL_NUM_THREADS", "1", "environment", "export MKL_NUM_THREADS=1"
    ),
    ThreadedLibrary(
        "OpenMP", ("openmp", "libgomp", "libiomp", "libomp"), (), "OMP_NUM_THREADS", "1",
        "environment", "export OMP_NUM_THREADS=1",
    ),
    ThreadedLibrary(
        "BLIS", ("blis",), (), "BLIS_NUM_THREADS", "1", "environment", "export BLIS_NUM_THREADS=1"
    ),
    ThreadedLibrary(
        "NumExpr", ("numexpr",), ("numexpr",), "NUMEXPR_NUM_THREADS", "1", "environment",
        "export NUMEXPR_NUM_THREADS=1",
    ),
    ThreadedLibrary(
        "numba", ("numba",), ("numba",), "NUMBA_NUM_THREADS", "1", "environment",
        "export NUMBA_NUM_THREADS=1",
    ),
    ThreadedLibrary(
        "Arrow", ("arrow", "pyarrow"), ("pyarrow",), "pyarrow.set_cpu_count", "1",
        "worker_init_fn", "pyarrow.set_cpu_count(1)",
    ),
    # PyAV's default: thread_type SLICE, thread_count 0, which FFmpeg takes for all CPUs.
    ThreadedLibrary(
        "FFmpeg (PyAV)", ("ffmpeg",), ("av",), "thread_count", "1", "script",
        'stream.thread_type = "NONE"; stream.codec_context.thread_count = 1  # before decoding',
        is_shared=True,
    ),
    ThreadedLibrary(
        "decord", ("ffmpeg",), ("decord",), "num_threads", "1", "script",
        "decord.VideoReader(path, num_threads=1)",
        is_shared=True,
    ),
    ThreadedLibrary(
        "torchcodec", ("ffmpeg",), ("torchcodec",), "num_ffmpeg_threads", "1", "script",
        "torchcodec.decoders.VideoDecoder(path, num_ffmpeg_threads=1)",
        is_shared=True,
    ),
    ThreadedLibrary(
        "PyTorch", ("torch",), (), "torch.set_num_threads", "1", "worker_init_fn",
        "torch.set_num_threads(1)",
    ),
)  # fmt: skip

_BY_POOL: Final[Mapping[str, ThreadedLibrary]] = {
    pool: library for library in LIBRARIES if not library.is_shared for pool in library.pools
}
_BY_MODULE: Final[Mapping[str, ThreadedLibrary]] = {
    module: library for library in LIBRARIES for module in library.modules
}
#: PyTorch's threads are OpenMP's.
_OF_TORCH: Final = "OMP_NUM_THREADS"


def of_module(module: str) -> ThreadedLibrary:
    """The library whose functions are in a module ("cv2"); raises ``KeyError``."""
    return _BY_MODULE[module]


def variable_of(pool: str) -> str:
    """The variable that sets the threads of a pool ("openblas"); empty: only a call does."""
    if pool == "torch":
        return _OF_TORCH
    library = _BY_POOL.get(pool)
    return library.name if library is not None and library.where == "environment" else ""


def call_of(pool: str) -> str:
    """The call that holds a pool's threads down in a worker; empty: none does."""
    library = _BY_POOL.get(pool)
    return library.line if library is not None and library.where == "worker_init_fn" else ""


def set_at(threads: int) -> Fix:
    """The fix for PyTorch's threads that a line of the script sets: another number there."""
    call = f"torch.set_num_threads({threads})"
    return Fix(f"{call} there: the environment does not change that call", line=call)


def variables() -> tuple[str, ...]:
    """All variables that set the threads of one of the libraries."""
    return tuple(library.name for library in LIBRARIES if library.where == "environment")
