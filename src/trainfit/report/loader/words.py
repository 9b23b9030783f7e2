"""Formats rates, durations and settings of a DataLoader."""

from __future__ import annotations

from trainfit.results.loader import LoaderResult, LoaderSettings


def duration(seconds: float | None) -> str:
    """A time in the unit that suits it: "1.2 s", "40 ms", "25 µs"; "-" if not measured."""
    if seconds is None:
        return "-"
    for unit, scale in (("s", 1.0), ("ms", 1e3)):
        if round(abs(seconds) * scale, 4) >= 0.9995:
            return f"{_three(seconds * scale)} {unit}"
    return f"{_three(seconds * 1e6)} µs"


def rate(value: float | None) -> str:
    """Batches per second, three digits; empty if not known."""
    if value is None:
        return ""
    return f"{value:#.3g}" if 0.001 <= value < 99.95 else _three(value)


def times(factor: float) -> str:
    """A gain: "1.42×"."""
    return f"{rate(factor)}×"


def switch(value: bool) -> str:
    """A setting that is on or off."""
    return "yes" if value else "no"


def settings_words(settings: LoaderSettings) -> str:
    """Settings in a line, what is usual left out."""
    if not settings.num_workers:
        return "no workers" + (", pinned" if settings.pin_memory else "")
    workers = settings.num_workers
    words = [
        f"{workers} worker{'s' if workers > 1 else ''}",
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
    return f"{threads} thread{'s' if threads > 1 else ''} a library"


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


def one_of(text: str, most: int = 300) -> str:
    """Text on one line, its end kept: of a traceback that says the most."""
    line = " ".join(text.split())
    return line if len(line) <= most else "…" + line[1 - most :]


def _three(value: float) -> str:
    """Three significant digits, without an exponent."""
    if abs(value) >= 100:
        return f"{value:.0f}"
    text = f"{value:.3g}"
    return text if "e" not in text else f"{value:.6f}".rstrip("0").rstrip(".")
