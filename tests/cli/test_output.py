"""`--output`: through links and into devices, and never in place of a file of the user's."""

from __future__ import annotations

import errno
import os
import shutil
import stat
import threading
from pathlib import Path

import pytest

from helpers_cli import ROOT
from helpers_page import FILES, RESULTS
from trainfit.cli.common import UsageError
from trainfit.cli.main import main
from trainfit.cli.output import output_file
from trainfit.results.files.documents import read, save
from trainfit.results.files.errors import ResultFileError
from trainfit.results.files.writing import is_result, write_file
from trainfit.results.kinds import read as read_result

#: A command of each verb that writes a result, up to the file's name.
COMMANDS = {
    "plan": ("plan", "--gpu", "T4", "--output", "FILE", "--", "python", "FILE"),
    "simulate": ("simulate", "--gpu", "T4", "--output", "FILE", "FILE"),
    "loader": ("loader", "--step-time", "1s", "--output", "FILE", "--", "python", "FILE"),
    "rehearse": ("rehearse", "--step-time", "1s", "--output", "FILE", "--", "python", "FILE"),
    "watch": ("watch", "--output", "FILE", "--", "python", "FILE"),
    "compare": ("compare", "a", "b", "--output", "FILE"),
    "batch": ("batch", "explain", "--noise-scale", "200", "--to", "16", "--output", "FILE"),
    "pace": ("pace", "FILE:act", "--hz", "30", "--output", "FILE"),
    "doctor": ("doctor", "--output", "FILE"),
    "doctor --record": ("doctor", "--record", "FILE"),
    "calibrate": ("calibrate", "--output", "FILE", "--rehearse", "T4"),
    "verify": ("verify", str(RESULTS / "plan-v1.json"), "--output", "FILE"),
    "gpus": ("gpus", "T4", "--output", "FILE"),
    "report": ("report", str(RESULTS / "gpus-v1.json"), "-o", "FILE", "--format", "md"),
}


@pytest.mark.parametrize("verb", COMMANDS)
def test_a_file_of_the_users_is_never_replaced(
    verb: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    script = tmp_path / "train.py"
    script.write_text("print('hello')\n")
    words = [word.replace("FILE", "train.py") for word in COMMANDS[verb]]
    assert main(words) == 2
    assert capsys.readouterr().err == (
        "trainfit: error: output file 'train.py' exists and is not a result of trainfit; name "
        "another, or delete it first\n"
    )
    assert script.read_text() == "print('hello')\n"
    assert list(tmp_path.iterdir()) == [script]


def test_results_and_reports_of_every_form_are_recognised(tmp_path: Path) -> None:
    for name in FILES:
        assert is_result(RESULTS / name), name
    for form in ("html", "md", "json", "svg", "trace.json"):
        path = tmp_path / f"plan.{form}"
        for _ in range(2):  # the second time in place of the first
            assert main(["report", str(RESULTS / "plan-v1.json"), "-o", str(path)]) == 0
        assert is_result(path), form
    assert main(["doctor", "--cpu", "--record", str(tmp_path / "machine.json")]) == 0
    assert is_result(tmp_path / "machine.json")
    for name in ("README.md", "pyproject.toml", "docs/guide/report.md", "docs/schema/make.py"):
        assert not is_result(ROOT / name), name
    shutil.make_archive(str(tmp_path / "mine"), "zip", ROOT / "docs" / "guide")
    assert not is_result(tmp_path / "mine.zip")


def test_an_input_is_not_replaced(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    plan = tmp_path / "plan.json"
    shutil.copy(RESULTS / "plan-v1.json", plan)
    before = plan.read_bytes()
    (tmp_path / "link.json").symlink_to(plan)
    for words in (
        ("gpus", "--for", plan, "--output", tmp_path / "link.json"),
        ("verify", plan, "--output", plan),
        ("report", plan, "-o", plan),
    ):
        assert main([str(word) for word in words]) == 2
        assert "is one of the inputs; name another" in capsys.readouterr().err
    assert plan.read_bytes() == before


@pytest.mark.skipif(os.geteuid() != 0, reason="only root makes devices")
def test_a_device_stays_a_device(tmp_path: Path) -> None:
    device = tmp_path / "null"
    try:
        os.mknod(device, stat.S_IFCHR | 0o666, os.makedev(1, 3))
        device.write_bytes(b"")
    except OSError as error:
        pytest.skip(f"no devices here: {error}")
    assert main(["gpus", "T4", "--output", str(device)]) == 0
    assert stat.S_ISCHR(device.stat().st_mode)
    assert list(tmp_path.iterdir()) == [device]


def test_a_pipe_is_written_to(tmp_path: Path) -> None:
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    found: list[bytes] = []
    reader = threading.Thread(target=lambda: found.append(pipe.read_bytes()))
    reader.start()
    save(output_file(str(pipe)), '{"format": "trainfit-gpus"}')
    reader.join()
    assert found == [b'{"format": "trainfit-gpus"}\n']
    assert stat.S_ISFIFO(pipe.stat().st_mode)


def test_links_are_followed_and_modes_kept(tmp_path: Path) -> None:
    (tmp_path / "results").mkdir()
    target, link = tmp_path / "results" / "1.json", tmp_path / "latest.json"
    link.symlink_to(Path("results") / "1.json")
    write_file(output_file(str(link)), b'{"format": "trainfit-x"}')  # there is no target yet
    target.chmod(0o640)
    write_file(output_file(str(link)), b'{"format": "trainfit-y"}')
    assert link.is_symlink() and target.read_bytes() == b'{"format": "trainfit-y"}'
    assert stat.S_IMODE(target.stat().st_mode) == 0o640
    assert [each.name for each in (tmp_path / "results").iterdir()] == ["1.json"]


def test_an_empty_file_may_be_written_to(tmp_path: Path) -> None:
    path = tmp_path / "new.json"
    path.touch()
    assert output_file(str(path)) == path


@pytest.mark.parametrize("error", [KeyboardInterrupt(), OSError(errno.ENOSPC, "no space left")])
def test_what_fails_leaves_the_former_file(
    error: BaseException, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "a.json"
    path.write_bytes(b"former")

    def full(self: Path, mode: str) -> None:
        raise error

    monkeypatch.setattr(Path, "replace", full)
    with pytest.raises(type(error)) as raised:
        write_file(path, b"new")
    assert getattr(raised.value, "filename", str(path)) == str(path)
    assert path.read_bytes() == b"former" and list(tmp_path.iterdir()) == [path]


def test_a_hyphen_is_no_name() -> None:
    with pytest.raises(UsageError, match="give --json for standard output"):
        output_file("-")


def test_a_large_file_is_refused_unread(tmp_path: Path) -> None:
    path = tmp_path / "weights.json"
    with path.open("wb") as stream:
        stream.truncate(3 << 30)  # sparse: no disk is used
    with pytest.raises(ResultFileError, match=r"not a result of trainfit \(3.00 GiB\)"):
        read_result(path)
    with path.open("r+b") as stream:
        stream.write(b'{"format": "trainfit-plan"')
    with pytest.raises(ResultFileError, match=r"3.00 GiB, and no result is larger than 1.00 GiB"):
        read(path, "re-create it")
