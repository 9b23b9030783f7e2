"""A command that is recorded from outside: it is what it was, and its run can be read."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from helpers_warm import OUR_PATH
from helpers_watch import watch_screen
from trainfit.hardware.machine.cgroup import OomKills
from trainfit.results.runs.watched import exit_words, load_run
from trainfit.watch import launch
from trainfit.watch.judge import judge
from trainfit.watch.launch import WatchedCommand, WatchError, injected
from trainfit.watch.recorder import process

SCRIPT = Path(__file__).parent / "scripts" / "watched.py"
LOOPS = Path(__file__).parent / "training_scripts" / "accumulating.py"
SOURCE = Path(__file__).resolve().parents[1] / "src"
#: Runs a command recorded, in a process of its own: the launcher's signals and streams are its.
LAUNCH = """
import sys
from pathlib import Path
from trainfit.watch.launch import WatchedCommand
with WatchedCommand(sys.argv[2:], Path(sys.argv[1])) as watched:
    sys.exit(watched.wait())
"""


def run_watched(command: list[str], folder: Path) -> int:
    with WatchedCommand(command, folder) as watched:
        return watched.wait()


def environment(**changed: str) -> dict[str, str]:
    return {**os.environ, "PYTHONPATH": OUR_PATH, **changed}


def watched(
    folder: Path, *words: str, python: tuple[str, ...] = (), **changed: str
) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-c", LAUNCH, str(folder), sys.executable, *python, *words]
    return subprocess.run(
        command, env=environment(**changed), capture_output=True, text=True, timeout=300
    )


def alone(*words: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, *words], env=environment(), capture_output=True, text=True, timeout=300
    )


@pytest.mark.slow
@pytest.mark.parametrize(("workers", "method"), [("0", ()), ("2", ()), ("1", ("--method=spawn",))])
def test_losses_and_random_numbers_are_the_same_to_the_last_bit(
    tmp_path: Path, workers: str, method: tuple[str, ...]
) -> None:
    words = [str(SCRIPT), f"--workers={workers}", *method]
    found, expected = watched(tmp_path, *words), alone(*words)
    assert (found.stdout, found.stderr, found.returncode) == (expected.stdout, "", 0)
    run = load_run(tmp_path)
    (rank,) = run.ranks
    assert len(rank.steps) == 12 and rank.header.ending == "finished"
    assert rank.header.exit_code == 0 and rank.header.command.endswith(" ".join(words))
    lines = found.stdout.splitlines()[:12]
    losses = [float.fromhex(line) for line in lines]
    np.testing.assert_allclose(rank.steps["loss"], losses, rtol=1e-6)
    assert len(rank.fetches) == 12
    assert (rank.fetches["samples"] == 8).all() and (rank.fetches["collate_s"] > 0).all()
    numbers = {int(each) for each in rank.fetches["worker"]}
    assert numbers == (set(range(int(workers))) or {-1})
    if workers != "0":
        assert rank.header.worker_threads["torch"] == 1
        assert rank.header.loaders[0].start_method == ("spawn" if method else "fork")


def test_a_traceback_and_an_exit_code_pass_through(tmp_path: Path) -> None:
    words = [str(SCRIPT), "--epochs=1", "--end=raise"]
    found, expected = watched(tmp_path, *words), alone(*words)
    assert (found.returncode, found.stderr) == (1, expected.stderr)
    (rank,) = load_run(tmp_path).ranks
    assert (rank.header.ending, rank.header.exit_code) == ("failed", 1)
    assert "the user's own" in rank.events[-1].text and rank.events[-1].kind == "exception"
    assert "trainfit" not in rank.events[-1].text


def test_a_failing_import_of_torch_has_the_traceback_that_it_has_alone(tmp_path: Path) -> None:
    (tmp_path / "torch.py").write_text("raise KeyboardInterrupt")
    (tmp_path / "train.py").write_text("import torch")
    found = watched(tmp_path / "run", str(tmp_path / "train.py"))
    assert found.stderr == alone(str(tmp_path / "train.py")).stderr


# The test above, of the exit code after a traceback, and watch/test_unseen.py's 5.
@pytest.mark.slow
def test_sys_exit(tmp_path: Path) -> None:
    assert watched(tmp_path, str(SCRIPT), "--epochs=1", "--end=exit").returncode == 7
    header = load_run(tmp_path).header
    assert (header.ending, header.exit_code) == ("failed", 7)


def test_a_kill_keeps_the_steps(tmp_path: Path) -> None:
    assert watched(tmp_path, str(SCRIPT), "--epochs=1", "--end=kill").returncode == 137
    run = load_run(tmp_path)
    assert (run.header.ending, run.header.exit_code) == ("interrupted", -9)
    assert len(run.ranks[0].steps) == 6


@pytest.mark.parametrize(("kills", "said"), [(0, False), (1, True)])
def test_a_kill_is_named_and_the_oom_killer_where_the_kernel_counts_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kills: int, said: bool
) -> None:
    counts = [OomKills(0, 5), OomKills(kills, 5 + kills)]
    monkeypatch.setattr(launch, "oom_kills", lambda: counts.pop(0))
    assert (
        run_watched([sys.executable, "-c", "import os; os.kill(os.getpid(), 9)"], tmp_path) == 137
    )
    result = judge(load_run(tmp_path))
    text = " ".join(line.text for line in watch_screen(result))
    assert "The run was ended by SIGKILL." in text and "exit code" not in text
    assert ("ended 1 process of this cgroup" in text) is said
    assert ("`kill -9`" in text) is not said


@pytest.mark.parametrize(
    ("code", "words"),
    [
        (3, "with exit code 3"),
        (-11, "by SIGSEGV"),
        (137, "with exit code 137 (SIGKILL)"),
        (-60, "by signal 60"),
        (255, "with exit code 255"),
    ],
)
def test_how_a_process_ended(code: int, words: str) -> None:
    assert exit_words(code) == words


def test_a_command_that_never_trains_has_a_header(tmp_path: Path) -> None:
    assert run_watched([sys.executable, "-c", "import sys; sys.exit(3)"], tmp_path) == 3
    header = load_run(tmp_path).header
    assert (header.ending, header.exit_code) == ("failed", 3)
    assert header.notes == ("the command ended before its first training step",)


def test_the_switch(tmp_path: Path) -> None:
    # A command that never trains has a header otherwise, as the test above holds.
    found = watched(tmp_path, "-c", "pass", TRAINFIT_WATCH="0")
    assert found.returncode == 0 and not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    "number",
    # A signal that the script does not see: the test of a kill.
    [pytest.param(signal.SIGTERM, marks=pytest.mark.slow), signal.SIGINT],
)
def test_signals_reach_the_command(tmp_path: Path, number: signal.Signals) -> None:
    words = [sys.executable, str(SCRIPT), "--epochs=1", "--end=sleep"]
    command = [sys.executable, "-c", LAUNCH, str(tmp_path), *words]
    with subprocess.Popen(
        command, env=environment(), stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, text=True,
        stderr=subprocess.DEVNULL, start_new_session=True,
        # Where tests run in the background it may be ignored.
    ) as process:  # fmt: skip
        assert process.stdout is not None
        for line in process.stdout:
            if line == "ready\n":
                break
        process.send_signal(number)
        assert process.wait(60) in (130, 143)
    header = load_run(tmp_path).header
    assert header.ending == "interrupted" and len(load_run(tmp_path).ranks[0].steps) == 6


def test_a_command_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(WatchError, match=r"'no-such-program': No such file .*; check"):
        WatchedCommand(["no-such-program"], tmp_path)


def test_polling(tmp_path: Path) -> None:
    with WatchedCommand([sys.executable, "-c", "input()"], tmp_path) as command:
        command.send_signal(signal.SIGKILL)
        assert command.wait() == 137 == command.poll()


@pytest.mark.slow
def test_a_folder_that_cannot_be_written_to_leaves_the_training_alone(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    code = f"import os; os.rmdir({str(folder)!r}); open({str(folder)!r}, 'w').close()\n"
    script = tmp_path / "script.py"
    script.write_text(code + SCRIPT.read_text().replace("import argparse", "import argparse", 1))
    found = watched(folder, str(script), "--epochs=1")
    assert found.returncode == 0 and len(found.stdout.splitlines()) == 7
    assert f"trainfit watch: not recorded: {folder}" in found.stderr


def test_the_users_own_sitecustomize_runs_too(tmp_path: Path) -> None:
    (tmp_path / "sitecustomize.py").write_text("import os\nos.environ['MINE'] = 'ran'\n")
    code = "import os, sitecustomize; print(os.environ['MINE'], sitecustomize.__file__)"
    changed = {**os.environ, "PYTHONPATH": f"{tmp_path}{os.pathsep}{SOURCE}"}
    given = injected(tmp_path, "x", changed, (0.0, 0.0))
    found = subprocess.run(
        [sys.executable, "-c", code], env=given, capture_output=True, text=True, check=True
    )
    assert found.stdout.split() == ["ran", str(tmp_path / "sitecustomize.py")]


def test_nothing_heavy_is_imported_before_the_user_does(tmp_path: Path) -> None:
    code = (
        "import sys; heavy = ('torch', 'numpy', 'trainfit.simgpu.session', 'rich', 'psutil'); "
        "print([each for each in heavy if each in sys.modules], "
        "'trainfit.watch.recorder.process' in sys.modules)"
    )
    given = injected(tmp_path, "x", environment(), (0.0, 0.0))
    found = subprocess.run(
        [sys.executable, "-c", code], env=given, capture_output=True, text=True, check=True
    )
    assert found.stdout == "[] True\n"
    code = (
        "import sys, torch; simulator = [each for each in sys.modules "
        "if each.startswith(('trainfit.simgpu.session', 'trainfit.simgpu.device.engine', "
        "'trainfit.simgpu.device.tensor', "
        "'trainfit.loader', 'torch._dynamo'))]; print(simulator)"
    )
    found = subprocess.run(
        [sys.executable, "-c", code], env=given, capture_output=True, text=True, check=True
    )
    assert found.stdout == "[]\n"


def test_a_python_without_trainfit_records_too(tmp_path: Path) -> None:
    """It is loaded from where it lies, and sys.path does not change."""
    given = injected(tmp_path, "x", {**os.environ, "PYTHONPATH": ""}, (0.0, 0.0))
    code = (
        "import sys; print('trainfit.watch.recorder.process' in sys.modules, "
        f"{str(SOURCE)!r} in sys.path)"
    )
    found = subprocess.run(
        [sys.executable, "-S", "-c", "import sys; sys.path.insert(0, "
         f"{given['PYTHONPATH'].split(os.pathsep)[0]!r}); import sitecustomize; {code}"],
        env=given, capture_output=True, text=True, check=True,
    )  # fmt: skip
    assert found.stdout == "True False\n"


@pytest.mark.slow
def test_ranks_have_files_of_their_own(tmp_path: Path) -> None:
    script = tmp_path / "ranks.py"
    script.write_text(
        "import os, torch\n"
        "import torch.distributed as dist\n"
        "from torch.nn.parallel import DistributedDataParallel\n"
        "dist.init_process_group('gloo')\n"
        "model = DistributedDataParallel(torch.nn.Linear(4, 2))\n"
        "optimizer = torch.optim.SGD(model.parameters(), 0.1)\n"
        "for _ in range(5):\n"
        "    model(torch.randn(3, 4)).sum().backward()\n"
        "    optimizer.step()\n"
        "dist.barrier()\n"
        "dist.destroy_process_group()\n"
        "if int(os.environ['RANK']) == 1:\n"
        "    raise SystemExit(5)\n"
    )
    torchrun = ("-m", "torch.distributed.run", "--nproc_per_node=2", "--standalone")
    found = watched(tmp_path / "run", str(script), python=torchrun)
    assert found.returncode != 0
    first, second = load_run(tmp_path / "run").ranks
    assert (first.header.rank, second.header.rank, first.header.world_size) == (0, 1, 2)
    assert len(first.steps) == len(second.steps) == 5
    assert first.header.distributed == "ddp"
    assert first.header.started_monotonic == second.header.started_monotonic


@pytest.mark.slow
@pytest.mark.parametrize(
    ("loop", "library"), [("accelerated", "Accelerate"), ("trainer", "Transformers")]
)
def test_loops_of_libraries(tmp_path: Path, loop: str, library: str) -> None:
    if loop == "trainer":
        try:
            import torchvision  # noqa: F401  # Transformers imports it where it is installed
        except ImportError:
            pass
        except RuntimeError as error:
            pytest.skip(f"the installed torchvision is of another PyTorch: {error}")
    words = [str(LOOPS), f"--loop={loop}", "--accumulate=2", "--samples=64"]
    found = watched(tmp_path, *words)
    assert found.returncode == 0, found.stderr
    (rank,) = load_run(tmp_path).ranks
    assert rank.header.framework == library
    # Accelerate fetches a batch ahead.
    assert set(rank.steps["samples"][1:-1]) == {16} and int(rank.steps["samples"].sum()) == 64
    assert (rank.steps["forward_s"] > 0).all() and (rank.steps["backward_s"] > 0).all()


@pytest.mark.slow
def test_two_trainings_of_one_command_are_two_runs(tmp_path: Path) -> None:
    code = (
        "import subprocess, sys\n"
        f"for _ in range(2): subprocess.run([sys.executable, {str(SCRIPT)!r}, '--epochs=1'])\n"
    )
    assert watched(tmp_path, "-c", code).returncode == 0
    assert len(load_run(tmp_path).ranks[0].steps) == 6
    (other,) = tmp_path.glob("also-*")
    assert len(load_run(other).ranks[0].steps) == 6


@pytest.mark.slow
def test_in_a_script(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(
        f"import trainfit\nrun = trainfit.watch({str(tmp_path / 'run')!r})\n"
        + SCRIPT.read_text().replace("    end(OPTIONS.end)", "    run.stop()\n    run.stop()")
    )
    found = alone(str(script), "--workers=1", "--epochs=1")
    assert found.returncode == 0, found.stderr
    assert f"trainfit watch: recorded in {tmp_path / 'run'}" in found.stderr
    (rank,) = load_run(tmp_path / "run").ranks
    assert len(rank.steps) == 6 and len(rank.fetches) == 6


NOTEBOOK = """import sys, trainfit
sys.argv[0] = {argv!r}
run = trainfit.watch({folder!r})
import torch
model = torch.nn.Linear(4, 1)
optimizer = torch.optim.SGD(model.parameters(), 0.01)
for batch in torch.utils.data.DataLoader(torch.ones(400, 4), batch_size=2):
    optimizer.zero_grad(); model(batch).sum().backward(); optimizer.step()

run.stop()
result = run.result()
print(result.steps, repr(result.next_command), (result._repr_html_() or "")[:40])
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    "argv", [pytest.param("", marks=pytest.mark.slow), "/somewhere/ipykernel_launcher.py"]
)
def test_in_a_notebook_the_result_is_at_hand(tmp_path: Path, argv: str) -> None:
    code = NOTEBOOK.format(argv=argv, folder=str(tmp_path / "run"))
    found = alone("-i", "-c", code)
    assert found.returncode == 0, found.stderr
    assert load_run(tmp_path / "run").header.command == ""
    steps, command, page = found.stdout.split(maxsplit=2)
    assert int(steps) > 100 and command == "''"
    assert page.startswith("<iframe")


def test_the_switch_in_a_script(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    import trainfit

    monkeypatch.setenv("TRAINFIT_WATCH", "0")
    with trainfit.watch(tmp_path / "run") as run:
        assert run.folder is None and not process.is_on()
        assert run.result() is None
    assert not (tmp_path / "run").exists()
