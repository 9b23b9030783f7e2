"""``trainfit simulate`` and ``show``, called as a user calls them, on little scripts."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from helpers_cli import SCRIPTS, environment, error_line, json_of, trainfit

GPU = ("--gpu", "custom:2GiB")


def write(folder: Path, text: str, name: str = "script.py") -> Path:
    path = folder / name
    path.write_text(text)
    return path


STEPS = """
import torch
model = torch.nn.Linear(64, 64).cuda()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
def step():
    model(torch.randn(8, 64, device="cuda")).sum().backward()
    optimizer.step()
"""


# -- how a script is run ---------------------------------------------------------------------


@pytest.mark.parametrize("as_module", [False, True], ids=["script", "module"])
def test_a_script_sees_what_python_would_show_it(as_module: bool, tmp_path: Path) -> None:
    for name in ("semantics.py", "widths.py"):
        shutil.copy(SCRIPTS / name, tmp_path)
    words = ["a b", "--json", "--gpu", "{x}", "-m", "", "ü"]
    target = ["-m", "semantics"] if as_module else ["semantics.py"]
    options = ["--json", "--keep-writes", "kept"]
    done = trainfit("simulate", *GPU, *options, *target, "seen.json", *words, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert json_of(done)["steps"] == 3
    seen = json.loads(Path(f"{tmp_path}/kept{tmp_path}/seen.json").read_text())
    file = str(tmp_path / "semantics.py") if as_module else "semantics.py"
    assert seen.pop("doc").startswith("Notes what")
    assert seen == {
        "name": "__main__",
        "file": file,
        "argv": [file, "seen.json", *words],
        "package": "" if as_module else None,
        "spec": "semantics" if as_module else None,
        "main": True,
        "path": str(tmp_path),
        "sibling": 3,
        "stdin": "",
        "cwd": str(tmp_path),
        "pickled": True,
        "final": True,
        "atexit": True,
    }


@pytest.mark.parametrize(
    "options",
    [
        ("--guard", "bare"),
        pytest.param(("--workers", "2", "--start_method", "spawn"), marks=pytest.mark.slow),
        pytest.param(("--guard", "exception", "--accumulate", "3"), marks=pytest.mark.slow),
        pytest.param(("--scaler", "--amp", "true"), marks=pytest.mark.slow),
        pytest.param(("--workers", "2"), marks=pytest.mark.slow),
    ],
    ids=" ".join,
)
def test_habits_of_scripts(options: tuple[str, ...], tmp_path: Path) -> None:
    script = SCRIPTS / "train.py"
    done = trainfit("simulate", *GPU, "--json", script, "--json", *options, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    summary = json_of(done)
    assert summary["steps"] == 3
    kinds = summary["by_kind_bytes"]
    # Four layers of 256 x 256 weights and 256 biases; Adam keeps two states for each.
    parameters = 4 * 4 * (256 * 256 + 256)
    assert kinds["parameter"] == parameters
    assert 2 * parameters <= kinds["optimizer_state"] <= 2 * parameters + 8 * 512
    assert "Traceback" not in done.stderr


@pytest.mark.slow
def test_a_console_script_with_prefixes(tmp_path: Path) -> None:
    program = write(tmp_path, f"#!{sys.executable}\n{STEPS}" + "while True: step()\n", "my-train")
    program.chmod(0o755)
    path = f"{tmp_path}{os.pathsep}{os.environ['PATH']}"
    words = ["A=1", "nice", "-n", "5", "env", "B=2", "my-train"]
    done = trainfit("simulate", *GPU, "--json", "--", *words, cwd=tmp_path, PATH=path)
    assert done.returncode == 0, done.stderr
    assert json_of(done)["steps"] == 3


@pytest.mark.slow
def test_variables_before_the_command_reach_the_script(tmp_path: Path) -> None:
    script = write(tmp_path, STEPS + "import os; open(os.environ['OUT'], 'w'); step()\n")
    words = ["--keep-writes", "kept", "--", "OUT=here", "python", script]
    done = trainfit("simulate", *GPU, *words, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert Path(f"{tmp_path}/kept{tmp_path}/here").is_file()


@pytest.mark.slow
def test_fewer_steps_than_asked_for(tmp_path: Path) -> None:
    script = write(tmp_path, STEPS + "step()\nimport os; os._exit(0)\n")
    done = trainfit("simulate", *GPU, "--json", script, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert json_of(done)["steps"] == 1


# -- what is shown ---------------------------------------------------------------------------


def test_text_json_and_show_agree(tmp_path: Path) -> None:
    script = write(tmp_path, STEPS + "print('noise')\nwhile True: step()\n")
    done = trainfit("simulate", *GPU, "--steps", "2", "--output", "r.tf", script, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert "noise" not in done.stdout
    assert "\x1b" not in done.stdout + done.stderr
    shown = trainfit("show", "r.tf", cwd=tmp_path)
    assert (shown.returncode, shown.stdout) == (0, done.stdout)
    summary = json_of(trainfit("show", "--json", "r.tf", cwd=tmp_path))
    assert summary["steps"] == 2
    assert len(summary["step_peak_allocated_bytes"]) == 2
    assert sum(summary["by_kind_bytes"].values()) == summary["memory"]["allocated_bytes"]


def test_out_of_memory_is_bad_news_with_a_place(tmp_path: Path) -> None:
    script = write(tmp_path, STEPS + "step()\nx = torch.ones(1 << 30, device='cuda')\n")
    done = trainfit("simulate", *GPU, script, cwd=tmp_path)
    assert done.returncode == 1, done.stderr
    text = " ".join(done.stdout.split())
    assert f"{Path(script).name}:9: OutOfMemoryError: CUDA out of memory. Tried to" in text
    assert "1 optimizer step, " in text


def test_assumptions_on_data_are_stated(tmp_path: Path) -> None:
    script = write(
        tmp_path,
        STEPS + "for _ in range(3):\n  step()\n  torch.rand(9, device='cuda').nonzero()\n",
    )
    done = trainfit("simulate", *GPU, script, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert "  - assumed: " in done.stdout
    summary = json_of(trainfit("show", "--json", "recording.trainfit", cwd=tmp_path))
    assert any(f"{script}:11" in text or "nonzero" in text for text in summary["assumptions"])


# -- scripts that fail -----------------------------------------------------------------------

FAILURES = {
    "raises": (
        "def helper():\n    raise ValueError('bad \\x1b[2J\\x1b[31m data')\nhelper()\n",
        ["the script failed at {script}:10 (ValueError: bad \\x1b[2J data)",
         "its traceback is below"],
        ["line 11, in <module>", "line 10, in helper", "ValueError: bad \\x1b[2J\\x1b[31m data"],
    ),
    "no step": (
        "model(torch.randn(8, 64, device='cuda'))\n",
        ["the script ended after ", "without an optimizer step", "1 module call, 0 DataLoaders"],
        [],
    ),
    "too little data": (
        "from torch.utils.data import DataLoader\n"
        "optimizer = torch.optim.SGD(model.parameters())\n"
        "for batch in DataLoader(torch.randn(5, 64), 8, drop_last=True): pass\n",
        ["the data set has 5 samples, fewer than one batch of 8 with drop_last",
         "set batch_size=5 or less for the DataLoader at {script}:11"],
        [],
    ),
    "too little data for a schedule": (
        "from torch.utils.data import DataLoader\n"
        "loader = DataLoader(torch.randn(5, 64), 8, drop_last=True)\n"
        "rate = 1 / len(loader)\n",
        ["the script failed at {script}:11 (ZeroDivisionError: division by zero)",
         "the data set has 5 samples, fewer than one batch of 8 with drop_last",
         "set batch_size=5 or less for the DataLoader at {script}:10"],
        ["ZeroDivisionError: division by zero"],
    ),
    "usage": (
        "import argparse; argparse.ArgumentParser().parse_args(['--x'])\n",
        ["the script exited with exit code 2", "its own message is below"],
        ["unrecognized arguments: --x"],
    ),
    "killed": (
        "import os; print('last words'); os.kill(os.getpid(), 9)\n",
        ["ended unexpectedly (its process was killed by SIGKILL; ", "when RAM runs out"],
        ["last words"],
    ),
    "unsupported": (
        "library = torch.library.Library('mylib', 'DEF')\n"
        "library.define('twice(Tensor x) -> Tensor')\n"
        "torch.ops.mylib.twice(torch.randn(3, device='cuda'))\n",
        ["cannot simulate mylib.twice", "called at {script}:11",
         'register_fake("mylib::twice")'],
        ["line 11, in <module>"],
    ),
}  # fmt: skip
_QUICK = ("raises", "no step", "usage", "unsupported")


@pytest.mark.parametrize(
    "kind",
    [kind if kind in _QUICK else pytest.param(kind, marks=pytest.mark.slow) for kind in FAILURES],
)
def test_failures_before_the_first_step(kind: str, tmp_path: Path) -> None:
    text, says, shows = FAILURES[kind]
    script = write(tmp_path, STEPS + "\n" + text)
    done = trainfit("simulate", *GPU, script, cwd=tmp_path)
    assert done.returncode == 2, done.stderr
    assert done.stdout == ""
    line = error_line(done)
    assert line.startswith(f"{script}: ")
    for part in says:
        assert part.format(script=script) in line
    _, mark, output = done.stderr.partition("--- the script's own output ---\n")
    assert bool(mark) is bool(shows)
    for part in shows:
        assert part in output
    assert "trainfit/simgpu" not in output and "UnsupportedOperatorError" not in output
    assert "\x1b" not in done.stderr


@pytest.mark.slow
def test_a_script_that_trains_on_the_cpu(tmp_path: Path) -> None:
    script = write(tmp_path, STEPS.replace(".cuda()", "").replace(', device="cuda"', "")
                   + "while True: step()\n")  # fmt: skip
    done = trainfit("simulate", *GPU, script, cwd=tmp_path)
    assert done.returncode == 2, done.stderr
    assert "3 optimizer steps, none of them on the GPU" in error_line(done)


@pytest.mark.parametrize(("steps", "when"), [(2, "after 2 steps"), (0, "before its first step")])
def test_the_recording_of_a_run_that_failed_says_so(tmp_path: Path, steps: int, when: str) -> None:
    """mnist_hogwild's was told as "Fits: 397 MiB of 23.64 GiB.", without a step."""
    script = write(tmp_path, STEPS + "step();" * steps + "\nraise KeyError('evaluation')\n")
    done = trainfit("simulate", *GPU, script, cwd=tmp_path)
    assert done.returncode == 2, done.stderr
    for told in ("memory", "show"):
        first = trainfit(told, "recording.trainfit", cwd=tmp_path).stdout
        assert f", but the run ends {when}." in first.partition("\n  ")[0], first
    whole = write(tmp_path, STEPS + "step();" * 3)
    assert trainfit("simulate", *GPU, whole, cwd=tmp_path).returncode == 0
    assert "the run ends" not in trainfit("memory", "recording.trainfit", cwd=tmp_path).stdout


