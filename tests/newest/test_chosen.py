"""The tests that run on the newest PyTorch use every private name (``make test-newest``)."""

from __future__ import annotations

import ast
import os
import types
from pathlib import Path

import pytest

from tests.newest import recorder, touched

CHOSEN = Path(__file__).with_name("chosen.txt").read_text().split()


def test_what_is_chosen_is_there() -> None:
    assert all((touched.ROOT / path).exists() for path in CHOSEN)
    assert len(set(CHOSEN)) == len(CHOSEN)


def test_every_name_of_the_room_is_taken_outside_of_it() -> None:
    taken = touched.uses()
    assert [name for name in sorted(touched.names()) if name not in taken] == []
    assert touched.UNREACHED.keys() <= touched.names()


def test_names_that_nothing_took_are_missed_with_where_they_could_be() -> None:
    some, *others = sorted(touched.names() - touched.UNREACHED.keys())
    assert touched.untouched([some, *others]) == {}
    assert touched.untouched(others) == {some: touched.uses()[some]}


@pytest.mark.parametrize(
    ("line", "recorded"),
    [
        ("made = tensors.Storage()", ["tensors.Storage"]),
        ("made = other.Storage.meta", ["operators.Storage"]),
        ("made = Graph", ["compiled.graph"]),
        ("tensors.Storage = int", []),
        ("made: tensors.Storage = 1", []),
        ("def made(a: Graph) -> Graph: return tensors.Storage", []),
        ("made = [each for each in () if tensors.Storage]", []),
        ("made = isinstance(1, tensors.Storage | Graph)", ["tensors.Storage", "compiled.graph"]),
    ],
)
def test_a_name_counts_as_used_where_code_that_ran_took_it(line: str, recorded: list[str]) -> None:
    imports = (
        "from __future__ import annotations\n"
        "from trainfit.torch_private import tensors, operators as other\n"
        "from trainfit.torch_private.compiled import graph as Graph\n"
    )
    took = []

    def record(name: str, value: object) -> object:
        took.append(name)
        return value

    room = types.SimpleNamespace(Storage=type("Storage", (), {"meta": 1}))
    tree = recorder.with_calls(imports + line)
    code = compile(ast.Module(tree.body[:1] + tree.body[3:], []), "a module", "exec")
    exec(code, {"tensors": room, "other": room, "Graph": int, recorder.CALL: record})
    assert took == recorded


def test_a_record_has_what_forked_processes_took(tmp_path: Path) -> None:
    record = recorder.Record(tmp_path / "record")
    assert record("a", 1) == 1
    if not (pid := os.fork()):
        record("a", 1)
        record("b", 2)
        os._exit(0)
    os.waitpid(pid, 0)
    assert (tmp_path / "record").read_text().split() == ["a", "b"]
