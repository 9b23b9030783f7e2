"""The DataLoader workers of a script: how many, and the multithreaded libraries that they run.

The number is followed through names, parameters and options' defaults. It is certain where every
way to it ends in the same one; a default of a command-line option counts, for that is what runs
without the option.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from typing import Final, TypeAlias

from trainfit.findings.source_code import names_in
from trainfit.lint.index import Function, Index, argument, has_stars, keyword, method_of
from trainfit.lint.loading_rules import worker_functions
from trainfit.lint.project import Project
from trainfit.lint.values import words
from trainfit.results.doctor import PoolLibrary, PoolUse, WorkerPools

_NAME: Final = "num_workers"
_PLACE: Final = 5  # DataLoader(dataset, batch_size, shuffle, sampler, batch_sampler, num_workers
#: Calls that stand for a default: dataclasses.field, pydantic's Field, typer's Option.
_FIELDS: Final = ("field", "Field", "Option", "Argument", "ib", "attrib")
#: Where a name was looked up already: its file (an attribute's is any) and the name.
_Seen: TypeAlias = frozenset[tuple[int, str]]


def worker_count(project: Project, index: Index, loader: ast.Call) -> int | None:
    """``num_workers`` of a DataLoader, as far as the script says; ``None`` where it does not."""
    node = argument(loader, _PLACE, _NAME)
    if node is None and has_stars(loader):
        node = _starred(index, loader)
        if node is None:
            return None
    if node is None:
        return 0
    numbers = set(_NumberReader(project).values(index, node, frozenset()))
    return numbers.pop() if len(numbers) == 1 else None


def _starred(index: Index, loader: ast.Call) -> ast.expr | None:
    """The number in ``**kwargs``, where these are one dictionary written out in the file."""
    stars = [each.value for each in loader.keywords if each.arg is None]
    if len(stars) != 1 or any(isinstance(each, ast.Starred) for each in loader.args):
        return None
    made = [stars[0]]
    if isinstance(stars[0], ast.Name):
        made = [value for value in _assigned(index, stars[0].id) if value is not None]
    numbers = [_entry(each) for each in made]
    return numbers[0] if len(numbers) == 1 else None


def _entry(node: ast.expr) -> ast.expr | None:
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "dict":
        return keyword(node, _NAME)
    if not isinstance(node, ast.Dict):
        return None
    pairs = zip(node.keys, node.values, strict=True)
    return next((v for k, v in pairs if isinstance(k, ast.Constant) and k.value == _NAME), None)


class _NumberReader:
    """Follows an expression to numbers; ``None`` stands for what is no plain number."""

    def __init__(self, project: Project) -> None:
        self._project = project

    def values(self, index: Index, node: ast.expr | None, visited: _Seen) -> Iterator[int | None]:
        if isinstance(node, ast.Constant):
            yield node.value if type(node.value) is int else None
        elif isinstance(node, ast.Name):
            yield from self._of_name(index, node, visited)
        elif isinstance(node, ast.Attribute):
            yield from self._of_attribute(node, visited)
        elif isinstance(node, ast.Call):
            yield from self.values(index, _inner(node), visited)
        else:
            yield None

    def _of_name(self, index: Index, node: ast.Name, visited: _Seen) -> Iterator[int | None]:
        key = (index.file.number, node.id)
        if key in visited:
            return
        visited |= {key}
        scope = index.scope(node)
        if isinstance(scope, ast.FunctionDef | ast.AsyncFunctionDef) and _has(scope, node.id):
            yield from self._of_parameter(index, scope, node.id, visited)
            return
        assigned = list(_assigned(index, node.id))
        for value in assigned:
            yield from self.values(index, value, visited)
        if not assigned:
            yield from self._of_options(node.id, visited)

    def _of_attribute(self, node: ast.Attribute, visited: _Seen) -> Iterator[int | None]:
        """An attribute may be of a class that another file defines."""
        key = (-1, node.attr)
        if key in visited:
            return
        visited |= {key}
        found = [
            (index, value)
            for index in self._project.indexes
            for value in _assigned(index, node.attr)
        ]
        for index, value in found:
            yield from self.values(index, value, visited)
        yield from self._of_options(node.attr, visited, is_all=not found)

    def _of_parameter(
        self, index: Index, function: Function, name: str, visited: _Seen
    ) -> Iterator[int | None]:
        """What the calls of a function give, and its default where they (or none) do not."""
        place, default = _parameter(function, name)
        owner = self._project.index_of(function)
        sites, is_whole = self._project.call_sites(function)
        sites = [site for site in sites if self._project.callee(*site) is function]
        options = [_default(call) for call in _decorators(function) if name in _names(call)]
        for value in options:
            yield from self.values(owner, value, visited)
        for other, call in sites:
            given = argument(call, place, name)
            if given is None and has_stars(call):
                yield None
            elif given is not None:
                yield from self.values(other, given, visited)
            elif not options:
                yield from self.values(owner, default, visited)
        if not sites and not options:
            yield from self.values(index, default, visited)
        elif not is_whole and default is not None and not options:
            yield from self.values(owner, default, visited)

    def _of_options(
        self, name: str, visited: _Seen, *, is_all: bool = True
    ) -> Iterator[int | None]:
        """Defaults of command-line options of that name."""
        found = [
            (index, _default(call))
            for index, call in self._project.calls()
            if _is_option(call) and name in _names(call)
        ]
        for index, value in found:
            yield from self.values(index, value, visited)
        if not found and is_all:
            yield None


def _inner(call: ast.Call) -> ast.expr | None:
    """The number in ``int(x)``, ``field(default=4)`` or ``typer.Option(4)``."""
    name = call.func.id if isinstance(call.func, ast.Name) else method_of(call)
    if name == "int" and len(call.args) == 1:
        return call.args[0]
    if name not in _FIELDS:
        return None
    given = keyword(call, "default")
    return given if given is not None or not call.args else call.args[0]


def _assigned(index: Index, name: str) -> Iterator[ast.expr | None]:
    """What a name (or an attribute of that name) is given in a file, each time."""
    for node in index.parents:
        targets: list[ast.expr] = []
        if isinstance(node, ast.Assign):
            targets = node.targets
        elif isinstance(node, ast.AnnAssign | ast.NamedExpr) and node.value is not None:
            targets = [node.target]
        elif isinstance(node, ast.AugAssign) and _last_name(node.target) == name:
            yield None
        if any(_last_name(target) == name for target in targets):
            assert isinstance(node, ast.Assign | ast.AnnAssign | ast.NamedExpr)
            yield node.value


def _last_name(node: ast.expr) -> str:
    if isinstance(node, ast.Attribute):
        return node.attr
    return node.id if isinstance(node, ast.Name) else ""


# --- Parameters -----------------------------------------------------------------------------------
def _has(function: Function, name: str) -> bool:
    """Is it a parameter that the function itself never assigns?"""
    if not any(parameter.arg == name for parameter in _parameters(function)):
        return False
    return name not in names_in(function, ast.Store)


def _parameters(function: Function) -> list[ast.arg]:
    spec = function.args
    return [*spec.posonlyargs, *spec.args, *spec.kwonlyargs]


def _parameter(function: Function, name: str) -> tuple[int, ast.expr | None]:
    """The place of a parameter among a call's arguments (a method's: without ``self``) and its
    default."""
    spec = function.args
    by_place = [*spec.posonlyargs, *spec.args]
    names = [each.arg for each in by_place]
    if name in names:
        index = names.index(name)
        behind = index - (len(names) - len(spec.defaults))
        default = spec.defaults[behind] if behind >= 0 else None
        return index - (names[0] in ("self", "cls")), default
    only = [argument.arg for argument in spec.kwonlyargs]
    return len(by_place) + 99, spec.kw_defaults[only.index(name)]


# --- Options --------------------------------------------------------------------------------------
def _decorators(function: Function) -> list[ast.Call]:
    return [call for call in function.decorator_list if isinstance(call, ast.Call)]


def _is_option(call: ast.Call) -> bool:
    return method_of(call) in ("add_argument", "option", "DEFINE_integer")


def _names(call: ast.Call) -> set[str]:
    """The names that an option's value may have in the script."""
    dest = keyword(call, "dest")
    texts = [each.value for each in call.args if isinstance(each, ast.Constant)]
    flags = [text for text in texts if isinstance(text, str)]
    if isinstance(dest, ast.Constant):
        flags = [str(dest.value)]
    plain = [flag for flag in flags if flag.isidentifier()]  # click: the parameter's name
    return {flag.lstrip("-").replace("-", "_") for flag in plain or flags}


def _default(call: ast.Call) -> ast.expr | None:
    if method_of(call) == "DEFINE_integer":
        return argument(call, 1, "default")
    return keyword(call, "default")


# ---
# Multithreaded libraries that a script's DataLoader workers run, and the number of
# workers.
#
# PyTorch sets its own threads to 1 in each worker; OpenCV and NumPy's OpenBLAS do not follow.


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
        library
        for word, libraries in _SETTINGS.items()
        if word in project.words
        for library in libraries
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
    functions: set[Function] = set()
    while queue:
        index, function = queue.pop()
        if function in functions:
            continue
        functions.add(function)
        yield index, function
        for call in index.calls:
            if index.scope(call) is function:
                callee = project.callee(index, call)
                if callee is not None:
                    queue.append((project.index_of(callee), callee))
