"""What ranks do together: what a watched one spent in it, and what a simulated one did."""

from __future__ import annotations

import dataclasses
from typing import Final, Literal

#: What is assumed where rank 0 alone runs.
EQUAL: Final = "rank 0 is simulated; the other ranks are taken to hold and to do the same"

#: Where ranks meet, for tasks of Slurm or MPI, which do not say it: the batch file does.
MEETING_PLACE: Final = {"MASTER_ADDR": "localhost", "MASTER_PORT": "29500"}


@dataclasses.dataclass(frozen=True)
class GradientTimes:
    """Means of what DistributedDataParallel times of its own backward passes: the first ten, and
    one of each hundred.

    ``collectives_s`` is from the first bucket's all-reduce to the end of the last, with the waits
    for other ranks in it; ``hidden_s`` the part of it in which the backward pass went on.
    ``backward_s`` is the backward pass' computation. ``by`` are its clocks.
    """

    collectives_s: float
    hidden_s: float
    backward_s: float
    by: Literal["CUDA events", "the host's clock"]

    @property
    def exposed_s(self) -> float:
        """How much longer collectives make the step, in seconds."""
        return max(0.0, self.collectives_s - self.hidden_s)


@dataclasses.dataclass(frozen=True)
class RankCommunication:
    """``called_s`` are the host's seconds of a step in collectives that the script, or a library in
    Python, called itself, the mean of steps recorded in detail after the warm-up (``None``: there
    were none); ``calls`` how many there were in all steps. ``gradients`` are of DDP (``None``:
    the training is without it, or it has not timed any)."""

    called_s: float | None = None
    calls: int = 0
    gradients: GradientTimes | None = None

    @property
    def exposed_s(self) -> float | None:
        """Seconds of a step that the rank spends in collectives, waiting for others or for the
        data; ``None``: not measured."""
        if self.gradients is not None:
            return self.gradients.exposed_s + (self.called_s or 0.0)
        return self.called_s if self.calls else None


#: Of a run that nobody looked at.
NO_COMMUNICATION: Final = RankCommunication()


# ---
# What a simulated rank did with others.


#: The kind of a meeting after which a rank does for the others whatever they still do: its batches
#: are over, and ``torch.distributed.algorithms.join`` makes up for it.
LEAVES: Final = "join"
#: The kind of one of its own by which it is known that this will be so.
JOINS: Final = "joins"


@dataclasses.dataclass(frozen=True)
class Meeting:
    """A collective, a send or a receive ("all_reduce", "barrier", "send", "receive", …).

    ``group`` are the ranks that take part, ``peer`` the one that a send goes to, or a receive comes
    from. ``nbytes`` have to be the same on all of them (0: they need not). ``place`` is the user's
    line ("file:line") that it is called in. ``gpu`` is the number of the GPU whose memory it is of
    (``None``: the host's, or which one that number means is a matter of the rank's environment).
    """

    kind: str
    group: tuple[int, ...]
    nbytes: int
    place: str | None = None
    peer: int | None = None
    gpu: int | None = None
