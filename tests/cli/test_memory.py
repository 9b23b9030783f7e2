"""``trainfit memory``, and what ``simulate`` and ``plan`` say of memory over time."""

from __future__ import annotations

import json
import pickle
import shlex
import subprocess
import zipfile
from pathlib import Path

import pytest
import torch

from helpers_cli import SCRIPTS, error_line, json_of, trainfit
from tests.memory.snapshot import scenarios
from tests.results.test_results import PLAN
from trainfit import simulate as simulate_device

GPU = ("--gpu", "custom:2GiB")
LEAKS = SCRIPTS / "leaks.py"
Done = subprocess.CompletedProcess[str]


def simulate(folder: Path, name: str, *words: str, options: tuple[str, ...] = ()) -> Done:
    """Record leaks.py (or another script, by its path) to ``name``."""
    script = [] if words and words[0].endswith(".py") else [LEAKS]
    return trainfit("simulate", *GPU, *options, "--output", name, *script, *words, cwd=folder)


@pytest.fixture(scope="module")
def recorded(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with recordings at batch sizes 16 and 64, and of another script."""
    folder = tmp_path_factory.mktemp("recorded")
    for done in (
        simulate(folder, "b16.trainfit", "--batch_size", "{batch_size:16}"),
        simulate(
            folder,
            "b64.trainfit",
            "--batch_size",
            "{batch_size:16}",
            options=("--batch-size", "64"),
        ),
        simulate(folder, "plain.trainfit", str(SCRIPTS / "plain.py"), options=("--steps", "2")),
    ):
        assert done.returncode == 0, done.stderr
    return folder


# -- explaining ------------------------------------------------------------------------------


@pytest.mark.slow
def test_two_recordings_explained(recorded: Path) -> None:
    done = trainfit("memory", "b16.trainfit", "b64.trainfit", "--json", cwd=recorded)
    assert done.returncode == 0, done.stderr
    report = json_of(done)
    assert report["format"] == "trainfit-memory-report"
    assert report["batch_size"] == 16
    assert sum(report["peak"]["by_kind_bytes"].values()) == report["memory"]["allocated_bytes"]
    assert report["batches"]["batches"] == [16, 64]
    # Of each sample are kept: the GELU's input and result, 32 x 256 numbers each, the output,
    # 32 x 64, and the input, 32 x 256.
    growth = report["batches"]["per_sample_by_kind_bytes"]
    assert growth["input"] == 32 * 256 * 4
    assert growth["activation"] == 2 * 32 * 256 * 4 + 32 * 64 * 4
    assert [each["fits"] for each in report["batches"]["points"]].count(False) == 1
    assert report["pattern"]["course"] == "settled"


@pytest.mark.slow
def test_the_command_for_the_second_recording_works(recorded: Path) -> None:
    alone = trainfit("memory", "b16.trainfit", cwd=recorded)
    assert alone.returncode == 0, alone.stderr
    lines = [line.strip() for line in alone.stdout.splitlines()]
    (first,) = [line for line in lines if line.startswith("trainfit simulate")]
    (second,) = [line for line in lines if line.startswith("trainfit memory")]
    made = trainfit(*shlex.split(first)[1:], cwd=recorded)
    assert made.returncode == 0, made.stderr
    both = trainfit(*shlex.split(second)[1:], cwd=recorded)
    assert both.returncode == 0, both.stderr
    text = " ".join(both.stdout.split())
    for words in ("With the batch size", "from the recordings at 16 and 32", "Largest batch ",
                  "in the backward of Sequential.", f"({'/'.join(LEAKS.parts[-2:])}:43)",
                  "Largest allocations at the peak", "AdamW"):  # fmt: skip
        assert words in text
    assert "\x1b" not in both.stdout + both.stderr


@pytest.mark.slow
def test_a_batch_size_in_the_script_is_known_and_can_be_changed(tmp_path: Path) -> None:
    script = str(SCRIPTS / "plain.py")
    for name, options in (("a.trainfit", ()), ("b.trainfit", ("--batch-size", "4"))):
        done = simulate(tmp_path, name, script, options=(*options, "--steps", "2"))
        assert done.returncode == 0, done.stderr
    report = json_of(trainfit("memory", "a.trainfit", "b.trainfit", "--json", cwd=tmp_path))
    assert report["batches"]["batches"] == [4, 16]


@pytest.mark.slow
def test_a_recording_that_ended_out_of_memory(tmp_path: Path) -> None:
    words = ("--habit", "outputs", "--batch_size", "1024")
    done = simulate(
        tmp_path, "full.trainfit", *words, options=("--gpu", "custom:1GiB", "--steps", "400")
    )
    assert done.returncode == 1, done.stderr
    shown = trainfit("memory", "full.trainfit", cwd=tmp_path)
    assert shown.returncode == 1, shown.stderr
    text = " ".join(shown.stdout.split())
    assert f"Does not fit: {'/'.join(LEAKS.parts[-2:])}:43 asks for 64.00 MiB, and " in text
    again = trainfit("show", "full.trainfit", cwd=tmp_path)
    assert "CUDA out of memory" in " ".join(again.stdout.split())


# -- over time -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("habit", "per_step", "operator", "steps"),
    [
        # 16 outputs of 32 x 64 numbers.
        ("outputs", 16 * 32 * 64 * 4, "aten.addmm.default", 6),
        pytest.param("losses", 512, "aten.mean.default", 6, marks=pytest.mark.slow),
        pytest.param("history", 16 * 64 * 4, "aten.cat.default", 6, marks=pytest.mark.slow),
        pytest.param("variable+history", 4096, "aten.cat.default", 12, marks=pytest.mark.slow),
    ],
)
def test_a_leak_is_named(
    habit: str, per_step: int, operator: str, steps: int, tmp_path: Path
) -> None:
    done = simulate(tmp_path, "r.trainfit", "--habit", habit)
    assert done.returncode == 0, done.stderr
    text = " ".join(done.stdout.split())
    assert "memory does not settle: it grows by" in text
    assert "the GPU would be full after about" in text
    pattern = json_of(trainfit("memory", "r.trainfit", "--json", cwd=tmp_path))["pattern"]
    assert (pattern["course"], pattern["steps"]) == ("growing", steps)
    assert pattern["growth_bytes_per_step"] == per_step
    source = pattern["sources"][0]
    assert (source["operator"], source["bytes_per_step"]) == (operator, per_step)
    line = int(source["line"].removeprefix(f"{LEAKS}:"))
    assert ("cat(" if habit.endswith("history") else "output") in LEAKS.read_text().splitlines()[
        line - 1
    ]


@pytest.mark.slow
def test_a_graph_that_is_kept_is_named(tmp_path: Path) -> None:
    done = simulate(tmp_path, "r.trainfit", "--habit", "graph")
    pattern = json_of(trainfit("show", "r.trainfit", "--json", cwd=tmp_path))["pattern"]
    assert done.returncode == 0, done.stderr
    assert pattern["course"] == "growing"
    modules = {source["module"] for source in pattern["sources"]}
    assert {"Sequential.0", "Sequential.1", "Sequential.2"} <= modules
    # The input, two layers' results and the GELU's, and the loss (and what holds the sum).
    numbers = 16 * 32 * (256 + 256 + 256 + 64)
    assert numbers * 4 <= pattern["growth_bytes_per_step"] <= numbers * 4 + 16 * 32 * 64 * 4 + 4096


@pytest.mark.parametrize(
    ("habit", "period", "steps"),
    [
        pytest.param("none", 1, 3, marks=pytest.mark.slow),
        pytest.param("recent", 1, 7, marks=pytest.mark.slow),
        ("alternate", 2, 5),
    ],
)
def test_memory_that_settles_ends_the_run(
    habit: str, period: int, steps: int, tmp_path: Path
) -> None:
    done = simulate(tmp_path, "r.trainfit", "--habit", habit, options=("--json",))
    assert done.returncode == 0, done.stderr
    pattern = json_of(done)["pattern"]
    found = pattern["course"], pattern["period"], pattern["steps"]
    assert found == ("settled", period, steps)


def test_asking_for_steps_is_obeyed(tmp_path: Path) -> None:
    done = simulate(tmp_path, "r.trainfit", options=("--json", "--steps", "5"))
    assert done.returncode == 0, done.stderr
    assert json_of(done)["steps"] == 5


def test_too_few_steps_cannot_tell(recorded: Path) -> None:
    shown = trainfit("show", "plain.trainfit", cwd=recorded)
    text = " ".join(shown.stdout.split())
    assert "2 optimizer steps cannot show whether memory settles: the figures are for" in text


@pytest.mark.slow
def test_variable_shapes_are_no_silent_number(tmp_path: Path) -> None:
    done = simulate(tmp_path, "r.trainfit", "--habit", "variable")
    assert done.returncode == 0, done.stderr
    statement = "memory differs from step to step without a pattern: the peaks of 12 steps"
    assert statement in " ".join(done.stdout.split())
    shown = trainfit("memory", "r.trainfit", cwd=tmp_path)
    assert statement in " ".join(shown.stdout.split())
    second = simulate(tmp_path, "s.trainfit", "--habit", "variable", options=("--batch-size", "32"))
    assert second.returncode == 0, second.stderr
    both = trainfit("memory", "r.trainfit", "s.trainfit", cwd=tmp_path)
    assert both.returncode == 0, both.stderr
    assert "no linear model from batch sizes 16 and 32:" in both.stdout


@pytest.mark.slow
@pytest.mark.parametrize(
    ("habit", "words"),
    [
        ("outputs", "memory does not settle: it grows by 128 KiB with each optimizer step"),
        ("variable", "memory differs from step to step without a pattern"),
    ],
)
def test_a_plan_says_when_memory_does_not_settle(habit: str, words: str, tmp_path: Path) -> None:
    command = ("python", LEAKS, "--habit", habit, "--batch_size", "{batch_size:16}")
    done = trainfit("plan", *GPU, "-v", "--output", "p.json", "--", *command, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    text = " ".join(done.stdout.split())
    assert words in text
    assert "simulated steps only)" in text
    shown = trainfit("show", "--explain", "p.json", cwd=tmp_path)
    assert shown.stdout == done.stdout
    screen = trainfit("show", "p.json", cwd=tmp_path).stdout
    assert words in " ".join(screen.partition("Notes\n")[2].split())


# -- bad input -------------------------------------------------------------------------------


def write_bad(folder: Path) -> None:
    """Files that are no recordings, beside the good ones."""
    (folder / "text.txt").write_text("hello")
    (folder / "plan.json").write_text(PLAN.to_json())
    (folder / "folder").mkdir(exist_ok=True)
    good = (folder / "b16.trainfit").read_bytes()
    (folder / "half.trainfit").write_bytes(good[: len(good) // 2])
    with zipfile.ZipFile(folder / "other.zip", "w") as archive:
        archive.writestr("header.json", json.dumps({"format": "x"}))
    with (
        zipfile.ZipFile(folder / "b16.trainfit") as source,
        zipfile.ZipFile(folder / "conf.trainfit", "w") as target,
    ):
        for name in source.namelist():
            data = source.read(name)
            if name == "header.json":
                document = json.loads(data)
                document["header"]["alloc_conf"] = "max_split_size_mb:\x1b[31m"
                data = json.dumps(document).encode()
            target.writestr(name, data)


def test_bad_input_is_one_line(recorded: Path) -> None:
    write_bad(recorded)
    other_gpu = trainfit(
        *("simulate", "--gpu", "T4", "--output", "t4.trainfit", "--steps", "1"),
        *("--batch-size", "32", LEAKS, "--batch_size", "{batch_size:16}"),
        cwd=recorded,
    )
    assert other_gpu.returncode == 0, other_gpu.stderr
    for words, expected in (
        (["missing.trainfit"], "'missing.trainfit': there is no such file; check the path"),
        (["folder"], "result file 'folder': "),
        (["text.txt"], "'text.txt': damaged, or not a recording; record the run: trainfit sim"),
        (["half.trainfit"], "'half.trainfit': damaged, or not a result file"),
        (["other.zip"], "'other.zip': it is not a trainfit recording"),
        (["conf.trainfit"], "the recording's allocator settings are invalid"),
        (["plan.json"], f"record the run: trainfit simulate --gpu '{PLAN.gpu}' -- {PLAN.command}"),
        (["b16.trainfit", "b16.trainfit"], "have the same batch size, 16; record one of them at"),
        (["b16.trainfit", "t4.trainfit"], "differ in their GPUs, 'custom 2GiB sm_80' and 'T4'"),
        (["b16.trainfit", "plain.trainfit"], "differ in their scripts, "),
        (["b16.trainfit", "missing.trainfit"], "there is no such file"),
        (["--batch-size", "8,16", "b16.trainfit"], "--batch-size names 2 batch sizes for 1"),
    ):
        done = trainfit("memory", *words, cwd=recorded)
        assert done.returncode == 2, words
        assert expected in error_line(done), words
        assert "\x1b" not in done.stderr
        assert done.stdout == ""


@pytest.mark.parametrize("text", ["0", "8,", "1,2,3", "x"])
def test_batch_sizes_that_are_none(text: str, tmp_path: Path) -> None:
    done = trainfit("memory", "--batch-size", text, "r.trainfit", cwd=tmp_path)
    assert done.returncode == 2
    assert "argument --batch-size" in done.stderr


def test_a_batch_size_for_a_script_without_loader(tmp_path: Path) -> None:
    (tmp_path / "s.py").write_text(
        "import torch\nmodel = torch.nn.Linear(8, 8).cuda()\n"
        "optimizer = torch.optim.SGD(model.parameters(), lr=0.1)\n"
        "for _ in range(4):\n"
        "    model(torch.randn(2, 8, device='cuda')).sum().backward()\n    optimizer.step()\n"
    )
    done = simulate(tmp_path, "r.trainfit", "s.py", options=("--batch-size", "4"))
    assert done.returncode == 2
    assert "no DataLoader with a batch size fed the first step of s.py" in error_line(done)


# -- snapshots of PyTorch ----------------------------------------------------------------------


@pytest.fixture(scope="module")
def snapshot(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What PyTorch dumps where a request fails (simulated device)."""
    path = tmp_path_factory.mktemp("snapshots") / "snapshot.pickle"
    with simulate_device("custom:1500MiB"):
        torch.cuda.memory._record_memory_history(max_entries=100_000)
        with pytest.raises(torch.cuda.OutOfMemoryError):
            scenarios.fragmented()
        path.write_bytes(pickle.dumps(torch.cuda.memory._snapshot()))
    return path


def test_a_snapshot_is_explained(snapshot: Path) -> None:
    done = trainfit("memory", snapshot.name, cwd=snapshot.parent)
    assert done.returncode == 1, done.stderr
    assert done.stdout.startswith("Out of memory on GPU 0: 500 MiB asked for")
    assert "expandable_segments:True" in done.stdout
    assert "scenarios.py:" in done.stdout
    assert len(done.stdout.splitlines()) <= 25


def test_a_snapshot_as_a_page(snapshot: Path) -> None:
    done = trainfit("memory", snapshot.name, "--json", cwd=snapshot.parent)
    assert json_of(done)["format"] == "trainfit-memory-snapshot"
    (snapshot.parent / "explained.json").write_text(done.stdout)
    shown = trainfit("show", "explained.json", cwd=snapshot.parent)
    assert shown.stdout.startswith("Out of memory on GPU 0")
    page = trainfit("report", "explained.json", "-o", "page.md", cwd=snapshot.parent)
    assert page.returncode == 0, page.stderr
    assert "Out of memory on GPU 0" in (snapshot.parent / "page.md").read_text()


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("--by-hand",), "leave --by-hand out"),
        (("--batch-size", "8"), "leave --batch-size out"),
        (("other.trainfit",), "leave a second file out"),
    ],
)
def test_a_snapshot_is_explained_by_itself(
    snapshot: Path, words: tuple[str, ...], said: str
) -> None:
    done = trainfit("memory", snapshot.name, *words, cwd=snapshot.parent)
    assert done.returncode == 2
    assert said in error_line(done)


def test_a_pickle_that_is_no_snapshot(tmp_path: Path) -> None:
    (tmp_path / "model.pickle").write_bytes(pickle.dumps({"weights": Path("x")}))
    done = trainfit("memory", "model.pickle", cwd=tmp_path)
    assert done.returncode == 2
    assert "would run code" in error_line(done)
