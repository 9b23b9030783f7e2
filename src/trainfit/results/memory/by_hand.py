"""Parts of a hand formula and of the simulation. All sizes are bytes.

Format history
    1   first version
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping
from typing import Final

from trainfit.results.memory.explanation import Moment

FORMAT: Final = "trainfit-memory-by-hand"
VERSION: Final = 1


@dataclasses.dataclass(frozen=True)
class HandRow:
    """One part: what the formula has for it (``None``: it does not count it), and what of the
    simulated peak belongs to it."""

    name: str
    by_hand_bytes: int | None
    simulated_bytes: int

    @property
    def difference_bytes(self) -> int:
        return self.simulated_bytes - (self.by_hand_bytes or 0)


@dataclasses.dataclass(frozen=True)
class Cause:
    """A reason for a part of the difference: ``nbytes`` is what it adds to the simulated figure
    (negative: what it removes), ``rows`` the same by the rows it belongs to.

    ``operators`` are those with the largest part, where that says something.
    """

    name: str
    nbytes: int
    rows: Mapping[str, int]
    operators: tuple[str, ...] = ()


@dataclasses.dataclass(frozen=True)
class ModelPart:
    """Activations of a part of the model: by hand, and what of them the peak holds."""

    path: str
    by_hand_bytes: int
    simulated_bytes: int


@dataclasses.dataclass(frozen=True)
class HandReport:
    """The formula ``parameters x bytes + activations x bytes + input, and 10 to 30% for the
    rest`` compared with the peak of a recording.

    ``rows`` sum up to ``by_hand`` and to the simulated peak, ``allocated``; ``causes`` and
    ``unexplained`` to the difference. ``unexplained_rows`` has the parts of the latter, which can
    cancel each other out. ``buffer`` is what 10% and 30% of ``by_hand`` are; ``doubled`` is the sum
    with each activation counted twice, for its gradient. ``most_temporaries`` is the most that
    temporaries (gradients of activations among them) had at once in the peak's step.
    ``state_bytes`` are the optimizer's for a parameter (``None``: the formula has no figure).
    ``compute`` is the type that the forward pass multiplies in, ``activation_bytes`` those of one
    number of it.
    """

    file: str
    gpu: str
    torch: str
    batch_size: int | None
    parameters: int
    optimizer: str
    state_bytes: int | None
    compute: str
    activation_bytes: int
    moment: Moment
    rows: tuple[HandRow, ...]
    causes: tuple[Cause, ...]
    unexplained_bytes: int
    unexplained_rows: Mapping[str, int]
    by_hand_bytes: int
    buffer_bytes: tuple[int, int]
    doubled_bytes: int
    allocated_bytes: int
    reserved_bytes: int
    most_temporaries_bytes: int
    parts: tuple[ModelPart, ...]

    def to_json(self) -> str:
        """One JSON document, with its format's name and version."""
        document = {"format": FORMAT, "version": VERSION, **dataclasses.asdict(self)}
        return json.dumps(document, indent=2, allow_nan=False)
