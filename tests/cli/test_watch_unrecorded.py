"""`trainfit watch` where nothing can be recorded, and what it proposes after commands that no other
verb reads."""

from __future__ import annotations

import contextlib
import errno
import os
import pty
import subprocess
import sys
from pathlib import Path

import pytest

import trainfit as package
from helpers_cases import some_of
from helpers_cli import environment, trainfit
from helpers_watch import run
from trainfit.cli.main import main
from trainfit.cli.verbs import watch
from trainfit.cli.verbs.watch import accepted
from trainfit.watch.judge import judge
from trainfit.watch.rank_folder import why_unwritable
from trainfit.watch.recorder import process

ENDS_WITH_7 = "import sys; print('ran'); sys.exit(7)"


def test_a_command_runs_where_no_run_can_be_recorded(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    homes = ({"XDG_STATE_HOME": str(tmp_path / "file")}, {"XDG_STATE_HOME": "", "HOME": "file"})
    for home in homes:
        home = {**home, "HOME": str(tmp_path / "file")}
        done = trainfit("watch", "--", sys.executable, "-c", ENDS_WITH_7, cwd=tmp_path, **home)
        assert (done.returncode, done.stdout) == (7, "ran\n")
        (line,) = done.stderr.splitlines()
        assert line.startswith(f"trainfit watch: not recorded: {tmp_path}/file/")
        assert line.endswith(
            "Not a directory; name another folder with --folder DIR or XDG_STATE_HOME"
        )


def test_the_recorder_that_is_switched_off_is_said_to_be(tmp_path: Path) -> None:
    done = trainfit(
        "watch", "--", sys.executable, "-c", ENDS_WITH_7, cwd=tmp_path, TRAINFIT_WATCH="0"
    )  # fmt: skip
    assert (done.returncode, done.stdout) == (7, "ran\n")
    assert done.stderr == (
        "trainfit watch: not recorded: TRAINFIT_WATCH switches the recorder off; unset it\n"
    )


def test_a_run_that_is_lost_does_not_change_the_exit_code(tmp_path: Path) -> None:
    loses = "import os, shutil; shutil.rmtree(os.environ['TRAINFIT_WATCH']); os._exit(4)"
    state = {"XDG_STATE_HOME": str(tmp_path / "state")}
    done = trainfit("watch", "--", sys.executable, "-c", loses, cwd=tmp_path, **state)
    assert done.returncode == 4 and "Traceback" not in done.stderr
    assert len(done.stderr.splitlines()) == 1


def test_a_full_disk_is_found_before_the_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refused(path: Path, _: bytes) -> int:
        path.touch()
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(path))

    assert why_unwritable(tmp_path / "runs" / "one") == ""
    assert not list((tmp_path / "runs" / "one").iterdir())
    monkeypatch.setattr(Path, "write_bytes", refused)
    assert why_unwritable(tmp_path / "two") == f"{tmp_path}/two: No space left on device"
    assert not (tmp_path / "two").exists()


def test_a_script_goes_on_where_it_cannot_be_recorded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "file"))
    # Another test may have run scripts in this process; a run of ours is not recorded.
    monkeypatch.delitem(sys.modules, "trainfit.scripts.execute", raising=False)
    before = dict(os.environ)
    with package.watch() as watching:
        assert watching.folder is None and watching.result() is None
        assert dict(os.environ) == before and not process.is_on()
    (line,) = capsys.readouterr().err.splitlines()
    assert "Not a directory; name another folder: trainfit.watch(FOLDER)" in line
    # Not even where there is no working directory, nor anybody to tell.
    (tmp_path / "gone").mkdir()
    monkeypatch.chdir(tmp_path / "gone")
    (tmp_path / "gone").rmdir()
    monkeypatch.setattr(sys, "stderr", None)
    package.watch("run").stop()
    assert not process.is_on()


