"""Multithreaded libraries that a script's DataLoader workers run, and the number of
workers.

PyTorch sets its own threads to 1 in each worker; OpenCV and NumPy's OpenBLAS do not follow.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from typing import Final

from trainfit.lint.reading.index import (
    Function,
    Index,
    argument,
    has_stars,
    keyword,
)
from trainfit.lint.reading.project import Project
from trainfit.lint.reading.torch_names import words
from trainfit.lint.rules.datasets import worker_functions
from trainfit.results.machine.doctor import PoolLibrary, PoolUse, WorkerPools

_WORKERS: Final = 5  # DataLoader(dataset, batch_size, shuffle, sampler, batch_sampler, num_workers
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
    counts = [_count(project, index, call) for index, call in loaders]
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


# --- How many workers ---------------------------------------------------------------------------
def _count(project: Project, index: Index, loader: ast.Call) -> int | None:
    """``num_workers`` of a DataLoader, as far as the script says; ``None`` where it does not."""
    node = argument(loader, _WORKERS, "num_workers")
    if node is None:
        return None if has_stars(loader) else 0
    if isinstance(node, ast.Constant):
        return node.value if type(node.value) is int else None
    name = _last_name(node)
    if not name:
        return None
    # An attribute may be of a class that another file defines.
    files = project.indexes if isinstance(node, ast.Attribute) else [index]
    found = [each for file in files for each in _assigned(file, name)]
    found += _defaults(project, name)
    return found[0] if len(found) == 1 else None


def _assigned(index: Index, name: str) -> Iterator[int | None]:
    """What a name is given in a file, each time; ``None`` for what is no plain number."""
    for node in index.parents:
        targets: list[ast.expr] = []
        if isinstance(node, ast.Assign):
            targets = node.targets
        elif isinstance(node, ast.AnnAssign) and node.value is not None:
            targets = [node.target]
        if any(_last_name(each) == name for each in targets):
            assert isinstance(node, ast.Assign | ast.AnnAssign)
            yield _whole(node.value)


def _defaults(project: Project, name: str) -> Iterator[int | None]:
    """The default of a command-line option of that name."""
    for _, call in project.calls():
        if not (isinstance(call.func, ast.Attribute) and call.func.attr == "add_argument"):
            continue
        given = [*call.args, keyword(call, "dest")]
        texts = [each.value for each in given if isinstance(each, ast.Constant)]
        if name in {str(text).lstrip("-").replace("-", "_") for text in texts}:
            yield _whole(keyword(call, "default"))


def _last_name(node: ast.expr) -> str:
    if isinstance(node, ast.Attribute):
        return node.attr
    return node.id if isinstance(node, ast.Name) else ""


def _whole(node: ast.expr | None) -> int | None:
    if isinstance(node, ast.Constant) and type(node.value) is int:
        return node.value
    return None


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
