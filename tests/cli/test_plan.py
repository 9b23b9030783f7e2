"""``trainfit plan``, called as a user calls it, on little scripts."""

from __future__ import annotations

import io
import itertools
import json
import os
import shlex
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from helpers_cli import ROOT, SCRIPTS, environment, error_line, json_of, trainfit
from helpers_warm import warm_runs
from trainfit.cli.main import _terminate_as_interrupt, main

MACHINES = ("--gpu", "2x(2x T4), 1x 10Gb/s", "--")
GPU = ("--gpu", "custom:2GiB")
#: One whose rates are known: batch sizes are recommended by them.
CARD = "RTX 4060"
TRAIN = ("python", str(SCRIPTS / "train.py"))
PLACEHOLDERS = ("--batch_size={batch_size:8}", "--amp={amp:true}")


def plan(*words: str, cwd: Path, gpu: str = CARD) -> dict[str, Any]:
    own = ("--gpu", gpu, "--json", "--no-remedies")
    done = trainfit("plan", *own, "--", *words, cwd=cwd)
    assert done.returncode == 0, done.stderr
    return json_of(done)


def simulated(*words: str, cwd: Path, code: int = 0) -> dict[str, Any]:
    done = trainfit("simulate", "--gpu", CARD, "--json", "--", *words, cwd=cwd)
    assert done.returncode == code, done.stderr
    return json_of(done)


# -- a command with placeholders ---------------------------------------------------------------

#: They must reach the script, and the launch command, as they are.
ODD_WORDS = ("--", "two  words", "it's", '{"a": {"b": 1}}', "größe", "$HOME", "", "{lr:0.1}")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where the plan that several tests look at is made, and its file."""
    return tmp_path_factory.mktemp("plan")


@pytest.fixture(scope="module")
def done(folder: Path) -> subprocess.CompletedProcess[str]:
    """One plan that several tests look at; the script prints JSON of its own."""
    words = (*TRAIN, *PLACEHOLDERS, "--json", *ODD_WORDS)
    own = ("--gpu", CARD, "--json", "--output", "plan.json", "--no-loader")
    return trainfit("plan", *own, "--", *words, cwd=folder)


@pytest.fixture(scope="module")
def result(done: subprocess.CompletedProcess[str]) -> dict[str, Any]:
    assert done.returncode == 0, done.stderr
    return json_of(done)


def widest(lines: list[str]) -> int:
    """Columns of the widest line; a path is one word, as long as the folder's name makes it."""
    return max(len(line) for line in lines if str(SCRIPTS) not in line)


def test_the_configurations(result: dict[str, Any]) -> None:
    now, other = result["now"], result["other_amp"]
    assert (now["batch_size"], now["amp"], now["fits"]) == (8, "bfloat16", True)
    assert (other["batch_size"], other["amp"], other["fits"]) == (8, "off", True)
    assert 8 < now["recommended_batch"] < now["largest_batch"]
    assert now["recommended_batch"] % 8 == 0
    assert other["largest_batch"] < now["largest_batch"]
    assert sum(now["by_kind_bytes"].values()) == now["memory"]["allocated_bytes"]
    assert (result["basis"], result["basis_detail"]) == ("two traces", "")


def test_the_recommended_batch_leaves_the_headroom(result: dict[str, Any]) -> None:
    """By default what the figures may be too low by: the upper bound fits."""
    capacity, recommended = result["gpu_memory_bytes"], result["recommended"]
    assert not result["headroom_is_set"]
    assert 0 < result["headroom_share"] < 0.2
    assert recommended["device_bytes"] <= (1 - result["headroom_share"]) * capacity
    assert recommended["device_range_bytes"][1] <= 1.01 * capacity