@pytest.mark.parametrize(
    ("command", "reason"),
    [
        ("python -c 'import train'", "only code in a file can be planned"),
        ("python -", "only code in a file can be planned"),
        ("python", "no script after python"),
        ("bash train.sh", "runs a shell's script"),
        ("python train.py", ""),
        ("python -u train.py --lr=1e-3", ""),
        ("python elsewhere.py", ""),  # the run was made where that file is
    ],
)
def test_only_what_its_verb_accepts_is_proposed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, command: str, reason: str
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "train.py").touch()
    waits = {"input_s": 0.1, "fetches": {"fetch_s": 0.8, "cpu_s": 0.7}, "queued": 0}
    for verb, slow in (("plan", {}), ("loader", waits)):
        judged = judge(run(header={"command": command}, **slow))
        assert judged.next_command == f"trainfit {verb} -- {command}"
        result = accepted(judged)
        if not reason:
            assert result == judged
            continue
        assert result.next_command == "" and result.findings == judged.findings
        assert result.notes[0].startswith(f"next would be `trainfit {verb}`, which needs")
        assert reason in result.notes[0]


@pytest.mark.parametrize("ends", some_of(["sys.exit(7)", "os.kill(os.getpid(), 9)", ""], 1))
@pytest.mark.parametrize("fault", [KeyError("ours"), KeyboardInterrupt(), BrokenPipeError()])
def test_what_fails_after_the_command_does_not_take_its_exit_code(
    fault: BaseException,
    ends: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    def fails(*_: object) -> None:
        raise fault

    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    monkeypatch.setattr(watch, "judge", fails)
    monkeypatch.setattr(watch.os, "dup2", lambda *_: None)  # pytest reads what we print
    code = main(["watch", "--", sys.executable, "-c", f"import os, sys; print('ran'); {ends}"])
    printed = capfd.readouterr()
    assert printed.out == "ran\n"
    assert code == {"sys.exit(7)": 7, "": 0}.get(ends, 137)
    lines = printed.err.splitlines()
    assert len(lines) == (0 if isinstance(fault, BrokenPipeError) else 1), printed.err
    if isinstance(fault, KeyError):
        assert "internal error: KeyError: 'ours' at " in lines[0]
        (kept,) = (tmp_path / "trainfit" / "errors").iterdir()
        assert lines[0].endswith(f"with {kept}")


def test_a_view_that_fails_leaves_the_command_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    def fails(*_: object) -> None:
        raise KeyError("ours")

    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    monkeypatch.setattr(watch, "LINE_S", 0.0)
    monkeypatch.setattr(watch, "tail_run", fails)
    words = "import sys, time; time.sleep(1); print('to the end'); sys.exit(3)"
    assert main(["watch", "--", sys.executable, "-c", words]) == 3
    printed = capfd.readouterr()
    assert printed.out == "to the end\n"
    assert printed.err.count("internal error: KeyError: 'ours'") == 1


@pytest.mark.slow
def test_a_drawn_view_that_fails_leaves_the_command_its_terminal(tmp_path: Path) -> None:
    """More than a pseudo-terminal holds is printed after the view has failed."""
    program = (
        "import sys\n"
        "from trainfit.cli.verbs import watch\n"
        "from trainfit.cli.main import main\n"
        "watch.DRAWN_S = 0.0\n"
        "watch.live_view = None\n"
        "sys.exit(main(sys.argv[1:]))\n"
    )
    (tmp_path / "ours.py").write_text(program)
    (tmp_path / "train.py").write_text(
        "import sys, time\ntime.sleep(1)\nfor n in range(20000): print('line', n)\nsys.exit(5)\n"
    )
    code, text = _in_a_terminal(
        [sys.executable, "ours.py", "watch", "--", sys.executable, "train.py"], tmp_path
    )
    assert code == 5 and "line 19999" in text, text[-500:]
    assert text.count("internal error: ") == 1


def _in_a_terminal(words: list[str], folder: Path) -> tuple[int, str]:
    """The exit code of a command with a terminal of its own, and what it showed."""
    ours, its = pty.openpty()
    process = subprocess.Popen(
        words, stdin=its, stdout=its, stderr=its, cwd=folder, start_new_session=True,
        env=environment(XDG_STATE_HOME=str(folder), PYTHONUTF8="1"),
    )  # fmt: skip
    os.close(its)
    text = b""
    with contextlib.suppress(OSError):  # nobody has the other end any more
        while data := os.read(ours, 65536):
            text += data
    os.close(ours)
    return process.wait(60), text.decode()
