"""Interpreters and tools that a user's command may name: stand-ins, and real environments."""

from __future__ import annotations

import json
import subprocess
import sys
import sysconfig
from pathlib import Path

#: What PyTorch needs of its environment; psutil and threadpoolctl are not among it.
_TORCH = (
    *("torch", "torchgen", "functorch", "numpy", "numpy.libs", "sympy", "mpmath", "networkx"),
    *("jinja2", "markupsafe", "filelock", "fsspec", "setuptools", "typing_extensions.py"),
)


def program(path: Path, text: str) -> Path:
    """An executable file."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    path.chmod(0o755)
    return path


def answering(
    path: Path,
    torch: str | None = "2.13.0",
    version: tuple[int, int, int] = (3, 12, 1),
    has: tuple[str, ...] = ("numpy", "psutil", "threadpoolctl"),
    abi: str = "",
) -> Path:
    """A stand-in for an interpreter, which only says what it is."""
    told = {"version": version, "abi": abi, "has": has}
    told |= {} if torch is None else {"torch": torch}
    return program(path, f"#!/bin/sh\necho '{json.dumps(told)}'\n")


def tool(path: Path, answer: str = "") -> Path:
    """A stand-in for a tool: notes its words next to itself, prints ``answer`` (none: fails)."""
    says = f"echo '{answer}'" if answer else "echo 'no such environment' >&2; exit 1"
    return program(path, f'#!/bin/sh\necho "$*" >> "$0.calls"\n{says}\n')


def calls(path: Path) -> list[str]:
    """With which words a :func:`tool` was started."""
    noted = path.with_name(f"{path.name}.calls")
    return noted.read_text().splitlines() if noted.exists() else []


def environment_without_torch(folder: Path) -> Path:
    """A real environment that has nothing; returns its Python."""
    words = [sys.executable, "-m", "venv", "--without-pip", str(folder)]
    subprocess.run(words, check=True, capture_output=True)
    return folder / "bin" / "python"


def environment_with_torch(folder: Path) -> Path:
    """A real environment with PyTorch, and without trainfit and what else it needs; returns its
    Python."""
    python = environment_without_torch(folder)
    version = f"python{sys.version_info.major}.{sys.version_info.minor}"
    packages = folder / "lib" / version / "site-packages"
    for name in _TORCH:
        found = Path(sysconfig.get_path("purelib")) / name
        if found.exists():
            (packages / name).symlink_to(found)
    return python
