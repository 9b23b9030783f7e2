"""Which private names of PyTorch the chosen tests use: ``python -m tests.newest.touched``.

A name of ``torch_private`` counts as used when a module outside of that room took it while a test
ran: ``make test-newest`` has that recorded by ``tests.newest.recorder``.
"""

from __future__ import annotations

import ast
import functools
import sys
from collections.abc import Collection, Iterator, Mapping
from pathlib import Path
from typing import Final, NamedTuple

ROOT: Final = Path(__file__).resolve().parents[2]
SOURCE: Final = ROOT / "src" / "trainfit"
ROOM: Final = SOURCE / "torch_private"
#: The names that were taken, a line each.
RECORD: Final = ROOT / ".touched-newest"
#: Modules that hold no name of PyTorch's that could be missing.
WITHOUT: Final = frozenset({"__init__", "frames", "needed", "tested"})
#: Names that neither these tests' processes nor those forked from them can take, with the reason.
UNREACHED: Final[Mapping[str, str]] = {
    "cuda.sleep": "keeps a real GPU awake",
    "compiled.remove_import_folder": "in the fork server, which is a process of its own",
    "distributed.ddp_times": "in the ranks of a watched run, which are processes of their own",
    "data_loading.has_worker_init": "in workers, which are processes of their own",
}


class Use(NamedTuple):
    """A line that takes a name."""

    path: Path
    line: int


def names() -> set[str]:
    """The public names of the room, as ``module.name``."""
    found = set()
    for path in ROOM.glob("*.py"):
        if path.stem not in WITHOUT:
            found |= {f"{path.stem}.{name}" for name in _defined(path)}
    return found


def _defined(path: Path) -> Iterator[str]:
    for node in _statements(ast.parse(path.read_text()).body):
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            yield from _public(node.name)
        elif isinstance(node, ast.Assign | ast.AnnAssign):
            for target in node.targets if isinstance(node, ast.Assign) else [node.target]:
                if isinstance(target, ast.Name):
                    yield from _public(target.id)
        elif isinstance(node, ast.ImportFrom) and (node.module or "").startswith("torch"):
            for alias in node.names:
                if alias.asname == alias.name:  # handed on
                    yield from _public(alias.name)


def _statements(body: list[ast.stmt]) -> Iterator[ast.stmt]:
    for node in body:
        yield node
        if isinstance(node, ast.With | ast.Try):
            yield from _statements(node.body)


def _public(name: str) -> Iterator[str]:
    if not name.startswith("_"):
        yield name


@functools.cache
def uses() -> dict[str, list[Use]]:
    """By name of the room: where it is taken, but for imports."""
    found: dict[str, list[Use]] = {}
    for path in SOURCE.rglob("*.py"):
        if ROOM in path.parents or "torch_private" not in (text := path.read_text()):
            continue
        for name, node in taken(ast.parse(text)):
            found.setdefault(name, []).append(Use(path, node.lineno))
    return found


def taken(tree: ast.Module) -> Iterator[tuple[str, ast.expr]]:
    """Names of the room, with where they are taken when the module's code runs."""
    modules: dict[str, str] = {}
    single: dict[str, str] = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and node.module == "trainfit.torch_private":
            modules |= {alias.asname or alias.name: alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and (node.module or "").startswith(
            "trainfit.torch_private."
        ):
            module = (node.module or "").rpartition(".")[2]
            single |= {alias.asname or alias.name: f"{module}.{alias.name}" for alias in node.names}
    for node in _run(tree):
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
            if node.value.id in modules:
                yield f"{modules[node.value.id]}.{node.attr}", node
        elif isinstance(node, ast.Name) and node.id in single:
            yield single[node.id], node


def _run(node: ast.AST) -> Iterator[ast.AST]:
    """Nodes but for annotations, which are only text."""
    yield node
    for field, value in ast.iter_fields(node):
        if field not in ("annotation", "returns"):
            for child in value if isinstance(value, list) else [value]:
                if isinstance(child, ast.AST):
                    yield from _run(child)


def untouched(touched: Collection[str]) -> dict[str, list[Use]]:
    """Names that nothing took, with where they could be."""
    return {name: uses().get(name, []) for name in sorted(names() - {*touched, *UNREACHED})}


def main() -> int:
    """The exit code: 1 if a name is not used."""
    missed = untouched(RECORD.read_text().split())
    for name, places in missed.items():
        at = ", ".join(f"{use.path.relative_to(ROOT)}:{use.line}" for use in places) or "nowhere"
        print(f"no chosen test uses torch_private.{name} (taken at: {at})", file=sys.stderr)
    return 1 if missed else 0


if __name__ == "__main__":
    sys.exit(main())
