"""Settings of a DataLoader in words."""

from __future__ import annotations

from trainfit.results.format import count, rate
from trainfit.results.loader.result import LoaderResult
from trainfit.results.loader.settings import LoaderSettings


def switch(value: bool) -> str:
    """A setting that is on or off."""
    return "yes" if value else "no"


def settings_words(settings: LoaderSettings) -> str:
    """Settings in a line, what is usual left out."""
    if not settings.num_workers:
        return "no workers" + (", pinned" if settings.pin_memory else "")
    workers = settings.num_workers
    words = [
        count(workers, "worker"),
        f"prefetch {settings.prefetch_factor}",
    ]
    if settings.pin_memory:
        words.append("pinned")
    if settings.persistent_workers:
        words.append("persistent")
    if not settings.in_order:
        words.append("out of order")
    if settings.start_method != "fork":
        words.append(settings.start_method)
    if settings.worker_threads != 1:
        words.append(f"{settings.worker_threads} threads each")
    if settings.library_threads is not None:
        words.append(library_words(settings.library_threads))
    return ", ".join(words)


def library_words(threads: int) -> str:
    """The thread limit of libraries in a worker."""
    return f"{count(threads, 'thread')} a library"


def without_others_words(result: LoaderResult) -> str:
    """What the model recommends for this machine without the processes that disturbed it;
    empty where that is not left open."""
    if result.without_others is None:
        return ""
    said = [
        f"{settings_words(settings)} {rate(candidate.batches_per_s)}"
        for settings in dict.fromkeys((result.without_others, result.present))
        if (candidate := result.candidate(settings)) is not None
    ]
    return (
        "without them (predicted from the CPU time of batches, not confirmed by a run): "
        f"{settings_words(result.without_others)} ({'; '.join(said)} batches/s predicted)"
    )
