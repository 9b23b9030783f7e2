"""The fork that a protected run begins with: its signals, and what is left of it."""

from __future__ import annotations

import signal
import subprocess
import sys
import textwrap
from pathlib import Path

from helpers_cli import environment
from trainfit.results.runs.script import Protection, SandboxRequest

_BEGIN = """
    import os, signal, sys, time
    from pathlib import Path
    from trainfit.scripts import sandbox
    from trainfit.scripts.sandbox import overlay
    from trainfit.scripts.sandbox.layer import UnavailableError
    from trainfit.scripts.sandbox.layer import Layer
    {before}
    sandbox.begin(Path(sys.argv[1]))
    {after}
"""


def _run(before: str, after: str, folder: Path) -> subprocess.CompletedProcess[str]:
    """A process that protects itself between the two; layers go to ``folder``/layers."""
    SandboxRequest(kinds=("overlay", "redirection")).save(folder)
    (folder / "layers").mkdir()
    indent = " " * 4
    code = _BEGIN.format(
        before=textwrap.indent(textwrap.dedent(before), indent).strip(),
        after=textwrap.indent(textwrap.dedent(after), indent).strip(),
    )
    return subprocess.run(
        [sys.executable, "-c", textwrap.dedent(code), str(folder)],
        env=environment(TMPDIR=str(folder / "layers")),
        capture_output=True,
        text=True,
        timeout=300,
    )


def test_signals_reach_a_script_whose_first_protection_was_not_available(tmp_path: Path) -> None:
    before = """
    def enter(*words):
        raise UnavailableError("none here")
    overlay.enter = enter
    """
    after = """
    assert not signal.pthread_sigmask(signal.SIG_BLOCK, ()), "blocked"
    """
    done = _run(before, after, tmp_path)
    assert done.returncode == 0, done.stderr
    protection = Protection.load(tmp_path)
    assert protection.kind == "redirection" and "none here" in protection.detail


def test_a_run_that_is_ended_while_it_makes_its_layer_leaves_none(tmp_path: Path) -> None:
    before = """
    make = Layer.make
    def made(*words):
        layer = make(*words)
        os.kill(os.getpid(), signal.SIGTERM)
        return layer
    Layer.make = made
    """
    done = _run(before, "time.sleep(50)", tmp_path)
    assert done.returncode == -signal.SIGTERM, done.stderr
    assert not list((tmp_path / "layers").iterdir())
