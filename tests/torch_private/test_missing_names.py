"""A name that PyTorch does not have is told by its name: at once, or as a note."""

from __future__ import annotations

import importlib
import os
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest
import torch
from torch.utils import data

import trainfit
from helpers_cases import slow_but
from tests.helpers_cli import SCRIPTS
from trainfit.cli.main import main
from trainfit.torch_private import cuda
from trainfit.torch_private import needed as tested
from trainfit.torch_private.needed import MissingNameError, RefusedError, attribute, needed, place

#: Takes a name from PyTorch as soon as that is imported, in every Python process.
TAKES = """
import importlib.abc, importlib.util, sys

class Taker(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path=None, target=None):
        if name != "torch":
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(name)
        run = spec.loader.exec_module

        def exec_module(module):
            run(module)
            del module._C._current_graph_task_id

        spec.loader.exec_module = exec_module
        return spec

sys.meta_path.insert(0, Taker())
"""


@pytest.fixture(autouse=True)
def no_version_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tested, "_seen", set())


def test_a_missing_attribute_of_a_module_is_named() -> None:
    with pytest.raises(MissingNameError) as caught, needed():
        torch._C._never_there  # noqa: B018
    assert caught.value.name == "torch._C._never_there"
    said = str(caught.value)
    assert torch.__version__ in said and trainfit.__version__ in said
    assert said.endswith(f"install PyTorch {tested.NEWEST}, or a newer trainfit")
    assert "\n" not in said and caught.value.exit_code == 2


def test_missing_modules_names_and_operators_are_named() -> None:
    with pytest.raises(MissingNameError) as caught, needed():
        importlib.import_module("torch._never_there")
    assert caught.value.name == "torch._never_there"
    with pytest.raises(MissingNameError) as caught, needed():
        from torch.utils._pytree import _never_there  # noqa: F401
    assert caught.value.name == "torch.utils._pytree._never_there"
    with pytest.raises(MissingNameError) as caught, needed():
        torch.ops.aten._never_there  # noqa: B018
    assert caught.value.name == "torch.ops.aten._never_there"
    with pytest.raises(MissingNameError) as caught:
        place(torch.autograd, "_never_there")
    assert caught.value.name == "torch.autograd._never_there"


def test_attributes_that_only_objects_have_are_known_from_the_code_that_sets_them() -> None:
    loader: data.DataLoader[int] = data.DataLoader([1, 2])  # type: ignore[arg-type]
    assert attribute(data.DataLoader, "_dataset_kind")(loader) == loader._dataset_kind
    with pytest.raises(MissingNameError, match=r"DataLoader\._never_there"):
        attribute(data.DataLoader, "_never_there")


def test_other_errors_pass() -> None:
    with pytest.raises(KeyError), needed():
        _ = {}["_key"]


def test_a_childs_refusal_is_understood_and_nothing_else() -> None:
    with pytest.raises(SystemExit) as ended, tested.tells_parent():
        raise MissingNameError("torch._gone")
    code = ended.value.code
    assert isinstance(code, int)
    line = f"trainfit: refused: {MissingNameError('torch._gone')}"
    with pytest.raises(RefusedError, match=r"has no torch\._gone"):
        tested.check(code, f"a script's line\n{line}\n")
    tested.check(0, line)
    tested.check(code, "a script that ends with this code")
    tested.check(None, "")


def test_a_pytorch_older_than_the_oldest_is_refused(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(AttributeError), tested.tells_parent():
        _ = torch.ops.aten.mm.no_such_overload
    monkeypatch.setattr(torch, "__version__", "2.7.0+cu126")
    with pytest.raises(SystemExit) as ended, tested.tells_parent():
        _ = torch.ops.aten.mm.no_such_overload
    code = ended.value.code
    assert isinstance(code, int)
    with pytest.raises(RefusedError, match=r"PyTorch 2\.7\.0\+cu126 is older than 2\.8"):
        tested.check(code, capsys.readouterr().err)


@pytest.mark.parametrize(
    "verb",
    # Both tell of it by the same code.
    slow_but([["simulate", "--gpu", "RTX 4090"], ["loader"]], ["simulate", "--gpu", "RTX 4090"]),
)
def test_a_command_says_in_one_line_what_is_missing(verb: list[str], tmp_path: Path) -> None:
    (tmp_path / "sitecustomize.py").write_text(TAKES)
    environment = {**os.environ, "PYTHONPATH": str(tmp_path)}
    command = [*verb, "--", sys.executable, str(SCRIPTS / "train.py")]
    found = subprocess.run(
        [sys.executable, "-m", "trainfit", *command],
        env=environment, capture_output=True, text=True, check=False,
    )  # fmt: skip
    last = found.stderr.strip().splitlines()[-1]
    assert found.returncode == 2, found.stderr
    assert last.startswith(f"trainfit: error: PyTorch {torch.__version__} has no torch._C._current")
    assert "Traceback" not in found.stderr and "script's own output" not in found.stderr


def test_what_most_scripts_do_without_is_left_out_with_a_note(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    flex: ModuleType = sys.modules["torch._higher_order_ops.flex_attention"]
    monkeypatch.delattr(flex, "_permute_strides")
    monkeypatch.setattr(cuda, "_ACCELERATOR", frozenset({"accelerator_never_there"}))
    from trainfit.simgpu.operators import compilation

    compilation._hop.cache_clear()
    with trainfit.simulate("RTX 4090") as simulation:
        torch.ones(3, device="cuda").sum()
    notes = "\n".join(simulation.recording.header["notes"])
    assert "FlexAttention is not simulated: this PyTorch has no torch." in notes
    assert "_permute_strides" in notes
    assert "this PyTorch has no torch._C._accelerator_never_there" in notes


def test_the_tested_versions_need_no_note() -> None:
    assert cuda.missing_functions() == ()


def test_a_pytorch_newer_than_the_tested_gets_one_line(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert tested.newer_than_tested("2.8.0") == ""
    assert tested.newer_than_tested(f"{tested.NEWEST}.9+cu130") == ""
    assert "2.99.0a0+git12 is newer than" in tested.newer_than_tested("2.99.0a0+git12")
    assert tested.newer_than_tested("unknown") == ""
    tested.saw("2.9.0")
    tested.saw("2.10.0")
    assert tested.newer_seen() == ""
    monkeypatch.setattr(tested, "NEWEST", "2.7")
    assert main(["gpus", "--json"]) == 0
    captured = capsys.readouterr()
    assert captured.err.count("is newer than 2.7, the newest") == 1
    assert "newer than" not in captured.out


def test_the_newest_tested_is_not_older_than_the_pinned() -> None:
    pinned = (Path(__file__).parents[2] / "requirements" / "plan.txt").read_text()
    version = next(line for line in pinned.splitlines() if line.startswith("torch=="))
    assert tested.newer_than_tested(version.removeprefix("torch==")) == ""
    project = (Path(__file__).parents[2] / "pyproject.toml").read_text()
    assert f'"torch>={tested.OLDEST}"' in project
