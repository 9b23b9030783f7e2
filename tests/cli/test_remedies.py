"""``trainfit plan --remedies`` and plans of scripts that do not train, as a user calls them."""

from __future__ import annotations

import subprocess
from pathlib import Path
from typing import Any

import pytest

from helpers_cli import SCRIPTS, error_line, json_of, trainfit
from trainfit.cli.parser import read_words
from trainfit.plan.changes.catalogue import NAMES

SCRIPT = str(SCRIPTS / "remedies.py")
MIB = 1 << 20


def plan(*words: str, cwd: Path, **more: str) -> subprocess.CompletedProcess[str]:
    return trainfit("plan", *words, cwd=cwd, **more)


def remedies_of(done: subprocess.CompletedProcess[str]) -> dict[str, dict[str, Any]]:
    assert done.returncode in (0, 1), done.stderr
    return {each["name"]: each for each in json_of(done)["remedies"]["items"]}


@pytest.fixture(scope="module")
def everything(tmp_path_factory: pytest.TempPathFactory) -> subprocess.CompletedProcess[str]:
    """All remedies of one job that fits; kept for several tests."""
    folder = tmp_path_factory.mktemp("remedies")
    words = ("--gpu", "custom:2GiB", "--remedies", "--json", "--output", "plan.json", "--")
    return plan(*words, "python", SCRIPT, "--batch_size={batch_size:8}", cwd=folder)


@pytest.mark.slow
def test_all_remedies_of_a_job(everything: subprocess.CompletedProcess[str]) -> None:
    items = remedies_of(everything)
    assert set(items) == set(NAMES)
    won = [name for name, each in items.items() if (each["saved_bytes"] or 0) > 0]
    assert {"attention-weights", "checkpoint", "accumulate", "amp-bf16", "sgd"} <= set(won)
    for name in won:
        each = items[name]
        assert each["memory"]["device_bytes"] < json_of(everything)["now"]["memory"]["device_bytes"]
        assert each["how"]
    assert items["attention-weights"]["largest_batch"] > json_of(everything)["now"]["largest_batch"]
    assert items["checkpoint"]["found"] == "4 blocks of Layer in layers"
    assert items["checkpoint"]["extra"]["flops_share"] > 0.2
    assert items["sgd"]["changes"] == "training"


@pytest.mark.slow
def test_json_says_why_a_remedy_does_not_apply(
    everything: subprocess.CompletedProcess[str],
) -> None:
    items = remedies_of(everything)
    left = {name: each["reason"] for name, each in items.items() if each["memory"] is None}
    assert left["global-pooling"] == "no large Linear layer has a flattened feature map as input"
    assert left["no-grad-eval"] == "no evaluation pass in the simulated steps"
    assert left["adam"] == "Adam keeps at least as much state as AdamW"
    assert all(left.values())


@pytest.mark.slow
def test_the_instructions_name_the_users_lines(
    everything: subprocess.CompletedProcess[str],
) -> None:
    items = remedies_of(everything)
    (line, there) = items["attention-weights"]["how"]
    assert line.endswith("attended, weights = self.attention(x, x, x)")
    assert there == "there, add need_weights=False: the weights are not used"
    assert items["sgd"]["how"][0].endswith("optimizer = torch.optim.AdamW(net.parameters())")
    assert "--batch_size=4" in items["accumulate"]["launch"]
    conf = "PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True python "
    assert items["expandable-segments"]["launch"].startswith(conf)


@pytest.mark.slow
def test_accumulation_is_the_micro_batch_with_all_gradients_kept(
    everything: subprocess.CompletedProcess[str],
) -> None:
    item = remedies_of(everything)["accumulate"]
    before = json_of(everything)["remedies"]["before"]
    assert 0 < item["memory"]["allocated_bytes"] < before["allocated_bytes"]
    assert item["extra"]["flops_share"] == 0
    assert item["extra"]["operators_share"] > 0.8


@pytest.mark.usefixtures("brief")
def test_chosen_remedies_and_the_text(tmp_path: Path) -> None:
    done = plan(
        *("--gpu", "custom:2GiB", "--remedies=sgd,global-pooling", "--explain"),
        *("--output", "plan.json", "--"),
        *("python", SCRIPT, "--batch_size={batch_size:8}"),
        cwd=tmp_path,
    )
    assert done.returncode == 0, done.stderr
    section = done.stdout.partition("Remedies at batch size 8")[2]
    assert "[sgd]" in section
    assert "there, torch.optim.SGD(…)" in section
    assert "global-pooling" not in section
    lines = done.stdout.replace(str(SCRIPT), "train.py").splitlines()  # a path is never broken
    assert max(map(len, lines)) <= 100
    shown = trainfit("show", "--explain", "plan.json", cwd=tmp_path)
    assert shown.stdout == done.stdout
    short = trainfit("show", "plan.json", cwd=tmp_path).stdout
    assert "What lowers the memory\n  - " in short and "[sgd]: " in short
    json_shown = json_of(trainfit("show", "--json", "plan.json", cwd=tmp_path))
    assert [each["name"] for each in json_shown["remedies"]["items"]] == ["sgd", "global-pooling"]


@pytest.mark.slow
def test_trials_that_cannot_be_made_say_so(tmp_path: Path) -> None:
    done = plan(
        *("--gpu", "custom:2GiB", "--remedies=lower-resolution,attention-weights", "--json", "--"),
        *("python", SCRIPT, "--batch_size={batch_size:8}", "--look", "--fixed"),
        cwd=tmp_path,
    )
    items = remedies_of(done)
    assert items["lower-resolution"]["status"] == "failed"
    assert "(ValueError: images must be 128 pixels wide)" in items["lower-resolution"]["reason"]
    assert items["attention-weights"]["status"] == "not applicable"
    assert "are used at" in items["attention-weights"]["reason"]


