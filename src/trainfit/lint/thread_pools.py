"""Multithreaded libraries that a script's DataLoader workers run, and the number of
workers.

PyTorch sets its own threads to 1 in each worker; OpenCV and NumPy's OpenBLAS do not follow.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from typing import Final

from trainfit.lint.reading.index import Function, Index
from trainfit.lint.reading.project import Project
from trainfit.lint.reading.torch_names import words
from trainfit.lint.rules.datasets import worker_functions
from trainfit.lint.worker_count import worker_count
from trainfit.results.machine.doctor import PoolLibrary, PoolUse, WorkerPools

#: Calls that end up in a library's thread pool, by the beginning of their names.
_POOLED: Final[tuple[tuple[str, PoolLibrary], ...]] = (
    ("cv2.", "OpenCV"),
    ("numpy.linalg.", "OpenBLAS"),
    ("numpy.dot", "OpenBLAS"),
    ("numpy.matmul", "OpenBLAS"),
    ("numpy.tensordot", "OpenBLAS"),
    ("numpy.inner", "OpenBLAS"),
    ("scipy.linalg.", "OpenBLAS"),
)
#: Of OpenCV, what starts no thread of its pool (4.x and 5.0, in a worker: one thread after it).
_ALONE: Final = words(
    "cv2.imread cv2.imdecode cv2.imencode cv2.imwrite cv2.getNumThreads cv2.setUseOptimized "
    "cv2.VideoCapture cv2.VideoWriter cv2.ocl.setUseOpenCL"
)
#: What an import alone is a hint at (Albumentations works with OpenCV); every script imports
#: NumPy, few of them for its BLAS.
_HINTS: Final[dict[str, PoolLibrary]] = {"cv2": "OpenCV", "albumentations": "OpenCV"}
#: Words by which a script sets a pool's threads itself.
_SETTINGS: Final[dict[str, frozenset[PoolLibrary]]] = {
    "setnumthreads": frozenset({"OpenCV"}),
    "opencv_for_threads_num": frozenset({"OpenCV"}),
    "openblas_num_threads": frozenset({"OpenBLAS"}),
    "omp_num_threads": frozenset({"OpenBLAS"}),
    "threadpool_limits": frozenset({"OpenBLAS"}),
}


def worker_pools(project: Project) -> WorkerPools:
    """What is certain about the workers of a script and the pools in them."""
    loaders = list(_loaders(project))
    counts = [worker_count(project, index, call) for index, call in loaders]
    known = [count for count in counts if count is not None]
    uses = {each.library: each for each in (*_imports(project), *_calls(project))}  # calls win
    is_set = {
        library for word, found in _SETTINGS.items() if word in project.words for library in found
    }
    return WorkerPools(
        has_workers=len(known) < len(counts) or any(known),
        workers=max(known) if known and len(known) == len(counts) else None,
        uses=tuple(each for library, each in sorted(uses.items()) if library not in is_set),
    )


def _loaders(project: Project) -> Iterator[tuple[Index, ast.Call]]:
    for index, call in project.calls():
        if index.file.origin(call.func) == "torch.utils.data.DataLoader":
            yield index, call


# --- Which libraries ----------------------------------------------------------------------------
def _imports(project: Project) -> Iterator[PoolUse]:
    for index in project.indexes:
        for node in index.parents:
            if isinstance(node, ast.Import):
                names = [alias.name for alias in node.names]
            elif isinstance(node, ast.ImportFrom) and not node.level:
                names = [node.module or ""]
            else:
                continue
            for name in names:
                library = _HINTS.get(name.partition(".")[0])
                if library is not None:
                    yield PoolUse(library, name, index.file.source.name, node.lineno, False)


def _calls(project: Project) -> Iterator[PoolUse]:
    """Calls in what a DataLoader runs for each sample, and in own functions called from there."""
    for index, function in _in_workers(project):
        for call in index.calls:
            if index.scope(call) is not function:
                continue
            for origin in sorted(index.file.origins(call.func)):
                library = _library(origin)
                if library is not None:
                    yield PoolUse(library, origin, index.file.source.name, call.lineno, True)


def _library(origin: str) -> PoolLibrary | None:
    if origin in _ALONE:
        return None
    return next((library for start, library in _POOLED if origin.startswith(start)), None)


def _in_workers(project: Project) -> Iterator[tuple[Index, Function]]:
    queue = [(index, function) for index, function, _ in worker_functions(project)]
    seen: set[Function] = set()
    while queue:
        index, function = queue.pop()
        if function in seen:
            continue
        seen.add(function)
        yield index, function
        for call in index.calls:
            if index.scope(call) is function:
                callee = project.callee(index, call)
                if callee is not None:
                    queue.append((project.index_of(callee), callee))
