"""``trainfit plan`` of commands in which the user has marked nothing."""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import Any

import pytest

from helpers_cli import SCRIPTS, json_of, trainfit
from trainfit.hardware import find_gpu
from trainfit.plan.command.parsing import parse_command
from trainfit.plan.runs.option_proof import check
from trainfit.plan.runs.options import observed_settings, read_options
from trainfit.plan.runs.tracing import Tracer

pytestmark = pytest.mark.usefixtures("warm")

ARGPARSE = """
import argparse, sys
sys.path.insert(0, {scripts!r})
import torch
from trained_by import train

parser = argparse.ArgumentParser()
parser.add_argument("-b", "--batch-size", "--batch_size", type=int, default=8)
parser.add_argument("--eval_batch_size", type=int, default=8)
parser.add_argument("--workers", type=int, default=0)
parser.add_argument("--accum_iter", type=int, default=1)
parser.add_argument("--amp", action="store_true")
options = parser.parse_args()
"""
#: A script by how it reads its words; "{scripts}" is where its loop is.
READS = {
    "argparse": ARGPARSE
    + """
train(options.batch_size, amp=torch.float16 if options.amp else None, workers=options.workers,
      accumulate=options.accum_iter, eval_batch_size=options.eval_batch_size)
""",
    "without effect": ARGPARSE + "train(8)\n",
    "refused": ARGPARSE
    + """
if options.batch_size != 8:
    parser.error("not today")
train(options.batch_size)
""",
    "click": """
import sys
sys.path.insert(0, {scripts!r})
import click, torch
from trained_by import train

@click.group()
def main(): pass

@main.command()
@click.option("--batch-size", default=8)
@click.option("--amp/--no-amp", default=False)
def fit(batch_size, amp):
    train(batch_size, amp=torch.bfloat16 if amp else None)

main()
""",
    "words": """
import sys
sys.path.insert(0, {scripts!r})
from trained_by import train

values = dict(word.lstrip("+").split("=") for word in sys.argv[1:])
train(int(values["training.batch_size"]))
""",
    "without a DataLoader": """
import argparse, torch
parser = argparse.ArgumentParser()
parser.add_argument("--batch_size", type=int, default=8)
batch = parser.parse_args().batch_size
model = torch.nn.Linear(256, 256).cuda()
optimizer = torch.optim.AdamW(model.parameters())
for _ in range(9):
    model(torch.randn(batch, 256).cuda()).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()
""",
}


@pytest.fixture
def script(tmp_path: Path) -> Any:
    """Writes a script and gives its path."""

    def write(reads: str) -> str:
        (tmp_path / "train.py").write_text(READS[reads].replace("{scripts!r}", repr(str(SCRIPTS))))
        return "train.py"

    return write


def planned(*words: str, cwd: Path, gpu: str = "RTX 4060") -> dict[str, Any]:
    own = ("--gpu", gpu, "--json", "--no-loader", "--no-remedies")
    done = trainfit("plan", *own, "--", *words, cwd=cwd)
    assert done.returncode == 0, done.stderr
    result = json_of(done)
    assert result["remedies"] is None and "looking for remedies" not in done.stderr
    return result


def option_of(result: dict[str, Any], present: int = 8) -> int:
    """The faster batch size that the command could have: the present one stays, as nobody marked
    it, and a step keeps its samples."""
    choice = result["amp_choice"]
    chosen = choice["configuration"] if choice is not None else None
    assert (chosen or result["now"])["recommended_batch"] == present
    (part,) = [part for part in result["launch_parts"] if part["status"] == "option"]
    assert bool(part["place"]) != result["batch_in_command"]
    return int(part["value"])


def actions(result: dict[str, Any]) -> list[str]:
    return [note["text"] for note in result["structured_notes"] if note["kind"] == "action"]


@pytest.mark.slow
def test_a_default_that_the_command_does_not_say(script: Any, tmp_path: Path) -> None:
    words = ["python", script("argparse"), "--eval_batch_size", "8"]
    result = planned(*words, cwd=tmp_path)
    amp = ["--amp"] if result["amp_choice"]["value"] == "true" else []
    assert result["other_amp"]["amp"] == "float16"
    assert shlex.split(result["launch"]) == [*words, *amp] and option_of(result) > 8
    assert shlex.split(result["command"]) == words
    assert result["batch_in_command"] and result["basis"] == "two traces"
    assert not any("batch_size" in text for text in actions(result))


@pytest.mark.parametrize(
    "spelling",
    ["--batch_size 8 --amp", *(pytest.param(each, marks=pytest.mark.slow)
                               for each in ("--batch_size=8 --amp", "--amp -b8"))],
)  # fmt: skip
@pytest.mark.usefixtures("unconfirmed")
def test_a_value_that_the_command_says(script: Any, spelling: str, tmp_path: Path) -> None:
    words = ["python", script("argparse"), *spelling.split()]
    result = planned(*words, cwd=tmp_path)
    line = spelling
    assert option_of(result) > 8
    if result["amp_choice"]["value"] == "false":
        line = line.replace("--amp", "")
    assert shlex.split(result["launch"]) == [*words[:2], *line.split()]
    assert (result["now"]["amp"], result["other_amp"]["amp"]) == ("float16", "off")
    # The script has no scaler, and this GPU computes in bfloat16; without AMP none is needed.
    wanted = [] if result["amp_choice"]["value"] == "false" else ["bfloat16"]
    assert [text.partition(":")[0] for text in actions(result)] == wanted


