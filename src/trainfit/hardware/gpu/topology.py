"""Several GPUs of one machine by name ("8x H100 SXM"), and the link between them."""

from __future__ import annotations

import dataclasses
import re
from typing import Final

from trainfit.hardware.gpu.figures import GpuNameError
from trainfit.hardware.gpu.lookup import find_gpu, find_rented
from trainfit.results.gpus import GpuSpec

_ASSUMED: Final = "assumed: "
#: GPUs that one machine has at most: HGX boards have 8, NVIDIA's DGX-2 16.
MOST_GPUS: Final = 16

_COUNT: Final = re.compile(r"\s*(\d+)\s*[x\u00d7]\s*(.+)", re.IGNORECASE | re.DOTALL)


def named_count(name: str) -> int | None:
    """The number of GPUs that ``name`` says ("8x H100 SXM"); ``None``: it says none.

    A rented machine says how many it has.
    """
    if rented := find_rented(name):
        return rented.gpus if rented.gpus > 1 else None
    found = _COUNT.match(name)
    return int(found[1]) if found else None


def find_gpus(name: str) -> GpuSpec:
    """The GPU that ``name`` means, with the ``count`` of them in the machine.

    Raises:
        GpuNameError: as :func:`find_gpu` does, and for a number that no machine has, or for
            several machines.
    """
    found = None if find_rented(name) else _COUNT.match(name)
    if found is None:
        return find_gpu(name)
    count, each = int(found[1]), found[2]
    if each.lstrip().startswith("(") or _COUNT.match(each):
        raise GpuNameError(
            name, "several machines are not simulated yet: name one of them, as in 8x H100 SXM"
        )
    if not 1 <= count <= MOST_GPUS:
        raise GpuNameError(name, f"expected 1 to {MOST_GPUS} GPUs in a machine, not {count}")
    return dataclasses.replace(find_gpu(each), count=count)


def with_ranks(gpu: GpuSpec, processes: int) -> GpuSpec:
    """``gpu`` in a machine that has one for each process; what is assumed is said of it."""
    if gpu.count >= processes:
        return gpu
    note = f"{processes} GPUs of this kind in one machine, one for each process"
    before = gpu.sources.get("key", "")
    if before.startswith(_ASSUMED):
        note = f"{before.removeprefix(_ASSUMED)}; {note}"
    return dataclasses.replace(
        gpu, count=processes, sources={**gpu.sources, "key": f"{_ASSUMED}{note}"}
    )
