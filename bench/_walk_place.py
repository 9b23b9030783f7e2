"""A fresh clone of this repository, and a shell in it as a new user has one.

The environment is the user's own (``git clone``, ``python3 -m venv`` and ``pip install`` are run as
the page says), or lent: an environment in the clone's ``.venv`` that sees the packages of the
Python that runs this, but not its trainfit. Nothing of the real home folder is seen or changed.
"""

from __future__ import annotations

import contextlib
import os
import re
import shlex
import signal
import subprocess
import sys
import sysconfig
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from _walk_screens import COLUMNS

ROOT: Final = Path(__file__).resolve().parents[1]
#: What the documentation clones; a walk clones this repository under that name.
ADDRESS: Final = "https://github.com/trainfit/trainfit"
#: What an installation puts on PATH of which the pages type something, by its module.
COMMANDS: Final = {"trainfit": "trainfit.cli.main", "torchrun": "torch.distributed.run"}
#: Installs and what prepares it: not typed where an environment is lent.
INSTALLS: Final = re.compile(
    r"git clone |cd trainfit$|python3 -m venv |pip install |export PIP_|make (?!plan)"
)
#: Variables of the real environment that a new user's shell has as well.
KEPT: Final = ("PATH", "LANG", "LC_ALL", "TMPDIR", "SSL_CERT_FILE", "HTTPS_PROXY", "https_proxy")


@dataclass(frozen=True)
class Done:
    """A command that has ended; the exit code is 124 where it ran past its time."""

    text: str
    code: int
    out: str
    err: str
    seconds: float

    @property
    def last_words(self) -> str:
        """Its last line that is not empty, for a message."""
        lines = [line for line in (self.out + "\n" + self.err).splitlines() if line.strip()]
        return lines[-1] if lines else ""


class CloneFolder:
    """A folder with a clone in it; ``lent`` is the Python whose packages the clone sees."""

    def __init__(self, folder: Path, lent: Path | None = None, python: str = "python3") -> None:
        self.folder = folder.resolve()
        self.clone = self.folder / "trainfit"
        self.lent = lent.absolute() if lent else None
        self._cwd = self.folder
        self._installed: set[str] = set()
        (self.folder / "home").mkdir(parents=True)
        self._variables = self._first_variables(python)
        if lent:
            _git_clone(self.clone)
            _lend(lent.absolute(), self.clone)
            self._cwd = self.clone

    def run(self, text: str, limit_s: float = 900.0) -> Done:
        """Type a command; the folder and the exported variables are kept for the next one."""
        state, cwd = self.folder / "state", self.folder / "cwd"
        script = f"{text}\ncode=$?\nenv -0 > {shlex.quote(str(state))}\n"
        script += f"pwd > {shlex.quote(str(cwd))}\nexit $code\n"
        started = time.monotonic()
        process = subprocess.Popen(
            ["bash", "-c", script],
            cwd=self._cwd,
            env=self._variables,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            errors="replace",
            start_new_session=True,
        )
        try:
            out, err = process.communicate(timeout=limit_s)
            code = process.returncode
        except subprocess.TimeoutExpired:
            _end(process)
            out, err = process.communicate()
            code = 124
        except BaseException:
            # Its session is its own: Ctrl-C does not reach it.
            _end(process)
            raise
        seconds = time.monotonic() - started
        if state.is_file():
            pairs = (pair.partition("=") for pair in state.read_text().split("\0") if pair)
            self._variables = {name: value for name, _, value in pairs if name != "_"}
            self._cwd = Path(cwd.read_text().rstrip("\n"))
            state.unlink()
        return Done(text, code, out, err, seconds)

    def save(self, name: str, text: str) -> None:
        """Save a file in the current folder, as the page tells the reader to."""
        (self._cwd / name).write_text(text, "utf-8")

    def has(self, text: str) -> str | None:
        """Why this installation is not needed, or None: a lent environment, an earlier page."""
        if not INSTALLS.match(text):
            return None
        if self.lent:
            return "the environment is lent"
        if text in self._installed:
            return "typed before"
        self._installed.add(text)
        return None

    def _first_variables(self, python: str) -> dict[str, str]:
        kept = {name: os.environ[name] for name in KEPT if name in os.environ}
        # How this machine's pip reaches its registry is no matter of the documentation.
        kept |= {name: value for name, value in os.environ.items() if name.startswith("PIP_")}
        here = Path(sys.executable).parent
        paths = [path for path in kept.get("PATH", "").split(":") if Path(path) != here]
        if "/" in python:
            programs = self.folder / "programs"
            programs.mkdir()
            (programs / "python3").symlink_to(Path(python).resolve())
            paths.insert(0, str(programs))
        return {
            **kept,
            "PATH": ":".join(paths),
            "HOME": str(self.folder / "home"),
            "LANG": kept.get("LANG", "C.UTF-8"),
            "COLUMNS": str(COLUMNS),
            "GIT_CONFIG_COUNT": "1",
            "GIT_CONFIG_KEY_0": f"url.{ROOT}.insteadOf",
            "GIT_CONFIG_VALUE_0": ADDRESS,
        }


def _end(process: subprocess.Popen[str]) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)


def _git_clone(target: Path) -> None:
    subprocess.run(["git", "clone", "-q", str(ROOT), str(target)], check=True)


def _lend(python: Path, clone: Path) -> None:
    """Make ``.venv``, with the clone's sources before the packages of ``python``."""
    subprocess.run([python, "-m", "venv", "--without-pip", clone / ".venv"], check=True)
    asked = "import sysconfig; print(sysconfig.get_path('purelib'))"
    lent = subprocess.run([python, "-c", asked], check=True, capture_output=True, text=True)
    (packages,) = (clone / ".venv" / "lib").glob("python*/site-packages")
    # A path file of a folder that a path file names is not read: not that of an editable trainfit.
    (packages / "lent.pth").write_text(f"{clone / 'src'}\n{lent.stdout.strip()}\n")
    for name, module in COMMANDS.items():
        command = clone / ".venv" / "bin" / name
        entry = f"import sys\nfrom {module} import main\nsys.exit(main())\n"
        command.write_text(f"#!{clone / '.venv' / 'bin' / 'python'}\n{entry}")
        command.chmod(0o755)
    ready = clone / ".venv" / ".plan-ready"
    ready.touch()


def default_lent() -> Path:
    """The Python that runs this, if it has PyTorch."""
    packages = Path(sysconfig.get_path("purelib"))
    if not (packages / "torch").is_dir():
        raise SystemExit(f"{sys.executable} has no PyTorch: --lend PYTHON names one that has")
    return Path(sys.executable)
