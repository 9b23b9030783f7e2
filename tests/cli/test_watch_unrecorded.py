"""`trainfit watch` where nothing can be recorded, and what it proposes after commands that no other
verb reads."""

from __future__ import annotations

import errno
import os
import sys
from pathlib import Path

import pytest

import trainfit as package
from helpers_cli import trainfit
from helpers_watch import run
from trainfit.cli.verbs.watched.next_command import accepted
from trainfit.watch.judge import judge
from trainfit.watch.recorder import process
from trainfit.watch.run_folder import why_unwritable

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