@pytest.mark.slow
def test_a_noise_scale_lowers_the_recommended_batch(tmp_path: Path) -> None:
    words = ["--gpu", "RTX 4090", "--json", "--output", "plan.json", "--no-remedies"]
    command = [*TRAIN, "--batch_size={batch_size:8}"]
    done = trainfit("plan", *words, "--noise-scale", "16", "--", *command, cwd=tmp_path)
    now = json_of(done)["now"]
    limits = now["limits"]
    assert limits["noise_scale"] == 16
    assert now["recommended_batch"] == limits["trains"] < limits["knee"]
    shown = trainfit("show", "plan.json", cwd=tmp_path).stdout
    assert len(shown.splitlines()) <= 25
    assert "at this noise scale" in " ".join(shown.split())


@pytest.mark.slow
def test_a_headroom_that_is_set(tmp_path: Path) -> None:
    command = [*TRAIN, "--batch_size={batch_size:8}"]
    done = trainfit(
        "plan",
        "--gpu",
        CARD,
        "--headroom=40%",
        "--json",
        "--no-remedies",
        "--",
        *command,
        cwd=tmp_path,
    )
    result = json.loads(done.stdout)
    assert result["headroom_is_set"]
    assert result["headroom_share"] == 0.4
    assert result["recommended"]["device_bytes"] <= 0.6 * result["gpu_memory_bytes"]


def test_the_launch_command_is_the_users_with_the_recommended_batch(result: dict[str, Any]) -> None:
    best = result["now"]["recommended_batch"]
    words = [*TRAIN, f"--batch_size={best}", "--amp=true", "--json", *ODD_WORDS]
    assert shlex.split(result["launch"]) == words
    assert shlex.split(result["command"])[2] == "--batch_size=8"


def test_the_result_file_is_the_printed_document(
    done: subprocess.CompletedProcess[str], tmp_path: Path
) -> None:
    (tmp_path / "plan.json").write_text(done.stdout)
    shown = trainfit("show", "--json", "plan.json", cwd=tmp_path)
    assert shown.stdout == done.stdout
    text = trainfit("show", "plan.json", cwd=tmp_path).stdout
    assert text.startswith("Fits: ")
    assert len(text.splitlines()) <= 25 and widest(text.splitlines()[5:]) <= 80
    whole = trainfit("show", "-v", "plan.json", cwd=tmp_path).stdout
    assert whole == trainfit("show", "--explain", "plan.json", cwd=tmp_path).stdout
    assert "Batch size (from two simulated batch sizes)" in whole
    assert widest(whole.splitlines()) <= 100
    said = done.stderr.replace("trainfit: simulating", "").replace("trainfit: first answer: ", "")
    assert "trainfit:" not in said and "\x1b" not in text + whole + done.stderr


def test_the_file_answers_for_other_gpus(
    done: subprocess.CompletedProcess[str], result: dict[str, Any], folder: Path
) -> None:
    assert result["recordings"] == []  # printed without, kept with
    names = ("RTX 4090", "T4", result["gpu"])
    answer = trainfit("gpus", *names, "--for", "plan.json", "--json", cwd=folder)
    assert answer.returncode == 0, answer.stderr
    found = {estimate["gpu"]: estimate for estimate in json_of(answer)["gpus"]}
    own, now = found[result["gpu"]], result["now"]
    assert own["largest_batch"] == now["largest_batch"]
    assert own["device_bytes"] == now["memory"]["device_bytes"]
    assert found["RTX 4090"]["samples_per_s"] > found["T4"]["samples_per_s"] > 0
    assert any("no bfloat16" in note for note in found["T4"]["notes"])
    (folder / "printed.json").write_text(done.stdout)
    refused = trainfit("gpus", "--for", "printed.json", cwd=folder)
    assert refused.returncode == 2
    assert "it contains no recordings" in error_line(refused)


@pytest.mark.slow
def test_a_plan_agrees_with_simulate(result: dict[str, Any], tmp_path: Path) -> None:
    def at(batch: int, code: int = 0) -> dict[str, Any]:
        words = (*TRAIN, f"--batch_size={batch}", "--amp=true")
        return simulated(*words, cwd=tmp_path, code=code)

    now = result["now"]
    assert at(8)["memory"] == now["memory"]
    best = at(now["recommended_batch"])["memory"]
    assert best["allocated_bytes"] == result["recommended"]["allocated_bytes"]
    assert at(now["largest_batch"])["out_of_memory"] is None
    assert "CUDA out of memory" in at(now["largest_batch"] + 1, code=1)["out_of_memory"]


