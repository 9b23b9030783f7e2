"""What to set and to change, each with its reason and evidence."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable
from typing import Literal

#: Who gave a variable its value: the user's command, his script (until its first batch), or the
#: shell (or whatever else started trainfit); empty: nobody.
SetBy = Literal["command", "script", "shell", ""]
#: What a reason rests on; empty: it needs none ("the script has no DataLoader").
Evidence = Literal["measured", "predicted", "assumed", ""]


@dataclasses.dataclass(frozen=True)
class VariableAdvice:
    """A variable of the environment (or a call) to set, because of evidence.

    ``where`` is "environment", "worker_init_fn" or "script"; ``line`` what to write there.
    ``present`` is the variable's value now (``None``: it is not set) and ``set_by`` who set that.
    ``gain`` is what batches per second with the value are, divided by those as it is now,
    measured in real runs (``None``: these were not both made).
    """

    name: str
    value: str
    where: str
    line: str
    reason: str
    evidence: str
    present: str | None = None
    set_by: SetBy = ""
    gain: float | None = None


@dataclasses.dataclass(frozen=True)
class SettingReason:
    """One setting of a launch, with why it has its value: also one that is left as it is.

    ``name`` is what the user would search for ("num_workers", "OMP_NUM_THREADS", "CPU affinity").
    ``value`` is the recommended one and ``present`` the user's, as they are written (``None``: it
    is not set, nor is it to be); ``set_by`` is who set a variable. ``reason`` is one line, true of
    what was measured here, and ``evidence`` what it rests on. ``where`` it belongs: arguments are
    the DataLoader's (files of earlier versions say that of all).
    """

    name: str
    value: str | None
    present: str | None
    reason: str
    evidence: Evidence
    set_by: SetBy = ""
    where: Literal["argument", "environment", "wrapper"] = "argument"


@dataclasses.dataclass(frozen=True)
class CoreAdvice:
    """Which CPUs to run on: ``prefix`` goes before the command ("taskset -c 0-7"), or is what
    starts its ranks, in the place of ``python`` ("torchrun …")."""

    prefix: str
    cpus: tuple[int, ...]
    reason: str
    evidence: str


@dataclasses.dataclass(frozen=True)
class LoaderAdvice:
    """What would help beyond the settings, with its reason.

    ``kind`` is a stable identifier ("uint8", "fewer_tensors", "decoder_threads", "resize",
    "cache", "gpu_transforms", "frame_alignment", "in_order", …). ``batches_per_s`` is the
    end-to-end rate with it, ``gain`` that divided by the recommended setting's; both are ``None``
    where measured costs alone do not give them. Then ``share`` is the measured share that it
    concerns: of a batch's time, or for "uint8" and "fewer_tensors" of the time between batches.
    """

    kind: str
    summary: str
    how: str
    batches_per_s: float | None
    gain: float | None
    evidence: str
    share: float | None = None


def most_helpful_first(advice: Iterable[LoaderAdvice]) -> list[LoaderAdvice]:
    """Predicted gains, the largest first; then the largest shares."""

    def order(each: LoaderAdvice) -> tuple[bool, float]:
        return each.gain is None, -(each.gain or each.share or 0.0)

    return sorted(advice, key=order)
