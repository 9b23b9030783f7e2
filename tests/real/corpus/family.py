"""What a family of the corpus declares: how it is run, and its hand sum."""

from __future__ import annotations

import os
from dataclasses import dataclass, field
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Literal

SCRIPTS = Path(__file__).resolve().parents[1] / "scripts"
#: The folder ``examples/pytorch`` of Transformers' repository; empty: there is none here.
EXAMPLES = os.environ.get("TRAINFIT_EXAMPLES", "")

#: ``works``: every figure agrees with the hand sum. ``note``: one cannot be told, or departs,
#: and a note says so. ``refused``: one line says why there is no figure.
Verdict = Literal["works", "note", "refused"]

#: Bytes of an optimizer's state for each trained parameter, all in float32.
ADAM, MOMENTUM, PLAIN_SGD = 8, 4, 0


@dataclass(frozen=True)
class HandSum:
    """What is known of the job without trainfit; the bare run on the CPU confirms it.

    ``parameters`` and ``trained`` are numbers of elements, of the models that are called and of
    those that the optimizers hold; ``state_bytes`` are an optimizer's for each trained one and
    ``weight_bytes`` those of a parameter. ``micro`` is ``None`` where the starting batch is the
    micro-batch. ``samples`` is the length of the training data (``None``: has none). ``idle`` are
    trained parameters that the loss does not reach: they have no gradient and no state.
    ``evaluated`` are those of copies that an evaluation makes, calls and drops. ``effective``
    is the effective batch of a script that keeps it, whatever the micro-batch is.
    """

    parameters: int
    trained: int | None = None
    state_bytes: float = ADAM
    weight_bytes: float = 4
    gradient_bytes: float = 4
    micro: int | None = None
    accumulation: int = 1
    samples: int | None = None
    idle: int = 0
    evaluated: int = 0
    effective: int | None = None
    cache_bytes: int | None = None

    @property
    def updated(self) -> int:
        """Parameters that an optimizer holds."""
        return self.parameters if self.trained is None else self.trained

    @property
    def reached(self) -> int:
        """Parameters that get a gradient, and so a state."""
        return self.updated - self.idle


@dataclass(frozen=True)
class Family:
    """One third-party project, driven as its users drive it.

    In ``command`` and ``prepare``, ``{scripts}`` is the folder of drivers, ``{examples}`` that of
    Transformers' scripts, ``{data}`` the one that ``prepare`` fills and ``{batch}`` the batch size:
    a placeholder of trainfit's where ``placeholder``, else the bare number. ``cpu_command`` is for
    the bare run, where it differs. ``inference``: no optimizer; the bare run ends by itself.
    ``starts`` are the two batch sizes that it is planned from; with ``simulates`` it is simulated
    with the first, once, which tells its memory and nothing of other batch sizes: ``kinds`` of
    memory that there have to be, and patterns of what has to be ``said``. ``noted`` maps a check
    that may depart to a pattern of the note that has to say so. ``modes`` are checks left out, with
    the reason.
    """

    name: str
    packages: tuple[str, ...]
    command: str
    hand: HandSum | None
    about: str = ""
    prepare: str = ""
    cpu_command: str = ""
    starts: tuple[int, int] = (8, 16)
    placeholder: bool = True
    simulates: bool = False
    inference: bool = False
    gpu: str = "RTX 4090"
    expected: Verdict = "works"
    refusal: str = ""
    tolerance: float = 0.0
    kinds: tuple[str, ...] = ()
    said: tuple[str, ...] = ()
    noted: dict[str, str] = field(default_factory=dict)
    left_out: dict[str, str] = field(default_factory=dict)
    time_limit_s: int = 900

    def lacking(self) -> str:
        """What it needs and is not here; empty where all is."""
        if "{examples}" in self.command and not EXAMPLES:
            return "TRAINFIT_EXAMPLES, the folder examples/pytorch of Transformers' repository"
        return ", ".join(each for each in self.packages if not _is_installed(each))

    def words(self, data: Path, batch: int, *, bare: bool) -> list[str]:
        """The command's words at a batch size."""
        text = (self.cpu_command or self.command) if bare else self.command
        size = f"{{batch_size:{batch}}}" if self.placeholder and not bare else str(batch)
        return [_filled(word, data, size) for word in text.split()]

    def preparation(self, data: Path) -> list[str]:
        """The words of the command that makes the data; none where the driver makes them."""
        return [_filled(word, data, "") for word in self.prepare.split()]


def _is_installed(package: str) -> bool:
    try:
        version(package)
    except PackageNotFoundError:
        return False
    return True


def _filled(word: str, data: Path, batch: str) -> str:
    values = {"scripts": str(SCRIPTS), "examples": EXAMPLES, "data": str(data), "batch": batch}
    for name, value in values.items():
        word = word.replace(f"{{{name}}}", value)
    return word
