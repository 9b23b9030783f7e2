"""Settings of a DataLoader."""

from __future__ import annotations

import dataclasses
from typing import Literal

StartMethod = Literal["fork", "spawn", "forkserver"]


@dataclasses.dataclass(frozen=True)
class LoaderSettings:
    """Settings of a DataLoader, by its own names; ``prefetch_factor`` means nothing without
    workers.

    ``start_method`` is its ``multiprocessing_context`` (Linux' default before Python 3.14 is
    "fork"); ``worker_threads`` is what ``torch.get_num_threads()`` is in a worker (1, unless
    the script's ``worker_init_fn`` says otherwise). ``library_threads`` is what the other
    libraries of a worker that have threads of their own are held to (OpenMP, OpenBLAS, MKL,
    OpenCV, …); ``None``: as the script and its environment have it.
    """

    num_workers: int
    prefetch_factor: int = 2
    pin_memory: bool = False
    in_order: bool = True
    persistent_workers: bool = False
    start_method: StartMethod = "fork"
    worker_threads: int = 1
    library_threads: int | None = None

    def __post_init__(self) -> None:
        if self.num_workers < 0:
            raise ValueError(f"expected num_workers of 0 or more, got {self.num_workers}")
        if self.prefetch_factor < 1:
            raise ValueError(f"expected prefetch_factor of 1 or more, got {self.prefetch_factor}")
        if self.worker_threads < 1:
            raise ValueError(f"expected one thread or more for a worker, got {self.worker_threads}")
        if self.library_threads is not None and self.library_threads < 1:
            raise ValueError(
                f"expected one thread or more for a library, got {self.library_threads}"
            )

    @property
    def tokens(self) -> int:
        """Batches that are asked for and not yet handed to the user."""
        return self.num_workers * self.prefetch_factor


def steady(settings: LoaderSettings) -> LoaderSettings:
    """What of the settings matters within an epoch: persistent workers do between epochs, and
    without workers there is nothing to prefetch."""
    prefetch = settings.prefetch_factor if settings.num_workers else 2
    return dataclasses.replace(settings, persistent_workers=False, prefetch_factor=prefetch)