# -- where the batch size comes from -----------------------------------------------------------


@pytest.mark.slow
@pytest.mark.usefixtures("unconfirmed")
def test_without_placeholders_the_loader_of_the_first_step_is_varied(tmp_path: Path) -> None:
    script = tmp_path / "plain.py"
    text, many = (SCRIPTS / "plain.py").read_text(), "torch.randn(64, 256).expand(8192, 64, 256)"
    script.write_text(text.replace("torch.randn(512, 64, 256)", many))
    result = plan("python", str(script), cwd=tmp_path)
    now = result["now"]
    assert (now["batch_size"], now["amp"], result["other_amp"]["amp"]) == (16, "off", "bfloat16")
    assert now["recommended_batch"] == 16
    notes = "\n".join(result["notes"])
    part = next(part for part in result["launch_parts"] if part["name"] == "batch_size")
    assert (part["status"], part["place"]) == ("option", f"{script}:7")
    assert (part["call"], part["line"]) == ("DataLoader", f"batch_size={part['value']}")
    assert int(part["value"]) > 16
    assert result["coverage"]["evaluated"] is result["coverage"]["saved"] is False
    assert "AMP on was simulated by torch.autocast around the model" in notes
    assert result["launch"] == f"python {script}"


@pytest.mark.slow
def test_a_loader_rebuilt_around_its_sampler_counts_as_the_original(tmp_path: Path) -> None:
    result = plan("python", str(SCRIPTS / "rebuilt.py"), cwd=tmp_path)
    assert result["now"]["batch_size"] == 16
    assert result["now"]["largest_batch"] > 16
    assert result["loader_at"] == f"{SCRIPTS / 'rebuilt.py'}:13"


@pytest.mark.slow
def test_the_placeholder_may_be_in_a_variable_and_prefixes_stay(tmp_path: Path) -> None:
    words = ("BATCH_SIZE={batch_size:8}", "nice", "-n", "5", *TRAIN, "--amp", "{amp:bf16}")
    result = plan(*words, cwd=tmp_path)
    assert (result["now"]["amp"], result["other_amp"]["amp"]) == ("bfloat16", "off")
    best = result["now"]["recommended_batch"]
    assert best > 8
    assert result["launch"].startswith(f"BATCH_SIZE={best} nice -n 5 python ")
    assert result["launch"].endswith(" --amp bf16")


