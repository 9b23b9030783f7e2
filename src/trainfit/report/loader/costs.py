"""what a batch costs and what the machine allows, as text."""

from __future__ import annotations

from trainfit.report.table import table
from trainfit.results.format import cores, count, duration, percent, size
from trainfit.results.loader.candidates import LoaderMachine
from trainfit.results.loader.probe import Probe, StorageCost
from trainfit.results.text import printable


def batch_section(probe: Probe) -> str:
    """Costs of a batch: time by part, size, transfer to the main process, workers."""
    rows = [
        ("data set", _dataset(probe)),
        ("in a worker", _worker(probe)),
        *_parts(probe),
        ("without workers", duration(probe.alone_s) if probe.alone_s is not None else ""),
        ("content", _content(probe)),
        ("hand-off", _transfer(probe)),
        ("sampler", _sampler(probe)),
        ("storage", _storage(probe.storage) if probe.storage is not None else ""),
        ("a worker", _one_worker(probe)),
        ("two workers", _scaling(probe)),
    ]
    made = f"{probe.batches} made in {duration(probe.seconds)}"
    cells = [(name, printable(text)) for name, text in rows if text]
    return "\n".join([f"A batch ({made})", *table(cells, "lw")])


def machine_section(machine: LoaderMachine, ranks: int = 1) -> str:
    """Limits of the machine for a DataLoader; unknown ones are shown as such."""
    usable = f"{cores(machine.usable_cores)} usable"
    title = f"Machine (the share of one of {ranks} ranks)" if ranks > 1 else "Machine"
    of = "of " if ranks > 1 else ""
    details = [f"{of}{len(machine.affinity)} logical allowed"] if machine.affinity else []
    if machine.physical_cores is not None:
        details.append(f"{machine.physical_cores} physical")
    if machine.quota_cores is not None:
        details.append(f"quota of {cores(machine.quota_cores)}")
    worth = sum(machine.core_speeds)
    if worth < 0.95 * len(machine.core_speeds):  # slow cores, or two threads on one
        details.append(f"worth {worth:.1f} of the fastest alone")
    rows = [
        ("cores", usable + (f" ({', '.join(details)})" if details else "")),
        ("RAM", _bytes(machine.available_bytes, "available")),
        ("/dev/shm", _bytes(machine.shm_free_bytes, "free")),
        ("open files", "cannot tell" if machine.open_files is None else str(machine.open_files)),
    ]
    return "\n".join([title, *table(rows, "lw")])


def _bytes(nbytes: int | None, word: str) -> str:
    return "cannot tell" if nbytes is None else f"{size(nbytes)} {word}"


def _dataset(probe: Probe) -> str:
    kind = "iterable data set" if probe.kind == "iterable" else "map-style"
    words = [probe.dataset, kind]
    if probe.batch_size is not None:
        words.append(f"batch size {probe.batch_size}")
    if probe.samples is not None:
        words.append(f"{probe.samples} samples an epoch")
    return ", ".join(words)


def _worker(probe: Probe) -> str:
    if probe.fetch_s is None:
        return "not measured: no run with workers succeeded"
    text = duration(probe.fetch_s)
    if probe.variation is not None:
        text += f" ± {percent(probe.variation)} from batch to batch"
    if probe.fetch_cpu_s is not None:
        text += f"; {duration(probe.fetch_cpu_s)} of CPU"
        waited = 1 - probe.fetch_cpu_s / probe.fetch_s if probe.fetch_s else 0.0
        if probe.threads is not None and probe.threads > 1.1:
            text += f" on {probe.threads:.1f} threads at a time"
        elif waited > 0.1:
            text += f", the other {percent(waited)} waits (storage, locks, sleep, no free core)"
    pools = ", ".join(f"{name} {n}" for name, n in sorted(probe.thread_pools.items()))
    return text + (f"; thread pools: {pools}" if pools else "")


def _parts(probe: Probe) -> list[tuple[str, str]]:
    """The longest first; "unknown" is what could not be split."""
    rows = []
    for part in sorted(probe.parts, key=lambda part: -part.share):
        name = "not split" if part.name == "unknown" else part.name
        cost = f", {duration(part.share * probe.fetch_s)}" if probe.fetch_s is not None else ""
        what = f": {', '.join(part.what[:3])}" if part.what else ""
        rows.append((f"  {name}", f"{percent(part.share)}{cost}{what}"))
    return rows


def _content(probe: Probe) -> str:
    return f"{size(probe.batch_bytes)} in {count(probe.batch_tensors, 'tensor')}"


def _transfer(probe: Probe) -> str:
    if probe.receive_s is None:
        return ""
    text = duration(probe.receive_s)
    if probe.receive_busy_s is not None:
        text += f" ({duration(probe.receive_busy_s)} while a worker loads the next)"
    if probe.pin_s is not None:
        text += f", {duration(probe.pin_s)} more to pin it"
    if probe.next_s is not None:
        text += f", {duration(probe.next_s)} in next()"
    return text


def _sampler(probe: Probe) -> str:
    """Only where it matters: above a hundredth of a batch."""
    if not probe.sampler_s or not probe.fetch_s or probe.sampler_s < 0.01 * probe.fetch_s:
        return ""
    return f"{duration(probe.sampler_s)} for a batch's indices"


def _storage(storage: StorageCost) -> str:
    text = f"{duration(storage.warm_s)} a batch from the page cache"
    if storage.cold_s is None:
        text += f"; cold: cannot tell{f' ({storage.reason})' if storage.reason else ''}"
    else:
        text += f", {duration(storage.cold_s)} from storage"
        if storage.read_bytes is not None:
            text += f" ({size(storage.read_bytes)} read)"
    if storage.file_bytes is not None:
        text += f"; {count(storage.files, 'file')} of {size(storage.file_bytes)}"
    if storage.cached_share is not None:
        fits = "all" if storage.cached_share >= 1 else percent(storage.cached_share)
        text += f", of which {fits} can stay in free RAM"
    return text


def _one_worker(probe: Probe) -> str:
    words = []
    if probe.worker_private_bytes is not None:
        words.append(f"{size(probe.worker_private_bytes)} of RAM of its own")
    starts = [f"{duration(s)} by {name}" for name, s in sorted(probe.start_s.items())]
    if starts:
        words.append(f"starts in {', '.join(starts)}")
    return "; ".join(words)


def _scaling(probe: Probe) -> str:
    if probe.scaling is None:
        return ""
    text = f"{probe.scaling:.2f} times the rate of one"
    if probe.contention:
        text += f" (one more busy core slows all cores by {percent(probe.contention, decimals=1)})"
    return text
