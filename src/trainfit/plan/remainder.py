"""The last batch of an epoch: the samples that are left over, with which some scripts fail.

BatchNorm raises in training with a single sample ("Expected more than 1 value per channel"),
``squeeze()`` drops the batch's own dimension, and a state or a view of ``batch_size`` rows does not
match: hours into a run, at the end of the first epoch.
"""

from __future__ import annotations

from typing import Final

from trainfit.plan.runs.batches import drops_last
from trainfit.plan.runs.failures import what_happened
from trainfit.plan.runs.tracing import Trace
from trainfit.results.findings import LAST_BATCH, Finding, Fix, Place
from trainfit.results.text import count

#: Batch sizes next to one that are looked at for one that leaves nothing that fails.
_NEAR: Final = 8


def remainder_of(first: Trace, present: int | None, batch: int | None) -> int:
    """Samples of the last batch of an epoch at a batch size; 0: all are full, or that is not known.

    ``first`` is the run at the ``present`` one, of which the DataLoader gives batches.
    """
    loader = first.outcome.loader
    if loader is None or not batch or drops_last(first) or loader.fed[:1] != (present,):
        return 0
    samples = loader.samples
    return samples % batch if samples and loader.epoch_samples == samples > batch else 0


def last_batch_fails(first: Trace, batch: int, failed: Trace) -> Finding:
    """Of a run with such a last batch, which ``failed``, as it did not with full ones."""
    loader, outcome = first.outcome.loader, failed.outcome
    samples = (loader.samples if loader is not None else None) or 0
    left = samples % batch
    title = (
        f"the last batch of an epoch has {count(left, 'sample')} ({samples} = "
        f"{samples // batch} × {batch} + {left}), with which {what_happened(outcome)}"
    )
    near = [size for size in _near(batch) if _is_safe(samples % size, left)][:2]
    other = f", or a batch size of {' or '.join(map(str, near))}" if near else ""
    return Finding(
        LAST_BATCH,
        "critical",
        title,
        fixes=(Fix(f"set drop_last=True in the DataLoader{other}"),),
        place=Place.parse(outcome.location or ""),
        subject=str(batch),
    )


def _is_safe(left: int, failed: int) -> bool:
    """A single sample is what fails at times; of others, nothing but full batches is known not
    to."""
    return left != 1 if failed == 1 else left == 0


def _near(batch: int) -> list[int]:
    """Batch sizes around ``batch``, the nearest first."""
    return [
        size
        for distance in range(1, _NEAR + 1)
        for size in (batch - distance, batch + distance)
        if size > 1
    ]