def test_a_failure_after_a_step_keeps_the_figures(tmp_path: Path) -> None:
    script = write(tmp_path, STEPS + "step(); step()\nraise KeyError('evaluation')\n")
    done = trainfit("simulate", *GPU, "--json", script, cwd=tmp_path)
    assert done.returncode == 2, done.stderr
    assert json_of(done)["steps"] == 2
    assert "(KeyError: 'evaluation') after 2 optimizer steps" in error_line(done)
    shown = trainfit("show", "--json", "recording.trainfit", cwd=tmp_path)
    assert json_of(shown) == json_of(done)


def test_a_failure_before_a_step_keeps_the_recording(tmp_path: Path) -> None:
    script = write(tmp_path, STEPS + "model(torch.randn(8, 64).cuda())\n1 / 0\n")
    done = trainfit("simulate", *GPU, "--output", "r.tf", script, cwd=tmp_path)
    assert done.returncode == 2, done.stderr
    assert "the recording so far is in 'r.tf'" in done.stderr
    summary = json_of(trainfit("show", "--json", "r.tf", cwd=tmp_path))
    assert summary["steps"] == 0
    assert summary["memory"]["allocated_bytes"] > 0


def test_a_script_that_hangs_says_where(tmp_path: Path) -> None:
    script = write(tmp_path, "import time\ndef wait():\n    time.sleep(999)\nwait()\n")
    done = trainfit("simulate", *GPU, "--time-limit", "4", script, cwd=tmp_path)
    assert done.returncode == 2, done.stderr
    line = error_line(done)
    assert f"it was at {script}:3" in line
    assert "raise --time-limit" in line


