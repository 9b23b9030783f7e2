"""The end of a protected process: all that Python promises of one, and nothing more."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from helpers_cli import environment
from helpers_sandbox import run_protected
from trainfit.results.runs.script import ProtectionKind, SandboxRequest

#: Handlers run in the opposite order of their registration: what was there before a process was
#: protected tells what became of it.
_TELL = "import atexit, gc; atexit.register(lambda: print('frozen', gc.get_freeze_count() > 0)); "
_KINDS: tuple[ProtectionKind, ...] = ("overlay", "redirection")


def ran(code: str, tmp_path: Path, request: SandboxRequest) -> list[str]:
    """What a protected script prints; the last line says whether it ended soon."""
    (tmp_path / "work").mkdir()
    done = run_protected(code, tmp_path / "work", tmp_path, request, before=_TELL)
    assert done.code == 3, done.output
    assert done.protection is not None
    written = [f"{done.protection.files} files, {done.protection.bytes} bytes"]
    return done.output.splitlines() + written


@pytest.mark.parametrize("kind", _KINDS)
def test_threads_handlers_streams_and_exit_codes_are_those_of_any_end(
    kind: ProtectionKind, tmp_path: Path
) -> None:
    code = """
    import atexit, ctypes, sys, threading
    started = threading.Event()
    def work():
        started.set()
        threading.main_thread().join()
        print("thread")
    atexit.register(print, "handler")
    threading.Thread(target=work).start()
    started.wait()
    ctypes.CDLL(None).puts(b"buffered by C")
    sys.exit(3)
    """
    request = SandboxRequest(kinds=(kind,))
    *printed, written = ran(code, tmp_path, request)
    assert sorted(printed) == ["buffered by C", "frozen True", "handler", "thread"]
    assert printed.index("thread") < printed.index("handler") < printed.index("frozen True")
    assert written == "0 files, 0 bytes"


@pytest.mark.parametrize("kind", _KINDS)
def test_a_file_that_is_not_closed_counts_with_all_that_was_written(
    kind: ProtectionKind, tmp_path: Path
) -> None:
    code = """
    import sys
    log = sys.modules["__main__"].log = open("log.txt", "w")  # as a global of a script
    log.write("not flushed")
    sys.exit(3)
    """
    request = SandboxRequest(kinds=(kind,))
    assert ran(code, tmp_path, request) == ["frozen False", "1 files, 11 bytes"]


@pytest.mark.parametrize("stays", ["allowed", "kept"])
def test_what_stays_is_written_by_an_end_like_any_other(stays: str, tmp_path: Path) -> None:
    kept = str(tmp_path / "kept") if stays == "kept" else ""
    request = SandboxRequest(allow_writes=stays == "allowed", keep=kept)
    assert ran("import sys; sys.exit(3)", tmp_path, request)[0] == "frozen False"


#: Two children that have a child each; the first are in a session of their own.
_LEAVES = """
import subprocess, sys
from pathlib import Path
from trainfit.scripts.sandbox import ending

ending.adopt()
sleeps = "import time; print('.', flush=True); time.sleep(600)"
starts = f"import subprocess, sys; subprocess.run([sys.executable, '-c', {sleeps!r}])"
for alone in (True, False):
    process = subprocess.Popen(
        [sys.executable, "-c", starts], start_new_session=alone, stdout=subprocess.PIPE
    )
    process.stdout.read(1)
if sys.argv[1] == "not listed":
    ending.Path = lambda path: Path("/absent")
print(ending.end_children(), "daemons;", "some" if ending._has_children() else "none", "left")
"""


@pytest.mark.parametrize("kernel", ["listed", "not listed"])
def test_all_descendants_are_ended(kernel: str) -> None:
    """Also where the kernel does not list the children of a process."""
    told = subprocess.run(
        [sys.executable, "-c", _LEAVES, kernel],
        env=environment(),
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert told.stdout == "2 daemons; none left\n", told.stderr
