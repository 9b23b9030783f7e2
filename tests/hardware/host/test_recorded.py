"""The seam to the machine, and machines that were recorded through it."""

from __future__ import annotations

import base64
import errno
import json
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from trainfit.hardware.machine.files import DiskFiles, RecordedFiles, read_rate
from trainfit.hardware.machine.recorded import (
    FORMAT,
    VARIABLES,
    RecordedSystem,
    RecordingSystem,
    read_machine,
    replayed,
)
from trainfit.hardware.machine.system import System
from trainfit.results.files.decoding import decode
from trainfit.results.files.errors import ResultFileError
from trainfit.results.machine import Fact, absent, cannot_tell, known


def document(**parts: Any) -> dict[str, Any]:
    return {"format": FORMAT, "version": 1, "origin": "composed", "provenance": "a test", **parts}


def written(tmp_path: Path, **parts: Any) -> Path:
    path = tmp_path / "machine.json"
    path.write_text(json.dumps(document(**parts)))
    return path


# --- Facts ------------------------------------------------------------------------------------
def test_a_fact_is_known_exactly_if_it_has_a_value() -> None:
    with pytest.raises(ValueError):
        Fact("known", None, "here")
    with pytest.raises(ValueError):
        Fact("absent", 1, "here")


def test_zero_and_false_are_known() -> None:
    assert known(0, "x").is_known and known(False, "x").is_known and known("", "x").is_known


def test_what_cannot_be_understood_says_what_was_there() -> None:
    fact = known("many", "/proc/count").map(int, "a whole number")
    assert fact.state == "cannot_tell" and "'many'" in fact.reason and "whole number" in fact.reason
    missing: Fact[str] = absent("/proc/count", "gone")
    assert missing.map(int, "a whole number") == absent("/proc/count", "gone")


@given(st.one_of(st.integers(), st.none()), st.text(), st.text())
def test_facts_come_back_from_json(value: int | None, source: str, reason: str) -> None:
    for fact in ([known(value, source)] if value is not None else [absent(source, reason)]) + [
        cannot_tell(source, reason)
    ]:
        text = json.dumps(vars(fact))
        assert decode(Fact[int], json.loads(text)) == fact


# --- Files ------------------------------------------------------------------------------------
def test_files_are_read_below_the_root(tmp_path: Path) -> None:
    (tmp_path / "proc").mkdir()
    (tmp_path / "proc/one").write_text(" 1\n")
    (tmp_path / "proc/bytes").write_bytes(b"\xff\xfe")
    system = System(tmp_path, {})
    assert system.text("/proc/one") == known("1", "/proc/one")
    assert system.number("/proc/one").value == 1
    assert system.text("/proc/two").is_absent
    assert system.text("/proc/one/deeper").is_absent
    assert system.text("/proc").state == "cannot_tell"  # a folder
    assert system.text("/proc/bytes").reason == "it is not UTF-8 text"
    assert system.names("/proc").value == ("bytes", "one")
    assert system.names("/sys").is_absent


@pytest.mark.skipif(not Path("/proc/sys/kernel/osrelease").exists(), reason="Linux only")
def test_files_of_the_kernel_that_refuse_large_requests() -> None:
    assert System().text("/proc/sys/kernel/osrelease").value == os.uname().release


def test_a_file_without_end_is_not_read_to_its_end(tmp_path: Path) -> None:
    with (tmp_path / "long").open("wb") as file:
        file.truncate(1 << 30)
    assert "longer than" in System(tmp_path, {}).text("/long").reason


# --- Children ---------------------------------------------------------------------------------
def test_commands() -> None:
    system = System()
    done = system.command(["sh", "-c", "echo out; echo err >&2; exit 3"], 10)
    assert done.value is not None
    assert (done.value.code, done.value.stdout, done.value.stderr) == (3, "out\n", "err\n")
    assert system.command(["no-such-command-here"], 10).is_absent


def test_a_command_that_hangs_is_left_with_its_children() -> None:
    began = time.monotonic()
    done = System().command(["sh", "-c", "trap '' TERM; sleep 600 & wait"], 0.3)
    assert done.state == "cannot_tell" and done.reason.startswith("no answer within 300 ms")
    assert time.monotonic() - began < 60  # not the 600 s of what it started