@pytest.mark.slow
def test_a_script_that_hangs_in_c_is_ended_too(tmp_path: Path) -> None:
    # The regular expression backtracks for ever and does not let other threads run.
    script = write(tmp_path, "import re\nre.match('(a*)*$', 'a' * 60 + 'b')\n")
    done = trainfit("simulate", *GPU, "--time-limit", "4", script, cwd=tmp_path)
    assert done.returncode == 2, done.stderr
    assert "no optimizer step after" in error_line(done)
    assert f'File "{script}", line 2' in done.stderr


@pytest.mark.slow
def test_a_script_of_garbage(tmp_path: Path) -> None:
    (tmp_path / "script.py").write_bytes(bytes(range(256)))
    done = trainfit("simulate", *GPU, "script.py", cwd=tmp_path)
    assert done.returncode == 2, done.stderr
    assert "SyntaxError" in error_line(done)


# -- input that is refused before anything runs ------------------------------------------------


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["simulate", *GPU], "no script: write `trainfit simulate SCRIPT.py`"),
        (["simulate", *GPU, "no.py"], "script 'no.py': there is no such file"),
        (["simulate", *GPU, "."], "script '.' is a folder; name the file in it"),
        (["simulate", "--gpu", "RTX 9999", "s.py"], "unknown GPU: 'RTX 9999'"),
        (["simulate", "--gpu", "3060", "s.py"], "ambiguous GPU name: '3060'; try one of:"),
        (["simulate", *GPU, "--output", "no/r", "s.py"], "'no/r': its folder does not exist"),
        (["simulate", *GPU, "--output", ".", "s.py"], "'.' is a folder; name a file in it"),
        (["show", "nothing.json"], "result file 'nothing.json': there is no such file"),
        (["show", "s.py"], "result file 's.py': damaged, or not a result file"),
        (["show", "."], "result file '.': it is a folder; name the file in it"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_bad_input(words: list[str], says: str, tmp_path: Path) -> None:
    write(tmp_path, "open('it-ran', 'w')\n", "s.py")
    if words[0] == "simulate":
        words = ["simulate", "--allow-writes", *words[1:]]
    done = trainfit(*words, cwd=tmp_path)
    assert done.returncode == 2, done.stderr
    assert done.stdout == ""
    assert says in error_line(done)
    assert not (tmp_path / "it-ran").exists()


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["simulate", "--steps", "0", "s.py"], "expected a positive integer, got '0'"),
        (
            ["simulate", "--time-limit", "nan", "s.py"],
            "expected a positive number of seconds, got 'nan'",
        ),
        (["simulate", "--out", "x", "s.py"], "unknown option '--out'; did you mean '--output'?"),
        (["show"], "the following arguments are required: FILE"),
        (["paln"], "unknown command 'paln'; did you mean 'plan'?"),
        ([], "start with:   trainfit plan"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_bad_options(words: list[str], says: str, tmp_path: Path) -> None:
    done = trainfit(*words, cwd=tmp_path)
    assert done.returncode == 2, done.stderr
    assert says in done.stderr
    assert "Traceback" not in done.stderr


def test_a_bad_allocator_setting_is_refused(tmp_path: Path) -> None:
    write(tmp_path, STEPS, "s.py")
    setting = "PYTORCH_CUDA_ALLOC_CONF=split:1"
    done = trainfit("simulate", *GPU, "--", setting, "python", "s.py", cwd=tmp_path)
    assert done.returncode == 2, done.stderr
    assert "unknown allocator setting 'split'" in error_line(done)


def test_without_a_gpu_and_without_a_name(tmp_path: Path) -> None:
    # No NVML library can be found here, whatever the machine has.
    done = trainfit("simulate", write(tmp_path, STEPS), cwd=tmp_path, CUDA_VISIBLE_DEVICES="")
    if done.returncode != 0:
        assert done.returncode == 2, done.stderr
        assert 'name one, as in --gpu "RTX 4090"' in error_line(done)


# -- interrupted -----------------------------------------------------------------------------


@pytest.mark.slow
def test_what_an_interrupted_run_has_is_kept(tmp_path: Path) -> None:
    """`timeout` sends SIGTERM to the process and to its group."""
    write(tmp_path, f"{STEPS}step(); step(); open('two', 'w')\nimport time; time.sleep(600)\n")
    process = subprocess.Popen(
        [sys.executable, "-m", "trainfit", "simulate", *GPU, "--allow-writes", "--json",
         "script.py"],
        cwd=tmp_path, env=environment(), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip
    try:
        while not (tmp_path / "two").exists() and process.poll() is None:
            time.sleep(0.05)
        for _ in range(2):
            process.send_signal(signal.SIGTERM)
            time.sleep(0.1)  # two that wait are one
        out, err = process.communicate(timeout=300)
    finally:
        process.kill()
    assert process.returncode == 143, err
    assert json.loads(out)["steps"] == 2
    assert err.splitlines()[-1] == "trainfit: interrupted"
    assert (tmp_path / "recording.trainfit").is_file()


def test_steps_of_an_optimizer_of_the_scripts_own_are_counted(tmp_path: Path) -> None:
    """fastai's is none of PyTorch's: it ended with "for the 0 simulated steps only"."""
    text = "import torch; model = torch.nn.Linear(64, 64).cuda()\nfor _ in range(20):\n"
    text += "  model(torch.ones(8, 64, device='cuda')).sum().backward()\n  with torch.no_grad():\n"
    text += "    for each in model.parameters():\n      each -= 0.1 * each.grad; each.grad = None\n"
    script = write(tmp_path, text)
    done = trainfit("simulate", *GPU, script, cwd=tmp_path)
    assert done.returncode == 0 and done.stdout.startswith("Fits:"), done.stdout + done.stderr
    assert "0 simulated steps" not in done.stdout and "0 optimizer steps" not in done.stdout


@pytest.mark.parametrize("guard", ["torch.no_grad()", "torch.enable_grad()"])
def test_samples_with_a_graph_are_told(guard: str, tmp_path: Path) -> None:
    """CycleGAN's pictures after the first step made the peak, and nothing said why."""
    text = f"{STEPS}for index in range(9):\n  model.train(); step()\n  if index == 1:\n"
    text += f"    model.eval()\n    with {guard}: model(torch.ones(8, 64, device='cuda'))\n"
    script = write(tmp_path, text)
    done = trainfit("simulate", *GPU, script, cwd=tmp_path)
    told = "The evaluation calls the model with gradients on" in " ".join(done.stdout.split())
    assert done.returncode == 0 and told == ("enable" in guard), done.stdout + done.stderr


def test_a_run_looks_through_no_object_of_an_import(tmp_path: Path) -> None:
    """Half a million: what looks for the script's own, after each run, would cost a second."""
    counts = "import gc\nassert gc.get_freeze_count() > len(gc.get_objects())\n"
    script = write(tmp_path, counts + STEPS + "for _ in range(3): step()\n")
    done = trainfit("simulate", *GPU, "--", "python", script, cwd=tmp_path)
    assert done.returncode == 0, done.stderr


# -- what a later epoch shows ----------------------------------------------------------------


EPOCHS = """
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
data = DataLoader(TensorDataset(torch.randn(64, 8)), 4)
model = nn.Sequential(nn.Linear(8, 8), nn.Dropout(0.1), nn.Linear(8, 1)).cuda()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
model.train()
for epoch in range(9):
    BEGIN
    for x, in data:
        optimizer.zero_grad()
        model(x.cuda()).square().mean().backward()
        optimizer.step()
    model.eval()
    with torch.no_grad():
        for x, in data:
            model(x.cuda())
"""


@pytest.mark.parametrize(("begin", "kinds"), [("pass", ["evaluation_mode"]), ("model.train()", [])])
def test_a_model_that_stays_in_evaluation_mode(
    begin: str, kinds: list[str], tmp_path: Path
) -> None:
    """A run of few steps does not end an epoch: where the source may, a second run looks."""
    write(tmp_path, EPOCHS.replace("BEGIN", begin))
    done = trainfit("simulate", *GPU, "--json", "script.py", cwd=tmp_path)
    assert [each["kind"] for each in json_of(done)["findings"]] == kinds
    assert ("cut short" in done.stderr) is bool(kinds)