@pytest.fixture(scope="module")
def at_64(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """The plan that others of the same job are compared with."""
    folder = tmp_path_factory.mktemp("plan")
    return plan(*TRAIN, "--batch_size={batch_size:64}", cwd=folder)


@pytest.mark.slow
def test_a_present_batch_size_of_1(at_64: dict[str, Any], tmp_path: Path) -> None:
    # The law comes from 2 and 4; what is shown is batch size 1 as it was simulated.
    one = plan(*TRAIN, "--batch_size={batch_size:1}", "--guard=bare", cwd=tmp_path)
    assert one["now"]["batch_size"] == 1
    assert one["now"]["memory"]["allocated_bytes"] < at_64["now"]["memory"]["allocated_bytes"]
    assert one["now"]["largest_batch"] == at_64["now"]["largest_batch"]


@pytest.mark.slow
@pytest.mark.parametrize("options", [(), ("--drop_last",)], ids=["short batch", "drop_last"])
def test_a_data_set_too_small_for_twice_the_batch(
    options: tuple[str, ...], at_64: dict[str, Any], tmp_path: Path
) -> None:
    # 100 samples are two batches of 64, one of them short: nothing to derive a law from.
    # Batches of 16 and 33 are all full.
    small = plan(*TRAIN, "--batch_size={batch_size:64}", "--samples=100", *options, cwd=tmp_path)
    assert small["basis"] == "two traces"
    assert small["now"]["largest_batch"] == at_64["now"]["largest_batch"]
    assert small["now"]["memory"] == at_64["now"]["memory"]
    # Memory's limit is memory's, and no batch is recommended that the data set does not fill.
    assert small["now"]["limits"]["data_set"] == 100
    batch = small["now"]["recommended_batch"]
    assert batch <= 100
    # The last batch of an epoch may be short, or is dropped.
    assert small["now"]["limits"]["epoch_steps"] == (100 // batch if options else -(-100 // batch))


@pytest.mark.slow
def test_several_optimizers(tmp_path: Path) -> None:
    script = str(SCRIPTS / "gan.py")
    result = plan("python", script, "--batch_size", "{batch_size:16}", cwd=tmp_path)
    assert result["basis"] == "two traces"
    at = simulated("python", script, "--batch_size", "16", cwd=tmp_path)
    assert at["memory"] == result["now"]["memory"]
    parameters = (64 * 512 + 512 + 512 * 1024 + 1024) + (1024 * 512 + 512 + 512 + 1)
    # Adam's two states for each parameter of both networks, blocks rounded up to 512 bytes.
    states = result["now"]["by_kind_bytes"]["optimizer_state"]
    assert 8 * parameters <= states <= 8 * parameters + 16 * 3 * 512


# -- jobs without a law ------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize(
    ("script", "gpu", "reason"),
    [
        ("variable.py", "custom:600MiB", "operator"),
        ("contrastive.py", "custom:1GiB", "sizes do not grow in proportion to the batch size"),
    ],
)
def test_batch_sizes_by_trial(script: str, gpu: str, reason: str, tmp_path: Path) -> None:
    """Without rates the largest is found, and the current one stays."""
    command = ("python", str(SCRIPTS / script), "--batch_size")
    result = plan(*command, "{batch_size:4}", cwd=tmp_path, gpu=gpu)
    kept = "no throughput prediction for a custom GPU: keeping 4"
    assert result["now"]["limits"]["reason"] == kept
    assert result["basis"] == "one trace a batch size"
    assert "do not predict others" in result["basis_detail"]
    assert reason in result["basis_detail"]
    largest, best = result["now"]["largest_batch"], result["now"]["recommended_batch"]
    assert best == 4 <= largest
    done = trainfit("simulate", "--gpu", gpu, "--", *command, str(largest), cwd=tmp_path)
    assert done.returncode == 0


# -- bad news ----------------------------------------------------------------------------------


@pytest.mark.usefixtures("brief")
def test_nothing_fits_and_what_would(tmp_path: Path) -> None:
    words = (*TRAIN, "--batch_size={batch_size:8}", "--width=2048")
    done = trainfit("plan", "--gpu", "custom:400MiB", "--no-remedies", "--", *words, cwd=tmp_path)
    assert done.returncode == 1, done.stderr
    assert done.stdout.startswith("Does not fit: needs ")
    assert "Not even one sample fits." in " ".join(done.stdout.split())
    assert "What would make it fit\n" in done.stdout
    assert "- a larger GPU: " in done.stdout
    assert done.stdout.count("python") <= 1  # what was planned at most, nothing to run


# -- scripts that give nothing to plan with ----------------------------------------------------


def test_an_option_that_the_script_does_not_know(tmp_path: Path) -> None:
    done = trainfit("plan", *GPU, "--", *TRAIN, "--batchsize={batch_size:8}", cwd=tmp_path)
    assert done.returncode == 2, done.stderr
    line = error_line(done)
    assert "exit code 2" in line
    assert "its parser calls the option --batch_size, not --batchsize" in line
    assert "train.py: error: unrecognized arguments: --batchsize=8" in done.stderr


@pytest.mark.slow
def test_a_batch_size_without_effect(tmp_path: Path) -> None:
    done = trainfit("plan", *GPU, "--", *TRAIN, "--samples={batch_size:9000}", cwd=tmp_path)
    assert done.returncode == 2, done.stderr
    assert "the batch size has no effect: 9000 and 18000 allocate the same" in error_line(done)


@pytest.mark.slow
def test_a_failure_after_the_first_step_is_noted(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(
        (SCRIPTS / "plain.py").read_text().replace("        optimizer.step()\n", "")
        + "        optimizer.step()\n        if optimizer.state and batch.sum() < 1e9: 1 / 0\n"
    )
    result = plan("python", "script.py", cwd=tmp_path)
    assert result["steps"] == 1
    assert "(ZeroDivisionError: division by zero) after 1 optimizer step" in result["notes"][0]


@pytest.mark.slow
def test_data_dependent_shapes_are_stated(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    text = (SCRIPTS / "plain.py").read_text()
    script.write_text(text + "        torch.rand(9, device='cuda').nonzero()\n")
    done = trainfit("plan", *GPU, "--output", "plan.json", "--", "python", script, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert "  - assumed: nonzero() of unknown data" in done.stdout
    assert json.loads((tmp_path / "plan.json").read_text())["assumptions"]


# -- input that is refused before anything runs ------------------------------------------------


@pytest.mark.parametrize(
    ("words", "says"),
    [
        ([*GPU], "no command: write the training command after --"),
        ([*GPU, "--"], "no command: write the training command after --"),
        ([*GPU, "--", "python", "no.py"], "script 'no.py': there is no such file"),
        ([*GPU, "python", "no.py"], "script 'no.py': there is no such file"),
        ([*GPU, "--", *TRAIN, "{batch_size}"], "{batch_size} in '{batch_size}' has no current"),
        ([*GPU, "--", *TRAIN, "{batch_size:0}"], "an integer of 1 or more, got '0'"),
        ([*GPU, "--", *TRAIN, "{batch_size:abc}"], "an integer of 1 or more, got 'abc'"),
        ([*GPU, "--", *TRAIN, "{bach_size:8}"], "did you mean {batch_size:…}?"),
        (["--gpu", "4", "--", *TRAIN], "GPU"),
        (["--gpu", "custom:24", "--", *TRAIN], "custom"),
        ([*GPU, "--output", "no/x", "--", *TRAIN], "output file 'no/x': its folder does not"),
        (
            ["--gpu", "2x RTX 4060", "--", "torchrun", "--nproc-per-node=4", *TRAIN[1:]],
            "has 2 GPUs, and the command starts 4 processes",
        ),
        (
            [*GPU, "--", "torchrun", "--nnodes=2", "--nproc-per-node=4", *TRAIN[1:]],
            "starts processes on 2 machines",
        ),
        (["--gpu", "2x(8x H100 SXM)", "--", *TRAIN], "how fast the network between them is"),
        (
            ["--gpu", "2x(2x T4), 1x 10Gb/s", "--", "torchrun", "--nproc-per-node=4", *TRAIN[1:]],
            "its launcher know of the others (torchrun --nnodes=2)",
        ),
        (
            [*MACHINES, *["torchrun", "--nnodes=2", "--nproc-per-node=4"], *TRAIN[1:]],
            '--gpu "2x(4x T4), 1x 10Gb/s"',
        ),
    ],
    ids=lambda value: shlex.join(value[-2:]) if isinstance(value, list) else "",
)
def test_bad_input(words: list[str], says: str, tmp_path: Path) -> None:
    done = trainfit("plan", *words, cwd=tmp_path)
    assert done.returncode == 2, done.stderr
    assert done.stdout == ""
    assert says in error_line(done)
    assert "simulating" not in done.stderr


@pytest.mark.parametrize(
    ("value", "says"),
    [("0", "expected a noise scale"), ("-4", "expected a noise scale"), ("many", "no such file")],
)
def test_a_noise_scale_is_samples_or_a_result(value: str, says: str, tmp_path: Path) -> None:
    done = trainfit("plan", *GPU, f"--noise-scale={value}", "--", *TRAIN, cwd=tmp_path)
    assert done.returncode == 2
    assert says in done.stderr


@pytest.mark.usefixtures("brief")
def test_a_measured_noise_scale_lowers_the_recommended_batch(tmp_path: Path) -> None:
    file = ROOT / "tests" / "fixtures" / "results" / "noise-scale-v1.json"
    words = ["--gpu", "RTX 4090", "--json", "--no-remedies", "--noise-scale", str(file)]
    found = json.loads(trainfit("plan", *words, "--", *TRAIN, cwd=tmp_path).stdout)
    measured = json.loads(file.read_text())["noise"]["value"]
    assert found["now"]["limits"]["noise_scale"] == measured


@pytest.mark.parametrize("value", ["1", "100%", "-0.1", "nan", "x", "10 %%", ""])
def test_headroom_out_of_range(value: str, tmp_path: Path) -> None:
    done = trainfit("plan", *GPU, f"--headroom={value}", "--", *TRAIN, cwd=tmp_path)
    assert done.returncode == 2, done.stderr
    assert f"expected a share from 0 to below 1 (100%), got {value!r}" in done.stderr


# -- being interrupted -------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize(
    ("signals", "code"),
    # `timeout` sends SIGTERM to the process and to its group.
    [([signal.SIGINT], 130), ([signal.SIGTERM] * 2, 143)],
    ids=["Ctrl-C", "SIGTERM"],
)
def test_an_interrupt_keeps_what_was_simulated(
    signals: list[int], code: int, tmp_path: Path
) -> None:
    """As it is and at another batch size it was; without AMP the script never comes to an end."""
    scratch = tmp_path / "scratch"
    scratch.mkdir()
    script = tmp_path / "script.py"
    script.write_text(
        "import os, sys, time\nopen(f'pid-{os.getpid()}', 'w')\n"
        "if '--amp=false' in sys.argv:\n    time.sleep(600)\n"
        f"sys.path.insert(0, {str(SCRIPTS)!r})\nimport train\ntrain.main()\n"
    )
    words = [*GPU, "--json", "--output", "plan.json", "--", "python", "script.py", *PLACEHOLDERS]
    process = subprocess.Popen(
        [sys.executable, "-m", "trainfit", "plan", *words],
        cwd=tmp_path,
        env=environment(TMPDIR=str(scratch)),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert process.stderr is not None
    try:
        # Two at a time: when two more have begun, both of training with AMP are over.
        more = (
            line for line in process.stderr if "amp false" in line or "the end of its epoch" in line
        )
        said = list(itertools.islice(more, 2))
        for each in signals:
            process.send_signal(each)
            time.sleep(0.1)  # two that wait are one
        out, err = process.communicate(timeout=300)
    finally:
        process.kill()
    assert process.returncode == code, err
    assert len(said) == 2 and err.splitlines()[-1] == "trainfit: interrupted"
    result = json.loads(out)
    assert result["interrupted"] and result["other_amp"] is None
    assert 8 <= result["now"]["recommended_batch"] < result["now"]["largest_batch"]
    assert result["notes"][0] == "interrupted: the opposite AMP setting not simulated"
    assert json.loads((tmp_path / "plan.json").read_text())["now"] == result["now"]
    assert not list(scratch.glob("trainfit-*"))
    for pid in tmp_path.glob("pid-*"):
        assert not Path("/proc", pid.name.removeprefix("pid-")).exists()


def test_an_interrupt_and_its_echo_are_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """`timeout -s INT` sends it to the process and to its group; typed once more it is an end."""
    former = signal.signal(signal.SIGINT, signal.default_int_handler)  # xdist ignores it
    try:
        with _terminate_as_interrupt([]):
            with pytest.raises(KeyboardInterrupt):
                signal.raise_signal(signal.SIGINT)
            signal.raise_signal(signal.SIGINT)
            monkeypatch.setattr("trainfit.cli.main._ECHO_S", 0.0)
            with pytest.raises(KeyboardInterrupt):
                signal.raise_signal(signal.SIGINT)
        assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    finally:
        signal.signal(signal.SIGINT, former)


# A test above interrupts, too, and looks for the children.
@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc").is_dir(), reason="looks for processes in /proc")
@pytest.mark.parametrize(
    ("number", "code"),
    [(signal.SIGINT, 130), (signal.SIGTERM, 143)],
    ids=["Ctrl-C", "SIGTERM"],
)
def test_an_interrupt_ends_the_children(number: int, code: int, tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(
        "import os, sys, time\nbatch_size = sys.argv[1]\nopen(f'pid-{os.getpid()}', 'w')\n"
        "while True:\n    time.sleep(0.1)  # {batch_size}\n"
    )
    process = subprocess.Popen(
        [sys.executable, "-m", "trainfit", "plan", *GPU, "--allow-writes", "--", "python",
         "script.py", "{batch_size:8}"],
        cwd=tmp_path,
        env=environment(),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        # Where the tests run in the background, SIGINT is ignored, which children inherit.
    )  # fmt: skip
    try:
        # Two runs at a time: both batch sizes.
        while len(pids := list(tmp_path.glob("pid-*"))) < 2 and process.poll() is None:
            time.sleep(0.05)
        os.kill(process.pid, number)
        out, err = process.communicate(timeout=300)
    finally:
        process.kill()
    assert process.returncode == code, err
    assert out == ""
    assert err.splitlines()[-1] == "trainfit: interrupted"
    assert len(pids) == 2
    for pid in pids:
        assert not Path("/proc", pid.name.removeprefix("pid-")).exists()


# -- the first answer --------------------------------------------------------------------------

#: Its second step lasts; the third comes once the test has seen an answer.
SLOW = """
import os, sys, time, torch
model = torch.nn.Linear(64, 64).cuda()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for step in range(3):
    model(torch.randn(int(sys.argv[1]), 64, device="cuda")).sum().backward()
    optimizer.step()
    if sys.argv[1] == "8" and step == 0:
        time.sleep(4.5)
    if sys.argv[1] == "8" and step == 1:
        end = time.monotonic() + 600  # a busy machine
        while not os.path.exists("answered"):
            time.sleep(0.05)
            assert time.monotonic() < end, "no answer by then"
"""


class Answered(io.TextIOWrapper):
    """Standard error of a plan; a file is made when the first answer is written."""

    def __init__(self, file: Path) -> None:
        super().__init__(io.BytesIO(), encoding="utf-8", write_through=True)
        self._file = file

    def write(self, text: str) -> int:
        if "first answer" in text:
            self._file.touch()
        return super().write(text)


@pytest.mark.slow
def test_a_slow_script_has_an_answer_before_its_run_is_over(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "slow.py").write_text(SLOW)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "stderr", Answered(tmp_path / "answered"))
    words = [*GPU, "--allow-writes", "--no-loader", "--", "python", "slow.py", "{batch_size:8}"]
    with warm_runs():
        assert main(["plan", *words]) == 0
    out, err = capsys.readouterr().out, sys.stderr.buffer.getvalue().decode()  # type: ignore[attr-defined]
    said = next(line for line in err.splitlines() if "first answer" in line)
    assert (
        said.startswith("trainfit: first answer: the first steps fit, ")
        and "at batch size 8" in said
    )
    assert out.startswith("Fits: ") and "first answer" not in out


class Interrupted(Answered):
    """Standard error of a plan that is ended when the first answer is written."""

    def write(self, text: str) -> int:
        if "first answer" in text:
            os.kill(os.getpid(), signal.SIGTERM)
        return super().write(text)


@pytest.mark.slow
def test_an_interrupt_after_the_first_answer_leaves_a_plan_of_what_its_run_has_made(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "slow.py").write_text(SLOW)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "stderr", Interrupted(tmp_path / "never"))
    words = [*GPU, "--allow-writes", "--json", "--", "python", "slow.py", "{batch_size:8}"]
    with warm_runs():
        assert main(["plan", *words]) == 143
    found = json.loads(capsys.readouterr().out)
    assert found["interrupted"] and found["now"]["fits"] and found["steps"] == 2
    assert found["now"]["memory"]["allocated_bytes"] >= 4 * (64 * 64 + 64)
    assert found["notes"][0].startswith("interrupted: ")
