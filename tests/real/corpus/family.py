"""What a family of the corpus declares: how it is run, and its hand sum."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

SCRIPTS = Path(__file__).resolve().parents[1] / "scripts"

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

    In ``command`` and ``prepare``, ``{scripts}`` is the folder of drivers, ``{data}`` the one
    that ``prepare`` fills and ``{batch}`` the batch size: a placeholder of trainfit's where
    ``placeholder``, else the bare number. ``cpu_command`` is for the bare run, where it differs.
    ``inference``: no optimizer; the bare run ends by itself. ``starts`` are the two batch sizes
    that it is planned from. ``noted`` maps a check that may depart to a pattern of the note that
    has to say so. ``modes`` are checks left out, with the reason.
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
    inference: bool = False
    gpu: str = "RTX 4090"
    expected: Verdict = "works"
    refusal: str = ""
    tolerance: float = 0.0
    noted: dict[str, str] = field(default_factory=dict)
    left_out: dict[str, str] = field(default_factory=dict)
    time_limit_s: int = 900

    def words(self, data: Path, batch: int, *, bare: bool) -> list[str]:
        """The command's words at a batch size."""
        text = (self.cpu_command or self.command) if bare else self.command
        size = f"{{batch_size:{batch}}}" if self.placeholder and not bare else str(batch)
        return [_filled(word, data, size) for word in text.split()]

    def preparation(self, data: Path) -> list[str]:
        """The words of the command that makes the data; none where the driver makes them."""
        return [_filled(word, data, "") for word in self.prepare.split()]


def _filled(word: str, data: Path, batch: str) -> str:
    for name, value in (("{scripts}", str(SCRIPTS)), ("{data}", str(data)), ("{batch}", batch)):
        word = word.replace(name, value)
    return word
