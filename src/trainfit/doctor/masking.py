"""What CUDA_VISIBLE_DEVICES leaves of the GPUs, by CUDA's rules.

CUDA reads a list of indices, or of UUIDs (of which a beginning is enough), and takes those
before the first that it does not know: docs.nvidia.com/cuda/cuda-c-programming-guide, "CUDA
Environment Variables".
"""

from __future__ import annotations

from collections.abc import Sequence


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


def _exists(entry: str, count: int, uuids: Sequence[str]) -> bool:
    if entry.isascii() and entry.isdigit():
        return int(entry) < count
    # Without any UUID known, one that looks right is believed.
    if entry.startswith("MIG-GPU-"):  # of drivers before 470: MIG-GPU-UUID/instance/instance
        entry = entry.partition("/")[0].removeprefix("MIG-")
    looks_right = entry.startswith(("GPU-", "MIG-"))
    known = [uuid for uuid in uuids if uuid.startswith(entry[:4])]
    return looks_right and (not known or any(uuid.startswith(entry) for uuid in known))
