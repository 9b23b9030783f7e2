"""The GPUs that CUDA_VISIBLE_DEVICES exposes, by CUDA's rules.

CUDA reads a list of indices, or of UUIDs (of which a beginning is enough), and takes those
before the first that it does not know: docs.nvidia.com/cuda/cuda-c-programming-guide, "CUDA
Environment Variables".
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from trainfit.results.machine.machine import Gpu, Machine


def visible(value: str, count: int, uuids: Sequence[str]) -> tuple[list[str], str | None]:
    """The entries of ``value`` that CUDA takes, and the first that it does not (or ``None``).

    Args:
        value: CUDA_VISIBLE_DEVICES.
        count: GPUs that the machine has.
        uuids: of GPUs and of MIG devices, as far as known.
    """
    taken: list[str] = []
    for entry in (part.strip() for part in value.split(",")):
        if not _exists(entry, count, uuids):
            return taken, entry
        if entry in taken:  # CUDA and PyTorch take none at all of a list with a repetition
            return [], entry
        taken.append(entry)
    return taken, None


def gpus_of_job(machine: Machine) -> tuple[Gpu, ...]:
    """The GPUs of a job that starts here: those that are seen and that a mask leaves to it.

    The others are none of its business: a scheduler has given them to others.
    """
    return left(machine.cuda.visible_devices.value, machine.gpus.value or ())


def left(value: str | None, gpus: Sequence[Gpu]) -> tuple[Gpu, ...]:
    """The GPUs that a mask leaves to the job; all of them where unknown.

    Indices count the fastest GPU first (CUDA_DEVICE_ORDER), so that they name one only among
    GPUs of one model; under MIG they count instances.
    """
    everyone = tuple(gpus)
    uuids = [uuid for gpu in gpus for uuid in _uuids(gpu)]
    taken, _ = visible(value, len(gpus), uuids) if value is not None else ([], None)
    alike = len({gpu.name.value for gpu in gpus}) == 1 and all(gpu.name.is_known for gpu in gpus)
    chosen = set()
    for entry in taken:
        if entry.isdigit():
            if not alike or any(gpu.mig.value for gpu in gpus):
                return everyone
            chosen.add(int(entry))
        else:
            wanted = _plain(entry)
            found = [n for n, gpu in enumerate(gpus) if any(map(_begins(wanted), _uuids(gpu)))]
            if not found:
                return everyone
            chosen.update(found)
    return tuple(gpu for n, gpu in enumerate(gpus) if n in chosen) or everyone


def _uuids(gpu: Gpu) -> tuple[str, ...]:
    own = (gpu.uuid.value,) if gpu.uuid.value is not None else ()
    return own + (gpu.mig_instances.value or ())


def _begins(beginning: str) -> Callable[[str], bool]:
    return lambda uuid: uuid.startswith(beginning)


def _plain(entry: str) -> str:
    """A UUID that NVML knows: drivers before 470 wrote MIG-GPU-UUID/instance/instance."""
    if entry.startswith("MIG-GPU-"):
        return entry.partition("/")[0].removeprefix("MIG-")
    return entry


def _exists(entry: str, count: int, uuids: Sequence[str]) -> bool:
    if entry.isascii() and entry.isdigit():
        return int(entry) < count
    # Without any UUID known, one that looks right is believed.
    entry = _plain(entry)
    looks_right = entry.startswith(("GPU-", "MIG-"))
    known = [uuid for uuid in uuids if uuid.startswith(entry[:4])]
    return looks_right and (not known or any(uuid.startswith(entry) for uuid in known))
