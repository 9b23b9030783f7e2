"""The batches of a run: at which sizes they are full, and which represents those that differ."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator
from typing import Final

from trainfit.plan.runs.failures import what_happened
from trainfit.plan.runs.tracing import Trace, recording_of
from trainfit.results.findings import LAST_BATCH, Finding, Fix, Place
from trainfit.results.runs.recording import Recording
from trainfit.results.runs.spec import RunSpec
from trainfit.results.runs.trace import LoaderInfo, SampleOverride, SampleScan
from trainfit.results.text import count
from trainfit.scripts.step_makeup import most_frequent
from trainfit.simgpu.device.settling import LEAST_STEPS


def data_set_of(trace: Trace, batch: int | None) -> int | None:
    """Samples of an epoch, of a run at ``batch``, or of the data set, where the sampler draws it
    several times; ``None`` where they are not known."""
    loader = trace.outcome.loader
    if loader is None:
        return None
    if not loader.samples and loader.fed and not is_full(trace, batch):
        return loader.fed[0]
    shared = shared_by(trace, batch)
    samples = loader.samples * shared if loader.samples else None
    data_set = loader.data_set * joined_by(trace) if loader.data_set else None
    return min(filter(None, (samples, data_set)), default=None)


def shared_by(trace: Trace, batch: int | None) -> int:
    """Processes that a batch is divided among: 8, where the batch size is 32 and each of 8 gets 4
    samples of it (Accelerate's ``split_batches``, ultralytics' ``batch``, a script that divides by
    the number of ranks); 1 where each has a batch of that size to itself. Likewise DataLoaders of
    which a step joins a batch each."""
    loader, recording = trace.outcome.loader, trace.recording
    ranks = recording.ranks if recording is not None else 1
    for parts in (ranks, joined_by(trace)):
        if loader is not None and loader.fed and parts * loader.fed[0] == batch:
            return parts
    return 1


def unit_of(trace: Trace, batch: int | None) -> int:
    """What a batch size has to be a multiple of: processes that share a batch, each of which gets
    whole groups of samples."""
    loader, shared = trace.outcome.loader, shared_by(trace, batch)
    group = 1 if loader is None else loader.group
    # A script that goes with other sizes has shown that it does not ask for whole groups.
    return shared * group if batch is None or not batch % (shared * group) else shared


def joined_by(trace: Trace) -> int:
    """DataLoaders of which the model is called with a batch each, in equal shares; 1: with one's,
    or of several ones' in turn."""
    return most_frequent([feed.loaders for feed in trace.outcome.feeds] or [1])


def drops_last(trace: Trace) -> bool:
    """Is what remains of an epoch after its last full batch left out?"""
    loader = trace.outcome.loader
    return loader is not None and loader.drops_last


def samples_used(trace: Trace, batch: int | None) -> int | None:
    """The samples of an epoch that its batches have; ``None``: not known."""
    loader = trace.outcome.loader
    samples = (loader.epoch_samples or 0) * joined_by(trace) if loader is not None else None
    if not samples or not batch or not drops_last(trace) or samples < batch:
        return samples or None
    return samples - samples % batch


def is_full(trace: Trace, batch: int | None) -> bool:
    """Was the first batch as large as was asked for, as far as can be told?"""
    loader = trace.outcome.loader
    if loader is None or batch is None or not loader.fed:
        return True
    return loader.fed[0] * shared_by(trace, batch) >= batch


