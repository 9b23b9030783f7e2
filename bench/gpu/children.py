"""The processes that measure: started early, let loose one at a time, never left behind."""

from __future__ import annotations

import contextlib
import json
import os
import queue
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

MEASURE = Path(__file__).resolve().parent / "measure.py"
ROOT = MEASURE.parents[2]

#: Seconds that a child may take to prepare itself (imports, a model on the CPU).
PREPARATION_S = 180.0

_alive: set[MeasuringProcess] = set()
_helpers: set[subprocess.Popen[str]] = set()


def environment(alloc_conf: str) -> dict[str, str]:
    """This process's, with trainfit importable and the allocator's settings of the case."""
    env = dict(os.environ)
    paths = [str(ROOT / "src"), *filter(None, [env.get("PYTHONPATH")])]
    env["PYTHONPATH"] = os.pathsep.join(paths)
    env["PYTHONUNBUFFERED"] = "1"
    for name in ("PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF"):
        env.pop(name, None)
    if alloc_conf:
        # The older name: every version reads it.
        env["PYTORCH_CUDA_ALLOC_CONF"] = alloc_conf
    # Nothing is to be fetched; random weights need nothing.
    env.setdefault("HF_HUB_OFFLINE", "1")
    env.setdefault("TOKENIZERS_PARALLELISM", "false")
    return env


_ASK = """
import json, torch
if torch.cuda.is_available():
    p = torch.cuda.get_device_properties(0)
    print(json.dumps({"gpu": p.name, "capability": [p.major, p.minor],
                      "memory_bytes": p.total_memory, "sm_count": p.multi_processor_count}))
"""


def ask_gpu() -> dict[str, Any] | None:
    """The GPU that torch can use, asked in a process of its own; ``None`` without one."""
    try:
        done = subprocess.run(
            [sys.executable, "-c", _ASK], capture_output=True, text=True, timeout=180
        )
        return json.loads(done.stdout.strip().splitlines()[-1])
    except (OSError, subprocess.SubprocessError, ValueError, IndexError):
        return None


class MeasuringProcess:
    """One measuring process."""

    def __init__(self, scratch: Path, name: str, request: dict[str, Any], alloc_conf: str) -> None:
        folder = scratch / name.replace("/", "-")
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "request.json").write_text(json.dumps(request))
        self._log = folder / "output.txt"
        #: Seconds since the epoch, to tell its result from an older one.
        self.started = time.time()
        self._lines: queue.Queue[str | None] = queue.Queue()
        with self._log.open("wb") as log:
            self._process = subprocess.Popen(
                [sys.executable, "-u", str(MEASURE), str(folder / "request.json")],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                env=environment(alloc_conf),
                start_new_session=True,
            )
        _alive.add(self)
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            self._lines.put(line.decode(errors="replace").strip())
        self._lines.put(None)

    def measure(self, limit: float) -> str | None:
        """Let it use the GPU; returns what went wrong, ``None`` if it ended well."""
        try:
            problem = self._wait_until_ready()
            if problem is None:
                assert self._process.stdin is not None
                with contextlib.suppress(OSError):
                    self._process.stdin.write(b"go\n")
                    self._process.stdin.flush()
                problem = self._wait_for_end(limit)
            return problem
        finally:
            self.stop()

    def _wait_until_ready(self) -> str | None:
        while True:
            try:
                line = self._lines.get(timeout=PREPARATION_S)
            except queue.Empty:
                return f"it was not ready within {PREPARATION_S:.0f} s"
            if line is None:
                # A failed preparation writes its result and ends.
                return None if self._process.wait() == 0 else self._ending()
            if line == "ready":
                return None

    def _wait_for_end(self, limit: float) -> str | None:
        try:
            code = self._process.wait(timeout=limit)
        except subprocess.TimeoutExpired:
            return f"it took longer than {limit:.0f} s"
        return None if code == 0 else self._ending()

    def _ending(self) -> str:
        return f"its process ended with exit code {self._process.returncode}"

    def output(self) -> str:
        """What it wrote to its error output."""
        try:
            return self._log.read_text(errors="replace")
        except OSError:
            return ""

    def stop(self) -> None:
        """End the process, and whatever it started."""
        _end(self._process)
        for pipe in (self._process.stdin, self._process.stdout):
            if pipe is not None:
                with contextlib.suppress(OSError):
                    pipe.close()
        _alive.discard(self)


def run(command: list[str], env: dict[str, str], limit: float) -> tuple[int, str, str]:
    """A helper to its end: exit code, output and error output; raises ``TimeoutExpired``."""
    process = subprocess.Popen(
        command,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=env,
        start_new_session=True,
    )
    _helpers.add(process)
    try:
        output, errors = process.communicate(timeout=limit)
    finally:
        _end(process)
        _helpers.discard(process)
    return process.returncode, output, errors


def _end(process: subprocess.Popen[Any]) -> None:
    """End a process, and whatever it started."""
    if process.poll() is None:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(process.pid, signal.SIGKILL)
    with contextlib.suppress(subprocess.TimeoutExpired):
        process.wait(timeout=30)


def stop_all() -> None:
    """End every process that is still there."""
    for child in list(_alive):
        child.stop()
    for process in list(_helpers):
        _end(process)
