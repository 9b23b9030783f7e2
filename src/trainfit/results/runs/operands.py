"""What the call that failed was given: its tensors, the layer that it is of, and what made each of
the tensors what it is. Names, shapes and places, no tensors."""

from __future__ import annotations

import dataclasses
from typing import Final, Literal

#: Of what a line made of a tensor that a later one fails for: it changed the shape; it changed the
#: first dimension; it gave a result without a graph of what has one; it was computed in an earlier
#: step, and is part of what was computed in this one; it changed a tensor in place.
How = Literal["shape", "samples", "cut", "earlier", "in_place"]
#: What :attr:`Origin.operator` is for ``x[…]``.
INDEXING: Final = "getitem"

#: The function by which an embedding with a ``max_norm`` changes its weight.
RENORMED: Final = "embedding_renorm"
#: … and what an optimizer does to all of its weights.
STEPPED: Final = "optimizer.step()"
#: The attribute of an exception by which a simulated table tells its ``wrong_index``.
WRONG_INDEX: Final = "trainfit_wrong_index"


@dataclasses.dataclass(frozen=True)
class Origin:
    """A line that made an operand what it is.

    Attributes:
        how: what it did.
        operator: of PyTorch that the line calls ("view", :data:`INDEXING`, "argmax").
        given: the shape of what that was given.
        gave: … and of its result.
        place: the line, "file:line".
        used_at: the line that used the result in this step, of what is of an earlier one.
        with_tensor: an index was a tensor (a mask, positions).
    """

    how: How
    operator: str
    given: tuple[int, ...]
    gave: tuple[int, ...]
    place: str
    used_at: str = ""
    with_tensor: bool = False


@dataclasses.dataclass(frozen=True)
class Operand:
    """A tensor that a call was given: its name there, shape, dtype ("float32") and device, and the
    last line that did each thing to it."""

    name: str
    shape: tuple[int, ...]
    dtype: str
    device: str
    origins: tuple[Origin, ...] = ()

    def origin(self, how: How) -> Origin | None:
        """The last line that did so."""
        return next((each for each in self.origins if each.how == how), None)


@dataclasses.dataclass(frozen=True)
class FailedCall:
    """The call that failed.

    Attributes:
        layer: as the script's own classes call the layer that failed ("self.blocks[0]"); empty:
            none did, or it has no name there.
        kind: its class ("Linear").
        listed: the attribute with a plain list (or dict) that holds it: ``nn.Module`` does not know
            of it.
        weight: the shape of its weight.
        operands: its tensors.
        changed: the last lines that changed a tensor in place, the last one first; ``used_at`` is
            the operator that had computed it.
        wrong_index: an index that is not in a table, and how many rows the table has; ``None``:
            that is not why it failed, or not known.
        needed_by: the operator whose derivative needs what was changed in place ("mul"); empty:
            not known.
        needed_at: the line that called it; empty: not known, or several did.
    """

    layer: str = ""
    kind: str = ""
    listed: str = ""
    weight: tuple[int, ...] = ()
    operands: tuple[Operand, ...] = ()
    changed: tuple[Origin, ...] = ()
    wrong_index: tuple[int, int] | None = None
    needed_by: str = ""
    needed_at: str = ""


#: Of a run that raised nothing, or of which no more is known.
NO_CALL: Final = FailedCall()