def test_a_probe_that_crashes_says_how(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("trainfit.hardware.machine.system.PROBES", tmp_path)
    (tmp_path / "good.py").write_text("print('noise'); print('{\"a\": 1}')")
    (tmp_path / "dies.py").write_text("import os, signal; os.kill(os.getpid(), signal.SIGSEGV)")
    (tmp_path / "raises.py").write_text("raise RuntimeError('no driver')")
    (tmp_path / "text.py").write_text("print('hello')")
    system = System()
    assert system.probe("good", 30).value == {"a": 1}
    assert "signal 11" in system.probe("dies", 30).reason
    assert "RuntimeError: no driver" in system.probe("raises", 30).reason
    assert "hello" in system.probe("text", 30).reason


# --- Read rates -------------------------------------------------------------------------------
def test_a_read_rate_is_bytes_by_time(tmp_path: Path) -> None:
    path = tmp_path / "data.bin"
    path.write_bytes(os.urandom(1 << 20) * 12)
    ticks = iter(range(10_000))
    fact = read_rate(str(path), 1e9, clock=lambda: float(next(ticks)))
    if not fact.is_known:  # a file system that knows no O_DIRECT
        assert fact.reason
        return
    assert fact.value is not None
    past_cache, cached = fact.value
    # 12 MiB in 3 reads, and every look at the clock is a second.
    assert past_cache == cached
    assert past_cache == pytest.approx((12 << 20) / 5)


def test_a_small_file_has_no_read_rate(tmp_path: Path) -> None:
    path = tmp_path / "data.bin"
    path.write_bytes(b"x" * 5000)
    fact = read_rate(str(path), 1.0)
    assert fact.state == "cannot_tell"
    assert read_rate(str(tmp_path / "missing"), 1.0).state == "cannot_tell"


# --- Recorded machines ------------------------------------------------------------------------
def test_ranges_stand_for_many_files(tmp_path: Path) -> None:
    files = {"/cpu{0-2}/governor": "powersave", "/cpu{0-2}/id": ["0", "0", "1"]}
    system = replayed(written(tmp_path, files=files))
    assert [system.text(f"/cpu{n}/governor").value for n in range(3)] == ["powersave"] * 3
    assert [system.number(f"/cpu{n}/id").value for n in range(3)] == [0, 0, 1]


def test_unreadable_files_and_links(tmp_path: Path) -> None:
    files = {
        "/a": {"error": "EACCES"},
        "/b": {"base64": base64.b64encode(b"\xff").decode()},
        "/devices/one/vendor": "0x10de",
        "/bus/one": {"link": "../devices/one"},
        "/etc/os": {"link": "/usr/os"},
        "/usr/os": "Debian",
        "/empty": {"folder": True},
    }
    system = replayed(written(tmp_path, files=files))
    assert system.text("/a") == cannot_tell("/a", os.strerror(errno.EACCES))
    assert system.text("/b").reason == "it is not UTF-8 text"
    assert system.text("/bus/one/vendor").value == "0x10de"
    assert system.link("/bus/one").value == "../devices/one"
    # An absolute link stays inside the recorded machine.
    assert system.text("/etc/os").value == "Debian"
    assert system.link("/etc/os").value == "/usr/os"
    assert system.names("/empty").value == ()


@pytest.mark.parametrize(
    "files",
    [
        {"/../escape": "x"},
        {"relative": "x"},
        {"/x": 1},
        {"/x{0-99999}": "x"},
        {"/x{0-2}": ["one"]},
        {"/x": {"what": 1}},
        {"/x": {"base64": "???"}},
    ],
)
def test_a_recording_of_what_is_no_file_is_refused(files: dict[str, Any], tmp_path: Path) -> None:
    with pytest.raises(ResultFileError, match="damaged"):
        replayed(written(tmp_path, files=files))


@pytest.mark.parametrize(
    "text", ["", "[]", "{}", '{"format": "trainfit-machine"}', "\x00", "[" * 100_000]
)
def test_what_is_no_recording_is_refused(text: str, tmp_path: Path) -> None:
    path = tmp_path / "machine.json"
    path.write_text(text)
    with pytest.raises(ResultFileError):
        read_machine(path)


def test_answers_that_were_not_recorded_are_no_answers() -> None:
    system = RecordedSystem(document(commands={"slow": {"hangs": True}}))
    assert system.command(["ls"], 1).is_absent
    assert system.command(["slow"], 1).reason == "no answer within 1 s"
    assert system.probe("nvml_gpus", 1).state == "cannot_tell"
    assert system.affinity().state == "cannot_tell"
    assert system.bad_fork().is_absent


def test_this_machine_replays_as_it_was(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "3")
    monkeypatch.setenv("SOME_TOKEN", "secret")
    recorder = RecordingSystem()
    asked = [
        lambda s: s.text("/proc/meminfo").map(lambda text: text.split()[1], "a size"),
        lambda s: s.names("/sys/devices/system/cpu"),
        lambda s: s.text("/no/such/file"),
        lambda s: s.affinity(),
        lambda s: s.limit("NOFILE"),
        lambda s: s.system_name(),
        lambda s: s.command(["uname", "-s"], 10),
        lambda s: s.exists("/proc/self"),
        lambda s: s.packages(),
        lambda s: s.environment.get("OMP_NUM_THREADS"),
    ]
    lived = [question(recorder) for question in asked]
    text = json.dumps(recorder.document())
    assert "secret" not in text and set(recorder.environment) <= set(VARIABLES)
    path = tmp_path / "machine.json"
    path.write_text(text)
    assert [question(replayed(path)) for question in asked] == lived


def test_a_recording_tells_unread_from_empty(tmp_path: Path) -> None:
    (tmp_path / "empty").write_text("")
    (tmp_path / "full").write_text("text")
    (tmp_path / "to").symlink_to("full")
    recorder = RecordingSystem()
    recorder.names(str(tmp_path))
    for name in ("empty", "to"):
        recorder.text(str(tmp_path / name))
    recorder.link(str(tmp_path / "to"))
    replay = RecordedSystem(json.loads(json.dumps(recorder.document())))
    assert replay.names(str(tmp_path)).value == ("empty", "full", "to")
    assert replay.text(str(tmp_path / "empty")).value == ""
    assert replay.text(str(tmp_path / "to")).value == "text"
    assert replay.link(str(tmp_path / "to")).value == "full"
    unread = RecordedSystem({"files": {"/x": {"error": "ENODATA"}}})
    assert unread.text("/x").state == "cannot_tell" and unread.exists("/x")


def test_a_recorder_starts_children_with_the_whole_environment(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("SOME_TOKEN", "value")
    done = RecordingSystem().command(
        [sys.executable, "-c", "import os; print(os.environ['SOME_TOKEN'])"], 30
    )
    assert done.value is not None and done.value.stdout.strip() == "value"


def test_recorded_files_fail_as_the_disk_does(tmp_path: Path) -> None:
    """The same tree on the disk and in memory, asked the same."""
    tree = {
        "/a/b": "text",
        "/a/empty": {"folder": True},
        "/up": {"link": "a/../a/b"},
        "/absolute": {"link": "/a"},
        "/dangling": {"link": "nowhere"},
        "/one": {"link": "two"},
        "/two": {"link": "one"},
    }
    for path, content in tree.items():
        place = tmp_path / path.lstrip("/")
        place.parent.mkdir(parents=True, exist_ok=True)
        if isinstance(content, str):
            place.write_text(content)
        elif "folder" in content:
            place.mkdir()
        else:
            target = content["link"]
            place.symlink_to(tmp_path / target[1:] if target.startswith("/") else target)
    disk, memory = DiskFiles(tmp_path), RecordedFiles(tree)

    def answer(call: Callable[[], Any]) -> Any:
        try:
            found = call()
        except OSError as error:
            return error.errno
        return sorted(found) if isinstance(found, list) else found

    paths = ["/", "/a", "/a/b", "/a/b/c", "/a/none", "/a/empty", "/up", "/absolute/b", "/absolute",
             "/dangling", "/one", "/a/../a/b", "//a//b", "/absolute/../a/b"]  # fmt: skip
    for path in paths:
        for name in ("names", "exists"):
            ask = [lambda f=files: getattr(f, name)(path) for files in (disk, memory)]  # noqa: B023
            assert answer(ask[0]) == answer(ask[1]), (name, path)
        read = [lambda f=files: f.read(path, 3) for files in (disk, memory)]  # noqa: B023
        assert answer(read[0]) == answer(read[1]), ("read", path)
    assert memory.link("/absolute") == "/a" and memory.link("/up") == disk.link("/up")
    assert answer(lambda: memory.link("/a/b")) == answer(lambda: disk.link("/a/b"))
    assert answer(lambda: memory.link("/none")) == answer(lambda: disk.link("/none"))
