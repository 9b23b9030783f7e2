"""Feasibility of settings: RAM, shared memory, open files, and cores.

Sources: `torch/utils/data/dataloader.py` (batches in flight), `torch/multiprocessing/
reductions.py` (each storage is transferred as a file in /dev/shm with a descriptor),
`ATen/core/CachingHostAllocator.h` (sizes of pinned buffers).
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Final

from trainfit.hardware.machine.limits import OWN_FILES
from trainfit.results.format import core_count, cores, count, size
from trainfit.results.loader.candidates import LoaderMachine
from trainfit.results.loader.probe import Probe
from trainfit.results.loader.settings import LoaderSettings

#: Of what is free, what a loader may take: the rest is for the page cache that reading needs,
#: and for what others on the machine do meanwhile. An assumption.
_SHARE: Final = 0.9
#: Of the cores that a job gets, the share that is busy where its workers take turns.
_FULL: Final = 0.9
#: Busy workers beyond the cores that are allowed (and a little, for clocks that are read).
_SPARE: Final = 1.1
#: Descriptors that the main process holds for each worker: two ends of its index queue's pipe
#: and two of its process (`multiprocessing/popen_fork.py`), and for the result queue's pipe.
_FILES_OF_WORKER: Final = 4
_FILES_OF_QUEUES: Final = 2


@dataclass(frozen=True)
class ResourceNeeds:
    """Resources that settings need in addition to the main process.

    ``ram_bytes`` holds the workers' private memory as measured, batches in shared memory and
    pinned copies; ``None`` where a worker's memory was not measured. ``ram_bound_bytes`` is
    what it may grow to (see :func:`growth`), ``None`` where that is not known.
    ``main_files`` and ``worker_files`` are open files of the main process and of a worker.
    """

    ram_bytes: int | None
    ram_bound_bytes: int | None
    shm_bytes: int
    main_files: int
    worker_files: int


def needs(settings: LoaderSettings, probe: Probe, shared_bytes: int | None = None) -> ResourceNeeds:
    """The resources that these settings need.

    In shared memory there are at most the ``prefetch_factor × num_workers`` batches that were
    asked for, and the one that the user holds meanwhile. With ``pin_memory`` each of them may
    be pinned instead, in a buffer of up to twice its size (powers of two).

    Args:
        shared_bytes: memory of the main process that forked workers share with it and that
            holds Python objects; at most that much is copied into each of them as reference
            counts are touched (pytorch#13246).
    """
    workers, batch = settings.num_workers, probe.batch_bytes
    if workers == 0:
        pinned = 2 * 2 * batch if settings.pin_memory else 0  # one made, one held by the user
        return ResourceNeeds(pinned, pinned, 0, OWN_FILES, 0)
    flying = settings.tokens + 1
    transport = flying * batch * (2 if settings.pin_memory else 1)
    private = probe.worker_private_bytes
    ram = None if private is None else workers * private + transport
    grown = workers * shared_bytes if shared_bytes is not None else None
    if settings.start_method != "fork":
        grown = 0  # what a worker has is its own from the start, and was measured so
    bound = None if ram is None or grown is None else ram + grown
    # Batches that came out of turn wait in the main process; with pinning only as copies.
    waiting = 2 if settings.pin_memory else flying
    return ResourceNeeds(
        ram,
        bound,
        flying * batch,
        OWN_FILES + _FILES_OF_QUEUES + _FILES_OF_WORKER * workers + waiting * probe.batch_tensors,
        OWN_FILES + (settings.prefetch_factor + 1) * probe.batch_tensors,
    )


def infeasible(
    settings: LoaderSettings,
    probe: Probe,
    machine: LoaderMachine,
    *,
    shared_bytes: int | None = None,
) -> str:
    """Why these settings could not start or would crash, with the remedy; empty if they can run.

    What is not known of the machine or was not measured forbids nothing.
    """
    if settings.num_workers == 0:
        return ""
    taken = needs(settings, probe, shared_bytes)
    return _shm(taken, machine) or _ram(settings, taken, machine) or _files(taken, machine)


def oversubscribed(
    settings: LoaderSettings, probe: Probe, machine: LoaderMachine, busy_cores: float
) -> str:
    """Why these settings are slower than their number of workers promises; empty if they are not.

    Workers beyond what the cores can run take turns, and the main process waits for its own: if
    they work, that is. Those that wait for the GPU take nothing from anybody. One worker more than
    cores can pay: it works while another waits to be taken from. A quota of 1.5 counts as two,
    each at three quarters of its speed.

    Args:
        busy_cores: cores that all of it keeps busy at the rate that it reaches.
    """
    wanted = settings.num_workers * _busy_share(probe)
    usable = max(1.0, machine.usable_cores)
    if settings.num_workers <= 1 or wanted <= math.ceil(usable - 1e-9) + _SPARE:
        return ""
    if busy_cores < _FULL * usable:
        return ""
    return (
        f"{count(settings.num_workers, 'worker')} need {core_count(wanted)}, "
        f"{cores(machine.usable_cores)} available: they compete for cores"
    )


def growth(
    settings: LoaderSettings, probe: Probe, machine: LoaderMachine, shared_bytes: int | None
) -> str:
    """The warning that RAM may run out later though it does not at first; or empty.

    A page that a forked worker shares is copied when the reference count of an object in it
    changes, so a data set that is a list of Python objects ends up in each worker. How soon
    depends on what is read; here the bound is held against the RAM that is free.
    """
    taken, free = needs(settings, probe, shared_bytes), machine.available_bytes
    if free is None or taken.ram_bytes is None or taken.ram_bound_bytes is None:
        return ""
    if taken.ram_bytes > _SHARE * free or taken.ram_bound_bytes <= _SHARE * free:
        return ""
    return (
        f"the memory of {count(settings.num_workers, 'worker')} may grow from "
        f"{size(taken.ram_bytes)} to {size(taken.ram_bound_bytes)} ({size(free)} are available) "
        "as they access the data set's Python objects: keep its index in a NumPy array or a "
        "tensor, not in lists and dicts"
    )


def _shm(taken: ResourceNeeds, machine: LoaderMachine) -> str:
    free = machine.shm_free_bytes
    if free is None or taken.shm_bytes <= _SHARE * free:
        return ""
    return (
        f"needs {size(taken.shm_bytes)} of /dev/shm for batches in flight, {size(free)} available: "
        f"start the container with --shm-size={_gigabytes(taken.shm_bytes)}g (or --ipc=host; in "
        "Kubernetes mount an emptyDir with medium Memory there), lower prefetch_factor, or send "
        "uint8 instead of float32"
    )


def _ram(settings: LoaderSettings, taken: ResourceNeeds, machine: LoaderMachine) -> str:
    free = machine.available_bytes
    least = taken.ram_bytes
    if least is None:  # what is known of it: the batches in flight
        least = taken.shm_bytes
    if free is None or least <= _SHARE * free:
        return ""
    return (
        f"needs {size(least)} of RAM for {count(settings.num_workers, 'worker')} and their "
        f"batches, {size(free)} available: use fewer workers, or memory-map the data "
        "set so that workers share it"
    )


def _files(taken: ResourceNeeds, machine: LoaderMachine) -> str:
    limit = machine.open_files
    most = max(taken.main_files, taken.worker_files)
    if limit is None or most <= limit:
        return ""
    which = "the main process" if taken.main_files == most else "a worker"
    return (
        f"needs {most} open files in {which} (one for each tensor in flight), {limit} "
        f"available: `ulimit -n {max(4096, 1 << (most - 1).bit_length())}`, pack the tensors "
        "of a batch, or torch.multiprocessing.set_sharing_strategy('file_system')"
    )


def _busy_share(probe: Probe) -> float:
    """Cores that one worker keeps busy; 1 where that was not measured."""
    if not probe.fetch_s or probe.fetch_cpu_s is None:
        return 1.0
    return probe.fetch_cpu_s / probe.fetch_s


def _gigabytes(nbytes: int) -> int:
    """Twice as much, in whole gigabytes: other jobs and bigger batches come."""
    return max(1, math.ceil(2 * nbytes / (1 << 30)))