@pytest.mark.parametrize(
    ("reads", "says", "where"),
    # The script's line calls a loop with a number, or with an option, in place of a DataLoader.
    [("without effect", "with --batch-size 16 the DataLoader's is 8", ""),
     pytest.param("refused", "with --batch-size 16 the script exited with exit code 2",
                  " for the DataLoader there", marks=pytest.mark.slow)],
)  # fmt: skip
@pytest.mark.usefixtures("unconfirmed")
def test_an_option_that_has_not_the_effect_of_its_name(
    script: Any, reads: str, says: str, where: str, tmp_path: Path
) -> None:
    words = ["python", script(reads)]
    result = planned(*words, cwd=tmp_path)
    best = option_of(result)
    assert result["basis"] == "two traces" and not result["batch_in_command"]
    assert shlex.split(result["launch"]) == words
    part = next(part for part in result["launch_parts"] if part["name"] == "batch_size")
    assert (part["status"], part["line"]) == ("option", f"batch_size={best}{where}")
    assert f"--batch-size is not used for the batch size: {says}" in result["notes"]
    # Its --amp does nothing either: autocast was switched from outside.
    assert result["other_amp"]["amp"] == "bfloat16"


@pytest.mark.slow
def test_click_with_a_subcommand(script: Any, tmp_path: Path) -> None:
    pytest.importorskip("click")
    words = ["python", script("click"), "fit"]
    result = planned(*words, cwd=tmp_path)
    amp = ["--amp"] if result["amp_choice"]["value"] == "true" else []
    assert shlex.split(result["launch"]) == [*words, *amp] and option_of(result) > 8


@pytest.mark.slow
def test_words_that_the_script_reads_itself(script: Any, tmp_path: Path) -> None:
    words = ["python", script("words"), "+model.width=8", "training.batch_size=8"]
    result = planned(*words, cwd=tmp_path)
    assert shlex.split(result["launch"]) == words and option_of(result) > 8


@pytest.mark.slow
def test_a_script_without_a_data_loader(script: Any, tmp_path: Path) -> None:
    words = ["python", script("without a DataLoader")]
    result = planned(*words, cwd=tmp_path)
    assert shlex.split(result["launch"]) == words and option_of(result) > 8


@pytest.mark.slow
@pytest.mark.parametrize(
    "launcher",
    ["torchrun --standalone --nproc-per-node=1", "accelerate launch --num_processes 1"],
)
def test_behind_a_launcher(script: Any, launcher: str, tmp_path: Path) -> None:
    if launcher.startswith("accelerate"):
        pytest.importorskip("accelerate")
    words = [*launcher.split(), script("argparse"), "-b", "8"]
    result = planned(*words, cwd=tmp_path)
    amp = ["--amp"] if result["amp_choice"]["value"] == "true" else []
    assert shlex.split(result["launch"]) == [*words, *amp] and option_of(result) > 8


@pytest.mark.slow
def test_the_effective_batch_stays_where_the_script_accumulates(
    script: Any, tmp_path: Path
) -> None:
    words = ["python", script("argparse"), "--accum_iter", "4"]
    result = planned(*words, cwd=tmp_path)
    filled = shlex.split(result["launch"])
    batch = int(result["now"]["recommended_batch"])
    assert batch > 8 and batch * int(filled[3]) == 32 and f"--batch-size={batch}" in filled
    assert not actions(result)


@pytest.mark.slow
def test_a_smaller_batch_is_accumulated(script: Any, tmp_path: Path) -> None:
    """A batch that does not fit becomes several: the option for that is proven by a run.

    Of 2048 the step needs 0.65 GiB, of 1024 at most 645 MiB, with all that a CUDA context may need.
    """
    words = ["python", script("argparse"), "--batch_size", "2048"]
    done = trainfit("plan", "--gpu", "custom:650MiB", "--json", "--no-loader", "--no-remedies",
                    "--", *words, cwd=tmp_path)  # fmt: skip
    result = json_of(done)
    filled = shlex.split(result["launch"])
    batch = int(filled[3])
    assert batch < 2048 and f"--accum_iter={round(2048 / batch)}" in filled, result["launch"]


def test_settings_are_checked_by_a_run(script: Any, tmp_path: Path) -> None:
    """Those of the DataLoader nothing else has proven."""
    command = parse_command(["python", str(tmp_path / script("argparse"))])
    with Tracer(command, find_gpu("RTX 4060"), steps=3) as tracer:
        first = tracer.trace()
        options = read_options(command, first.outcome.options, observed_settings(first))
        tracer.use(options.command)
        values = {"batch_size": "16", "num_workers": "1", "amp": "true", "grad_accum": "2"}
        found = check(options.command, values, tracer)
        assert [(each.name, each.had) for each in found] == [(name, True) for name in values]
        refused = check(options.command, {"num_workers": "-1"}, tracer)
    assert refused[0].had is None and "num_workers" in refused[0].seen


@pytest.mark.slow
def test_tuning_the_loader_keeps_what_was_found(script: Any, tmp_path: Path) -> None:
    words = ["python", script("argparse"), "--batch_size=8", "--workers={num_workers:0}"]
    own = ("--gpu", "RTX 4060", "--json", "--no-remedies", "--probe-time", "2")
    result = json_of(trainfit("plan", *own, "--", *words, cwd=tmp_path))
    assert "--batch_size=8" in shlex.split(result["launch"])
    assert result["loading"]["failure"] == ""
