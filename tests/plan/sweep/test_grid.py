"""A sweep's file: the cells that it makes, and what is refused."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from helpers_warm import launchers_here
from trainfit.plan.sweep.cell_run import CellJob, key_of
from trainfit.plan.sweep.grid import Sweep, SweepFileError, read_sweep

GOOD = 'commands = ["python train.py"]\ngpus = ["T4"]\n'


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    (tmp_path / "train.py").write_text("import torch\nimport model\n")
    (tmp_path / "a.py").write_text("import torch\n")
    (tmp_path / "model.py").write_text("width = 1\n")
    monkeypatch.chdir(tmp_path)
    with launchers_here():
        yield tmp_path


def read(text: str) -> Sweep:
    Path("sweep.toml").write_text(text)
    return read_sweep(Path("sweep.toml"))


def refused(text: str) -> str:
    with pytest.raises(SweepFileError) as error:
        read(text)
    message = str(error.value)
    assert "\n" not in message
    assert "sweep.toml" in message
    return message


def test_the_cells_are_the_product_of_all_that_is_listed() -> None:
    found = read(
        'commands = ["torchrun --nproc_per_node={gpus} a.py --len={seq_len:8} --lr={lr:1} {x}"]\n'
        'gpus = ["RTX 4090", "T4"]\ncounts = [1, 4]\n[values]\nseq_len = [16, 32]\nlr = [0.5]'
    )
    assert [(cell.gpu, cell.values["seq_len"]) for cell in found.cells] == [
        ("RTX 4090", "16"),
        ("RTX 4090", "32"),
        ("4x RTX 4090", "16"),
        ("4x RTX 4090", "32"),
        ("T4", "16"),
        ("T4", "32"),
        ("4x T4", "16"),
        ("4x T4", "32"),
    ]
    assert found.cells[3].words == (
        *("torchrun", "--nproc_per_node=4", "a.py", "--len={seq_len:32}", "--lr=0.5", "{x}"),
    )
    assert found.cells[3].command.processes == 4
    assert found.names == ("seq_len", "lr")


def test_machines_of_a_cluster_are_named_as_plan_names_them() -> None:
    found = read(
        'commands = ["torchrun --nnodes={machines} --nproc_per_node={gpus} train.py"]\n'
        'gpus = ["2x(8x H100 SXM), 400Gb/s"]'
    )
    (cell,) = found.cells
    assert cell.words[1:3] == ("--nnodes=2", "--nproc_per_node=8")


def test_commands_may_have_values_of_their_own() -> None:
    found = read(
        'gpus = ["T4"]\n[[commands]]\nname = "wide"\nline = "python train.py --w={width:1}"\n'
        'values = { width = [1, 2] }\n[[commands]]\nline = "python train.py"'
    )
    assert [(cell.name, dict(cell.values)) for cell in found.cells] == [
        ("wide", {"width": "1"}),
        ("wide", {"width": "2"}),
        ("python train.py", {}),
    ]


def test_on_and_off_are_spelled_as_the_command_does() -> None:
    found = read(
        'commands = ["python train.py --amp={amp:True} --k={keep:0} --m={more:a}"]\ngpus = ["T4"]\n'
        "[values]\namp = [true, false]\nkeep = true\nmore = true"
    )
    assert [cell.words[2:] for cell in found.cells] == [
        ("--amp={amp:True}", "--k=1", "--m=true"),
        ("--amp={amp:False}", "--k=1", "--m=true"),
    ]


def test_other_names_of_a_tunable_are_that_tunable() -> None:
    found = read(
        'commands = ["python train.py --n={block_size:8} {{seq_len:1}}"]\ngpus = ["T4"]\n'
        "[values]\nseq_len = [16]"
    )
    assert found.cells[0].words[2:] == ("--n={block_size:16}", "{{seq_len:1}}")


def test_equal_cells_are_one() -> None:
    assert len(read(GOOD + "[values]\n").cells) == 1
    assert len(read('commands = ["python train.py"]\ngpus = ["T4", "T4"]').cells) == 1


def test_options_are_words_of_the_verb() -> None:
    found = read(GOOD + '[options]\nsteps = 3\nthorough = true\nno_remedies = false\ncpu = "here"')
    assert found.options == ("--steps=3", "--thorough", "--cpu=here")


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("commands = ", "not valid TOML"),
        ('gpus = ["T4"]', "it has no commands"),
        ('commands = ["python train.py"]', "it has no gpus"),
        ('commands = ["python train.py"]\ngpus = []', "it has no gpus"),
        (
            'commands = ["python train.py"]\ngpus = "T4"',
            'gpus = \'T4\': expected a list; write gpus = ["RTX 4090", "H100 SXM"]',
        ),
        ('commands = "python train.py"\ngpus = ["T4"]', "expected a list; write commands ="),
        (GOOD + "gpu = 1", "unknown key 'gpu'; did you mean 'gpus'?"),
        (GOOD + "counts = [0]", "counts: 0"),
        (GOOD + "counts = [99]", "expected 1 to 16 GPUs in a machine, not 99"),
        (GOOD + 'verb = "watch"', "expected 'plan' or 'simulate'"),
        (GOOD + "[values]\nlr = []", "lr = []: it has no value"),
        (GOOD + "[values]\nlr = [[1]]", "expected a number, a text, true or false"),
        (GOOD + "[values]\nlr = [1]", "has no place for 'lr'; write {lr:VALUE}"),
        (GOOD + "[values]\ngpus = [1]", "'gpus' follows from"),
        (GOOD + "[options]\ngpu = 1", "unknown option of plan 'gpu'"),
        (GOOD + "[options]\njson = true", "unknown option of plan 'json'"),
        ('commands = ["python train.py"]\ngpus = ["RTX 9999"]', "unknown GPU: 'RTX 9999'"),
        ('commands = ["python train.py"]\ngpus = ["8x T4"]\ncounts = [2]', "leave out `counts`"),
        ('commands = ["python gone.py"]\ngpus = ["T4"]', "script 'gone.py': there is no such file"),
        ('commands = ["python \'train.py"]\ngpus = ["T4"]', "correct its quotes"),
        ('commands = [{ lines = "a" }]\ngpus = ["T4"]', "expected a line"),
        (
            'commands = [{ line = "python train.py", vals = 1 }]\ngpus = ["T4"]',
            "unknown key of a command 'vals'; did you mean 'values'?",
        ),
        (
            'commands = ["python train.py --b={batch_size:8}"]\ngpus = ["T4"]\n'
            '[values]\nbatch_size = ["many"]',
            "expected a batch size",
        ),
        (
            'commands = ["python train.py {a:1} {b:1}"]\ngpus = ["T4"]\n'
            f"[values]\na = {list(range(200))}\nb = {list(range(200))}",
            "more than 10000 cells",
        ),
    ],
)
def test_what_cannot_be_is_refused_in_a_line_that_names_it(text: str, said: str) -> None:
    assert said in refused(text)


def test_a_file_that_is_missing_is_named() -> None:
    with pytest.raises(SweepFileError, match=r"sweep file 'gone.toml': No such file"):
        read_sweep(Path("gone.toml"))


# --- What determines a cell ---


def key(found: Sweep, variables: dict[str, str] | None = None, defaults: str = "") -> str:
    cell = found.cells[0]
    job = CellJob(found.verb, found.options, cell.gpu, cell.words, os.getcwd(), variables or {})
    return key_of(job, cell.command, defaults)


def test_a_cell_is_known_by_all_that_determines_it(folder: Path) -> None:
    usual = key(read(GOOD))
    assert key(read(GOOD)) == usual
    assert key(read(GOOD), {"PATH": "/elsewhere"}) == usual
    others = [
        key(read(GOOD), {"PYTORCH_ALLOC_CONF": "expandable_segments:True"}),
        key(read(GOOD), defaults="steps"),
        key(read(GOOD + "[options]\nsteps = 3")),
        key(read(GOOD.replace("T4", "RTX 4090"))),
        key(read(GOOD.replace("train.py", "train.py --more"))),
    ]
    (folder / "settings.yaml").write_text("a: 1")
    with_file = GOOD.replace("train.py", "train.py --config=settings.yaml")
    others.append(key(read(with_file)))
    (folder / "settings.yaml").write_text("a: 2")
    others.append(key(read(with_file)))
    (folder / "model.py").write_text("width = 2\n")  # imported by the script
    others.append(key(read(GOOD)))
    (folder / "train.py").write_text("import torch\n")
    others.append(key(read(GOOD)))
    assert len({usual, *others}) == len(others) + 1


def test_a_script_that_is_no_python_is_known_by_its_bytes(folder: Path) -> None:
    (folder / "train.py").write_text("def")
    first = key(read(GOOD))
    (folder / "train.py").write_text("def def")
    assert key(read(GOOD)) != first
