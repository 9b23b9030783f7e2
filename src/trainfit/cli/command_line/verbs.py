"""The verbs: what each is for, and where its options and its code are."""

from __future__ import annotations

import dataclasses
import importlib
from collections.abc import Mapping
from types import ModuleType
from typing import Final


@dataclasses.dataclass(frozen=True)
class Verb:
    """A verb, and what it is for in one line of help.

    Options and code are in the module of its name in :mod:`trainfit.cli.options` and in
    :mod:`trainfit.cli.verbs`, there perhaps in a ``room``.
    """

    name: str
    purpose: str
    room: str = ""

    def options(self) -> ModuleType:
        """Its options: ``PARSER``, ``configure``, and ``split`` if a command follows them."""
        return self._module("options")

    def code(self) -> ModuleType:
        """What it does: ``run``. Takes long to import, and the help does without it."""
        return self._module("verbs")

    def _module(self, package: str) -> ModuleType:
        inside = f"{self.room}.{self.name}" if self.room else self.name
        return importlib.import_module(f"trainfit.cli.{package}.{inside}")


#: By the heading that they have in the help.
HEADINGS: Final[Mapping[str, tuple[Verb, ...]]] = {
    "before a run, no GPU needed": (
        Verb("plan", "memory, best batch size and launch command of a training command"),
        Verb("simulate", "record a script on a simulated GPU and show its memory"),
        Verb("memory", "explain what uses the memory at the peak and by batch size"),
        Verb("gpus", "list GPUs, explain their figures, compare them for a job"),
        Verb("batch", "what a smaller or larger batch does to learning"),
    ),
    "the DataLoader": (
        Verb("loader", "DataLoader settings that keep the GPU from waiting"),
        Verb("rehearse", "GPU utilization with the real DataLoader and a simulated step"),
    ),
    "a real run": (
        Verb("watch", "run a training command and explain what limits it"),
        Verb("compare", "say what changed from one watched run to another", "watched"),
        Verb("verify", "run a planned command for a few steps, compare with the prediction"),
        Verb("pace", "inference at a fixed rate: why it is slow, and which fix helps"),
    ),
    "this machine": (
        Verb("doctor", "why PyTorch sees no GPU, what makes jobs slow or short of memory"),
        Verb("calibrate", "measure this machine's GPU, for plan and simulate"),
    ),
    "results": (
        Verb("show", "show a result file", "saved"),
        Verb("report", "make one page of results: HTML, Markdown, JSON or SVG", "saved"),
    ),
    "the shell": (Verb("completion", "print the completion of bash, zsh or fish", "shell"),),
}
VERBS: Final = {verb.name: verb for verbs in HEADINGS.values() for verb in verbs}
