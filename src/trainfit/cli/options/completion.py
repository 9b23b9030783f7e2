"""Options of ``trainfit completion``."""

from __future__ import annotations

import argparse
from typing import Any, Final

PARSER: dict[str, Any] = {
    "description": "Print the completion of commands, options, GPUs and files for a shell. For "
    'this session: bash: eval "$(trainfit completion bash)"; zsh: the same with zsh, after '
    "compinit; fish: trainfit completion fish | source.",
    "epilog": "example: trainfit completion bash > "
    "~/.local/share/bash-completion/completions/trainfit",
    "usage": "trainfit completion SHELL",
}
SHELLS: Final = ("bash", "zsh", "fish")


def configure(parser: argparse.ArgumentParser) -> None:
    """Add the options."""
    parser.add_argument("shell", choices=SHELLS, metavar="SHELL", help=", ".join(SHELLS))