def full_steps(trace: Trace) -> int | None:
    """Optimizer steps at the beginning of a run whose batches are all full, at least 1; ``None``:
    as far as is known all of them.

    Of a data set of 400 samples, the second batch of 384 has 16.
    """
    loader, recording = trace.outcome.loader, trace.recording
    if loader is None or not loader.samples or not loader.fed or recording is None:
        return None
    return max(1, loader.samples // max(loader.fed[0], 1) // _batches_of_step(recording))


def most_timed(trace: Trace, batch: int | None) -> int | None:
    """The largest batch size of which an epoch has two steps, where the run at hand, of ``batch``,
    has one and so tells no step's time; ``None`` where it tells it, or more is not known.

    What a script does after a step counts to the step that follows.
    """
    loader = trace.outcome.loader
    if full_steps(trace) != 1 or loader is None or not loader.samples:
        return None
    return half_epoch(trace, loader.samples * shared_by(trace, batch))


def half_epoch(trace: Trace, samples: int | None) -> int | None:
    """The largest batch size of which an epoch of so many samples has two steps, each of as many
    batches as in this run; ``None`` where the samples are not known."""
    if not samples or trace.recording is None:
        return None
    return max(1, samples // (2 * _batches_of_step(trace.recording)))


def _batches_of_step(recording: Recording) -> int:
    makeup = recording.makeup
    return (makeup.loader_batches if makeup is not None else None) or 1


def full_part(trace: Trace) -> Recording:
    """The run's steps whose batches are full."""
    recording, full = recording_of(trace), full_steps(trace)
    return recording if full is None else recording.first_steps(min(full, recording.steps))


def most_full(first: Trace, batch: int | None) -> int | None:
    """The largest batch size at which every batch of the run is full; ``None``: any.

    A data set that is used up before the run ends gives a short last batch, after which
    nothing scales with the batch size.
    """
    loader, shared = first.outcome.loader, shared_by(first, batch)
    if loader is None or loader.samples is None or loader.batch_size is None:
        return None
    if batch not in (loader.batch_size, shared * loader.batch_size):
        return None
    # Other batch sizes are compared over the least number of steps.
    share = min(1.0, LEAST_STEPS / max(first.outcome.steps, 1))
    return loader.samples * shared // max(math.ceil(loader.batches * share), 1)


def pairs_of(batch: int, most: int | None, gpus: int = 1) -> Iterator[tuple[int, int]]:
    """Pairs of batch sizes to derive the law from, in the order of preference.

    The present one is among them if it can. Not 1: with one sample, strides are trivially
    contiguous and copies disappear. A process that divides its batch among ``gpus`` does not give
    one more sample to all of them.
    """
    if batch > 1 and (most is None or batch <= most):
        found = [(batch, other) for other in (2 * batch, batch + gpus, batch - gpus, batch // 2)]
    elif batch == 1:
        found = [(2, 4), (2, 3)]
    else:
        assert most is not None
        found = [(most // 2, most), (most - 1, most)]
    for one, other in dict.fromkeys(found):
        if min(one, other) > 1 and one != other and (most is None or max(one, other) <= most):
            yield one, other


# ---
# Batches that differ in more than their number of samples: the batch that represents them.


#: Where usual batches are nearly as long as the longest, runs with the longest time them, too.
_AS_LONG: Final = 0.1


@dataclasses.dataclass(frozen=True)
class VaryingShapes:
    """The samples that are simulated in the place of all: memory must hold the largest batch,
    throughput is that of the median sample, or of what usual batches are padded to. ``None`` where
    the data set's samples do not tell; ``reason`` says why (empty: those that were looked at have
    one size). ``is_seen``: batches of the run differ in shape."""

    scan: SampleScan
    longest: SampleOverride | None = None
    typical: SampleOverride | None = None
    reason: str = ""
    is_seen: bool = True

    @property
    def matter(self) -> bool:
        """Is the run as the command is written none to derive other batch sizes from?"""
        return self.is_seen or self.longest is not None

    def sized(self, spec: RunSpec) -> RunSpec:
        """Runs for memory: each batch the largest."""
        return dataclasses.replace(spec, sample=self.longest)

    def timed(self, spec: RunSpec) -> RunSpec:
        """Runs for step times: each batch of one sample that stands for all."""
        return dataclasses.replace(spec, sample=self.typical)

    def without(self, reason: str) -> VaryingShapes:
        """The same shapes, where the largest batch cannot be simulated for this ``reason``."""
        return dataclasses.replace(self, longest=None, typical=None, reason=reason)


def varying_shapes(first: Trace) -> VaryingShapes | None:
    """The shapes of a run as the command is written; ``None`` where all full batches have one
    shape."""
    loader = first.outcome.loader
    if loader is None:
        return None
    scan, is_seen = loader.scan, loader.varies
    if scan is None:
        gone = "the DataLoader no longer existed at the end of the run"
        if first.outcome.status not in ("finished", "ended"):
            gone = "the run stopped before the samples were looked at"
        varies = is_seen or _has_own_sizes(loader)
        return VaryingShapes(SampleScan(reason=gone), reason=gone) if varies else None
    if scan.reason or loader.index is None:
        reason = scan.reason or "its DataLoader is not known"
        return VaryingShapes(scan, reason=reason, is_seen=is_seen)
    if not scan.varying:
        why = "its samples have one size: batches differ only after that" if is_seen else ""
        if scan.tells_all and not why:
            return None
        return VaryingShapes(scan, reason=why, is_seen=is_seen)
    longest = scan.largest_batch(loader.index)
    return VaryingShapes(scan, longest, _typical(scan, longest), is_seen=is_seen)


def _typical(scan: SampleScan, longest: SampleOverride) -> SampleOverride | None:
    """What stands for all batches in time; ``longest`` itself where it is about as long; ``None``:
    the batches as they come."""
    if scan.whole:
        return None
    if scan.padded is None:
        return SampleOverride(longest.index, scan.typical)
    if scan.longest_elements - scan.padded_elements <= _AS_LONG * scan.longest_elements:
        return longest
    return dataclasses.replace(longest, key=scan.padded, largest=())


def _has_own_sizes(loader: LoaderInfo) -> bool:
    """Does its sampler decide how many samples a batch has?"""
    return loader.batch_size is None and len(set(loader.fed)) > 1


def unknown_batch(present: Trace) -> str:
    """Why a run has no batch size that could be another, and what to do."""
    loader = present.outcome.loader
    if loader is not None and _has_own_sizes(loader):
        return (
            f"the sampler decides how many samples a batch has ({min(loader.fed)} to "
            f"{max(loader.fed)} in those seen); --solve NAME finds the largest value of the option "
            "that limits them"
        )
    return (
        "the batch size is not known: no DataLoader with a batch size fed the first step; write "
        "{batch_size:N} into the command"
    )


# ---
# The last batch of an epoch: the samples that are left over, with which some scripts fail.
#
# BatchNorm raises in training with a single sample ("Expected more than 1 value per channel"),
# ``squeeze()`` drops the batch's own dimension, and a state or a view of ``batch_size`` rows does
# not match: hours into a run, at the end of the first epoch.


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
    """The finding on a run with such a last batch, which ``failed``, as it did not with full
    ones."""
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
