"""Draw docs/pictures/plan.svg: what a command prints on a terminal, in its colors.

python docs/pictures/plan.py trainfit plan --gpu "RTX 4090" -- python train.py
"""

from __future__ import annotations

import io
import os
import pty
import re
import shlex
import subprocess
import sys
from pathlib import Path

from rich._export_format import CONSOLE_SVG_FORMAT
from rich.console import Console
from rich.text import Text

COLUMNS = 80


def printed(command: list[str]) -> str:
    """Standard output of a command that takes it for a terminal."""
    ours, its = pty.openpty()
    variables = {**os.environ, "COLUMNS": str(COLUMNS), "TERM": "xterm-256color"}
    # Progress goes to stderr, which is no terminal and not part of the picture.
    with subprocess.Popen(
        command, stdin=subprocess.DEVNULL, stdout=its, stderr=subprocess.DEVNULL, env=variables
    ) as process:
        os.close(its)
        text = b""
        # Reading fails when the last process that held the other end is gone.
        while chunk := _read(ours):
            text += chunk
    os.close(ours)
    if process.returncode not in (0, 1):
        raise SystemExit(f"{shlex.join(command)}: exit code {process.returncode}")
    return text.decode().replace("\r\n", "\n")


def _read(terminal: int) -> bytes:
    try:
        return os.read(terminal, 65536)
    except OSError:
        return b""


def main() -> None:
    """Write the picture next to this file."""
    command = sys.argv[1:]
    console = Console(
        record=True, width=COLUMNS + 2, file=io.StringIO(), force_terminal=True, highlight=False
    )
    console.print(f"$ {' '.join(map(_quoted, command))}\n", markup=False)
    console.print(Text.from_ansi(printed(command)))
    # The reader's own monospace font: a picture fetches nothing.
    template = re.sub(r"@font-face \{\{.*?\}\}", "", CONSOLE_SVG_FORMAT, flags=re.DOTALL)
    template = template.replace("Fira Code", "ui-monospace")
    path = Path(__file__).with_name("plan.svg")
    console.save_svg(str(path), title="trainfit", code_format=template)


def _quoted(word: str) -> str:
    return f'"{word}"' if " " in word else shlex.quote(word)


if __name__ == "__main__":
    main()
