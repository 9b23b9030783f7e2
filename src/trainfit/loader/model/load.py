"""What a DataLoader has to do: the costs of its batches and of passing them on."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from trainfit.loader.model.events import Cores
from trainfit.loader.model.garbage_collection import Pauses
from trainfit.results.loader.settings import LoaderSettings
from trainfit.results.runs.loading import Consumer


@dataclass(frozen=True)
class BatchCost:
    """Cost of producing one batch, in seconds: waiting (storage), and work on ``width`` cores
    (more than one where a library decodes with several threads)."""

    wait_s: float
    work_s: float
    width: float = 1.0


@dataclass(frozen=True)
class Transfer:
    """Cost of transferring one batch, in seconds.

    Work on a core: ``send_s`` is paid by a thread of the worker, which makes its next batch
    meanwhile, ``disturb_s`` by that batch, if it is begun at once (they share the interpreter);
    ``receive_s`` by who takes the batch from the workers' queue (the main thread, or the pinning
    thread); ``pin_s`` by the pinning thread; ``next_s`` by the main thread for each batch that
    it hands out, and ``pinned_next_s`` where a pinning thread did the rest.

    Waits: ``latency_s`` passes in pipes and until threads wake: from the asking for a batch to the
    worker's start, and from its end to the arrival, together; ``crowded_latency_s`` comes on top
    while all cores are busy (the threads that pass it on wait for one). Shared memory is handed
    over as file descriptors, by a thread of the worker that answers some messages for each tensor:
    who takes a batch waits ``receive_wait_s`` for it. It also busy-waits ``busy_wait_s``, at most
    until that is made, while the worker that made it makes its next one, as the answers need the
    worker's interpreter lock (5 ms a time, ``sys.getswitchinterval``, where the worker runs Python
    code), and ``crowded_wait_s`` while all cores are busy (a part of it while one is free): each
    message wakes a thread that has to wait for its turn.
    """

    receive_s: float = 0.0
    pin_s: float = 0.0
    next_s: float = 0.0
    latency_s: float = 0.0
    busy_wait_s: float = 0.0
    send_s: float = 0.0
    receive_wait_s: float = 0.0
    crowded_wait_s: float = 0.0
    pinned_next_s: float | None = None
    disturb_s: float = 0.0
    crowded_latency_s: float = 0.0

    def next_of(self, settings: LoaderSettings) -> float:
        """Of the main thread, for a batch that is there."""
        if settings.pin_memory and self.pinned_next_s is not None:
            return self.pinned_next_s
        return self.next_s


@dataclass(frozen=True)
class Load:
    """A DataLoader's work: what is simulated with any settings.

    Attributes:
        costs: of batches in their order, as measured or drawn; after the last comes the first.
        start_s: until one worker runs, in seconds; workers are started one after the other.
        worker_speeds: how fast each worker is (a slow core, a busy neighbour), repeated as
            needed; a speed of 0.5 doubles wait and work.
        alone: costs of batches in the main process (``num_workers=0``), where they differ, with
            all that ``next`` takes; ``alone_pinned`` the same with pinning.
        locked_share: of a batch's wait and work in a worker, the part that happens under a lock
            that all workers share (a file's, a library's), its last part.
        convoy: by what share each further worker that waits for the lock prolongs the time that
            the next one holds it (those who wait are woken, look, and wait again), as far as there
            are cores to wake them on: with it, too many workers are slower than fewer.
        pauses: of a worker, for garbage collections, on top of what its batches cost.
    """

    costs: Sequence[BatchCost]
    transfer: Transfer = field(default_factory=Transfer)
    consumer: Consumer = field(default_factory=lambda: Consumer(0.0))
    cores: Cores = field(default_factory=lambda: Cores((1.0,) * 1024))
    start_s: float = 0.0
    worker_speeds: Sequence[float] = (1.0,)
    alone: Sequence[BatchCost] = ()
    alone_pinned: Sequence[BatchCost] = ()
    locked_share: float = 0.0
    convoy: float = 0.0
    pauses: Pauses = field(default_factory=Pauses)

    def __post_init__(self) -> None:
        if not self.costs:
            raise ValueError("a load needs the cost of at least one batch")
        if not 0 <= self.locked_share <= 1:
            raise ValueError("the locked share of a batch's cost must be between 0 and 1")
