"""Runs Python code in a sandbox and compares the files before and after."""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import os
import subprocess
import sys
import tempfile
import textwrap
from collections.abc import Sequence
from pathlib import Path

from helpers_cli import environment
from trainfit.results.runs.script import Protection, SandboxRequest

_RUN = (
    "import sys; from pathlib import Path; from trainfit.scripts import sandbox; "
    "sandbox.begin(Path(sys.argv[1])); "
    "code = compile(open(sys.argv[2]).read(), sys.argv[2], 'exec'); "
    "exec(code, {'__name__': '__main__'})"
)


@dataclasses.dataclass(frozen=True)
class Ran:
    """One run: its exit code, all that it printed, and what its keeper told."""

    code: int
    output: str
    protection: Protection | None


def run_protected(
    code: str,
    cwd: Path,
    scratch: Path,
    request: SandboxRequest,
    prefix: Sequence[str] = (),
    before: str = "",
    **more: str,
) -> Ran:
    """Run ``code`` as a script in ``cwd``; ``scratch`` gets the run's folder and the code,
    ``more`` are variables of its environment. ``prefix`` are words before the interpreter,
    ``before`` is what its process does before it is protected."""
    folder = scratch / "run"
    folder.mkdir(parents=True)
    # Sockets are made in it, whose paths may have 108 bytes.
    temporary = Path(tempfile.mkdtemp(prefix="s-", dir="/tmp"))
    request.save(folder)
    script = scratch / "code.py"
    script.write_text(textwrap.dedent(code))
    done = subprocess.run(
        [*prefix, sys.executable, "-c", before + _RUN, str(folder), str(script)],
        cwd=cwd,
        env=environment(TMPDIR=str(temporary), **more),
        capture_output=True,
        stdin=subprocess.DEVNULL,
        text=True,
        timeout=300,
    )
    assert not list(temporary.glob("trainfit-layer-*")), "a layer was left"
    with contextlib.suppress(OSError):  # not ours, or mounted
        temporary.rmdir()
    return Ran(done.returncode, done.stdout + done.stderr, Protection.load(folder))


def tree(folder: Path) -> dict[str, tuple[object, ...]]:
    """Everything below ``folder``: kind and mode, owner, time of the last change, content."""
    found: dict[str, tuple[object, ...]] = {}
    for parent, names, files in os.walk(folder):
        for name in (*names, *files, "."):
            path = Path(parent, name)
            status = path.lstat()
            content = ""
            if path.is_symlink():
                content = os.readlink(path)
            elif path.is_file():
                content = hashlib.sha256(path.read_bytes()).hexdigest()
            found[str(path.relative_to(folder))] = (
                *(oct(status.st_mode), status.st_uid, status.st_gid, status.st_nlink),
                *(status.st_mtime_ns, content),
            )
    return found
