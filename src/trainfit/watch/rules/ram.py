"""RAM and /dev/shm that are nearly used up."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

from trainfit.findings import fixes
from trainfit.results.findings import Evidence, Finding, Fix
from trainfit.watch import thresholds
from trainfit.watch.checks import loader_settings
from trainfit.watch.rules.rule import Rule
from trainfit.watch.view import RunView, known

_GIB: Final = 2**30


def _find_short_host_memory(run: RunView) -> Iterator[Finding]:
    """Of the judged rank's machine, at the worst moment."""
    view = run.judged
    if not len(view.steps):
        return
    machine, ram = view.machine, view.header.ram_bytes
    left = known(machine["ram_available_bytes"])
    if ram and len(left) and left.min() < thresholds.RAM_LEFT * ram:
        yield Finding(
            "ram_near_limit",
            "critical",
            "RAM is nearly used up",
            (
                Evidence("least available", float(left.min()) / _GIB, "GiB"),
                Evidence("of", ram / _GIB, "GiB"),
            ),
            "when RAM runs out, the kernel kills a process, usually a DataLoader worker",
            (Fix(fixes.memory(loader_settings(view.header))),),
            "certain",
        )
    free, used = known(machine["shm_free_bytes"]), known(machine["shm_used_bytes"])
    if len(free) and len(used):
        whole = float(free[-1] + used[-1])
        if whole and free.min() < thresholds.SHM_LEFT * whole:
            yield Finding(
                "shm_near_limit",
                "critical",
                "/dev/shm is nearly full",
                (
                    Evidence("least free", float(free.min()) / _GIB, "GiB"),
                    Evidence("of", whole / _GIB, "GiB"),
                ),
                "batches of workers wait there for the main process",
                (Fix(fixes.shm(loader_settings(view.header), None)),),
                "certain",
            )


HOST_MEMORY: Final = Rule(
    ("ram_near_limit", "shm_near_limit"), _find_short_host_memory, each_rank=True
)

RULES: Final = (HOST_MEMORY,)