@pytest.mark.slow
def test_remedies_come_of_themselves_where_the_job_does_not_fit(tmp_path: Path) -> None:
    words = ("--gpu", "custom:520MiB", "--json")
    command = ("--", "python", SCRIPT, "--batch_size={batch_size:32}")
    without = plan(*words, "--no-remedies", *command, cwd=tmp_path)
    assert json_of(without)["remedies"] is None
    done = plan(*words, *command, cwd=tmp_path)
    document = json_of(done)
    assert not document["now"]["fits"]
    items = remedies_of(done)
    assert items["accumulate"]["fits"]
    split = items["accumulate"]["launch"].partition("--batch_size=")[2]
    assert 32 % int(split.split()[0]) == 0
    assert document["remedies"]["combination"] is None  # one is enough


@pytest.mark.slow
def test_a_combination_where_no_remedy_is_enough(tmp_path: Path) -> None:
    done = plan(
        *("--gpu", "custom:520MiB", "--json"),
        *("--remedies=attention-weights,amp-bf16,optimizer-8bit,checkpoint,inplace", "--"),
        *("python", SCRIPT, "--batch_size={batch_size:40}"),
        cwd=tmp_path,
    )
    items, result = remedies_of(done), json_of(done)["remedies"]
    assert not any(each["fits"] for each in items.values())
    together = result["combination"]
    assert len(together["names"]) > 1
    assert together["memory"]["device_bytes"] < min(
        each["memory"]["device_bytes"] for each in items.values() if each["memory"]
    )


@pytest.mark.slow
def test_an_allocator_setting_is_added_to_what_is_set(tmp_path: Path) -> None:
    done = plan(
        *("--gpu", "custom:2GiB", "--remedies=expandable-segments", "--json", "--"),
        *("PYTORCH_CUDA_ALLOC_CONF=max_split_size_mb:64", "python", SCRIPT),
        "--batch_size={batch_size:8}",
        cwd=tmp_path,
    )
    launch = remedies_of(done)["expandable-segments"]["launch"]
    both = "PYTORCH_CUDA_ALLOC_CONF=max_split_size_mb:64,expandable_segments:True"
    assert launch.startswith(f"{both} python ")


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["--remedies=magic"], "--remedies: unknown remedy 'magic'; trainfit plan --help lists"),
        (["--remedies=lor"], "--remedies: unknown remedy 'lor'; did you mean 'lora'?"),
        (["--remedies=sgd,"], "--remedies: unknown remedy ''; trainfit plan --help lists"),
        (["--remedies="], "--remedies: unknown remedy ''; trainfit plan --help lists"),
    ],
)
def test_names_that_are_no_remedies(words: list[str], says: str, tmp_path: Path) -> None:
    done = plan("--gpu", "T4", *words, "--", "python", SCRIPT, cwd=tmp_path)
    assert done.returncode == 2
    assert error_line(done).startswith(says)
    assert done.stdout == ""


def test_remedies_and_no_remedies_exclude_each_other(tmp_path: Path) -> None:
    words = ("--gpu", "T4", "--remedies", "--no-remedies", "--", "python", SCRIPT)
    done = plan(*words, cwd=tmp_path)
    assert done.returncode == 2
    assert "not allowed with" in done.stderr


# -- scripts that do not train -----------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["grad", "no_grad", "inference_mode"])
def test_inference_with_and_without_gradients(mode: str, tmp_path: Path) -> None:
    done = plan(
        *("--gpu", "custom:2GiB", "--json", "--", "python", str(SCRIPTS / "infer.py")),
        *("--batch_size={batch_size:1024}", f"--mode={mode}"),
        cwd=tmp_path,
    )
    assert done.returncode == 0, done.stderr
    document = json_of(done)
    inference = document["inference"]
    assert inference["records_gradients"] is (mode == "grad")
    allocated = {
        key: inference[key]["allocated_bytes"] for key in ("without_gradients", "with_gradients")
    }
    # Tensors of 4 MiB at the last sigmoid: the batch, the seven sigmoids before it (which they
    # and the linear layers behind them keep), its input and its result. Without gradients at
    # any sigmoid: the batch, its input and its result.
    assert allocated["with_gradients"] - allocated["without_gradients"] == (10 - 3) * 4 * MIB
    mine = "with_gradients" if mode == "grad" else "without_gradients"
    assert document["now"]["memory"] == inference[mine]
    assert document["steps"] == 3
    assert document["now"]["largest_batch"] > 1024


def test_a_script_that_never_calls_a_model_is_still_refused(tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text("import torch\ntorch.ones(9, device='cuda')\n")
    done = plan("--gpu", "T4", "--", "python", "script.py", cwd=tmp_path)
    assert done.returncode == 2
    assert "without an optimizer step" in error_line(done)


@pytest.mark.parametrize(
    ("words", "remedies"),
    [
        ("--remedies amp --", "amp"),
        ("--remedies amp --gpu T4 --", "amp"),
        ("--remedies --gpu T4 --", "all"),
        ("--remedies", "all"),
    ],
)
def test_a_name_may_stand_behind_the_option(words: str, remedies: str) -> None:
    command = ["python", "train.py", "--", "-x"]
    _, options, rest = read_words(["plan", *words.split(), *command])
    assert (options.remedies, rest) == (remedies, command)
