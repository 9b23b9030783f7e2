"""Finds a loop's bottleneck by making each resource slightly faster in the simulation.

The costs that changes beyond the settings are judged by stand below it."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final

from trainfit.loader.measure.events import Cores
from trainfit.loader.measure.model import BatchCost, Load, Outcome, Transfer, simulate
from trainfit.results.dataloader import CostPart, LoaderMachine, LoaderSettings, Probe
from trainfit.results.loader import Limit
from trainfit.results.runs.measurement import Consumer

#: How much faster a resource is made, and the least part of that which the rate follows by
#: for it to be called what bounds.
_FASTER: Final = 0.1
_FOLLOWS: Final = 0.15
#: Of the cores, the share that is busy when they are what bounds.
_BUSY: Final = 0.85
#: From storage batches take this many times what they do from the page cache, or it is noise.
COLDER: Final = 1.1
#: Simulated batches: rounds of the queues, within bounds.
_ROUNDS: Final = 20
_LEAST: Final = 300
_MOST: Final = 3000


def limit(
    load: Load,
    settings: LoaderSettings,
    probe: Probe,
    outcome: Outcome | None = None,
) -> Limit:
    """What bounds the rate of ``load`` (with its consumer and cores) under these settings.

    The consumer, the hand-off, the making of batches, the sampler and the lock are each made
    10% faster; what the rate follows most is what bounds it. Where that is the making of
    batches, it is the number of workers if more of them would help, else the cores, the
    storage or a lock. "unknown" where the rate follows nothing by itself (uneven batches in
    short queues, say).

    Args:
        outcome: of these settings, if they were simulated before.
    """
    count = batches(settings)
    base = outcome.batches_per_s if outcome is not None else rate(load, settings, count)

    def follows(changed: Load) -> float:
        """The part of a 10% gain that the rate shows."""
        return (rate(changed, settings, count) / base - 1) / _GAIN

    if base == float("inf"):
        return "unknown"
    sensitivity: dict[Limit, float] = {
        "gpu": follows(dataclasses.replace(load, consumer=_faster_step(load.consumer))),
        "transfer": follows(dataclasses.replace(load, transfer=_faster_transfer(load.transfer))),
        "workers": follows(cheaper(load, wait=1 - _FASTER, work=1 - _FASTER)),
    }
    most = max(sensitivity, key=lambda key: sensitivity[key])
    if sensitivity[most] < _FOLLOWS:
        return "unknown"
    if most == "transfer":
        return "sampler" if _is_sampler(load, probe) else "transfer"
    return most if most == "gpu" else _of_making(load, settings, probe, base, count)


#: What a resource that takes 10% less gains, where it is all that bounds.
_GAIN: Final = 1 / (1 - _FASTER) - 1


def rate(load: Load, settings: LoaderSettings, count: int) -> float:
    """Batches per second in the steady state."""
    return simulate(load, settings, count).batches_per_s


def batches(settings: LoaderSettings) -> int:
    """Simulated batches that give a steady rate for these settings."""
    return min(_MOST, max(_LEAST, _ROUNDS * settings.tokens))


def cheaper(load: Load, wait: float, work: float) -> Load:
    """The same load with all waits of batches multiplied by ``wait``, and their work and pauses by
    ``work``."""

    def scaled(costs: Sequence[BatchCost]) -> tuple[BatchCost, ...]:
        return tuple(
            BatchCost(cost.wait_s * wait, cost.work_s * work, cost.width) for cost in costs
        )

    return dataclasses.replace(
        load,
        costs=scaled(load.costs),
        alone=scaled(load.alone),
        alone_pinned=scaled(load.alone_pinned),
        pauses=load.pauses.scaled(work),
    )


def _of_making(
    load: Load, settings: LoaderSettings, probe: Probe, base: float, count: int
) -> Limit:
    """Why batches are not made faster."""
    if settings.num_workers == 0:
        if any(fault.kind == "main_process_only" for fault in probe.faults):
            return "main_process"
        # On one core, or less, workers would only take turns with the main process.
        return "cores" if _is_busy(load, settings, count) else "workers"
    workers = settings.num_workers
    more = workers + max(1, workers // 4)
    gained = rate(load, dataclasses.replace(settings, num_workers=more), count) / base - 1
    if gained > 0.5 * (more / workers - 1):
        return "workers"
    waits = sum(cost.wait_s for cost in load.costs)
    works = sum(cost.work_s for cost in load.costs)
    of_disk = waits > works and _is_cold(probe)
    if _is_lock(load, base, settings, count):
        # Workers that wait for a disk wait for one another, too.
        return "disk" if of_disk else "lock"
    if _is_busy(load, settings, count):
        return "cores"
    return "disk" if of_disk else "unknown"


def _is_busy(load: Load, settings: LoaderSettings, count: int) -> bool:
    """Are nearly all cores busy?"""
    return simulate(load, settings, count).busy_cores >= _BUSY * capacity(load.cores)


def _is_lock(load: Load, base: float, settings: LoaderSettings, count: int) -> bool:
    """Would it help if less of a batch were under the lock that workers share?"""
    if load.locked_share <= 0:
        return False
    freed = dataclasses.replace(load, locked_share=load.locked_share * (1 - _FASTER))
    return rate(freed, settings, count) / base - 1 > _FOLLOWS * _GAIN


def _is_cold(probe: Probe) -> bool:
    """Do batches take longer from storage than from the page cache?"""
    storage = probe.storage
    if storage is None or storage.cold_s is None:
        return False
    return storage.cold_s > COLDER * storage.warm_s


def capacity(cores: Cores) -> float:
    """Cores of time that there are."""
    whole = float(len(cores.speeds))
    return whole if cores.quota is None else min(whole, cores.quota)


def _is_sampler(load: Load, probe: Probe) -> bool:
    """Is the sampler, which the main thread runs for each batch, half of the hand-off?"""
    cost = load.transfer
    other = cost.receive_s + cost.pin_s + max(0.0, cost.next_s - (probe.sampler_s or 0.0))
    return probe.sampler_s is not None and min(probe.sampler_s, cost.next_s) > other


def _faster_step(consumer: Consumer) -> Consumer:
    return Consumer(
        consumer.step_s * (1 - _FASTER),
        consumer.work_s * (1 - _FASTER),
        consumer.pageable_s * (1 - _FASTER),
    )


def _faster_transfer(transfer: Transfer) -> Transfer:
    times: dict[str, Any] = dataclasses.asdict(transfer)
    faster: dict[str, Any] = {
        name: None if s is None else s * (1 - _FASTER) for name, s in times.items()
    }
    return Transfer(**faster)


# ---
# What is looked at to find changes beyond a DataLoader's settings: costs, and what makes them.


_VIDEO: Final = ("av", "decord", "torchcodec", "pyav")
_IMAGES: Final = (
    *("PIL", "torchvision", "cv2", "simplejpeg", "turbojpeg", "skimage", "albumentations"),
    *("kornia", "imageio", "pyvips", "imgaug"),
)


@dataclass(frozen=True)
class MeasuredLoad:
    """What the remedies look at: a load as it is, with what was measured."""

    load: Load
    probe: Probe
    settings: LoaderSettings
    machine: LoaderMachine
    epoch_batches: int | None
    base: float
    count: int
    limit: Limit

    def share(self, *names: str) -> float:
        """The share of these parts in a batch's time."""
        return min(1.0, sum(part.share for part in self.probe.parts if part.name in names))

    def part(self, name: str) -> CostPart | None:
        return next((part for part in self.probe.parts if part.name == name), None)

    @property
    def waits_for_batches(self) -> bool:
        """Would the loop be faster if batches were?"""
        return self.limit not in ("gpu", "transfer", "sampler")

    def without(self, *names: str) -> Load:
        """The load without these parts of its time.

        Reading is taken from what batches wait for first, all else from their work.
        """
        costs = self.load.costs
        wait_s = sum(cost.wait_s for cost in costs) / len(costs)
        work_s = sum(cost.work_s for cost in costs) / len(costs)
        read_s = self.share(*({"read"} & set(names))) * self.batch_s
        other_s = self.share(*(set(names) - {"read"})) * self.batch_s
        from_wait = min(wait_s, read_s)
        from_work = min(work_s, other_s + read_s - from_wait)
        from_wait = min(wait_s, read_s + other_s - from_work)
        return cheaper(
            self.load,
            1 - from_wait / wait_s if wait_s else 1.0,
            1 - from_work / work_s if work_s else 1.0,
        )

    @property
    def batch_s(self) -> float:
        """Mean time per batch."""
        costs = self.load.costs
        return sum(cost.wait_s + cost.work_s for cost in costs) / len(costs)


@dataclass(frozen=True)
class LoaderChange:
    """One change: the share of the time that it concerns, or the load (and settings) with it."""

    kind: str
    summary: str
    how: str
    evidence: str
    share: float | None = None
    load: Load | None = None
    settings: LoaderSettings | None = None


def decoded_bytes(case: MeasuredLoad) -> int | None:
    probe = case.probe
    if not probe.samples or not probe.batch_size or not probe.batch_bytes:
        return None
    return probe.samples * probe.batch_bytes // probe.batch_size


def is_image(case: MeasuredLoad, name: str) -> bool:
    """Is this part's time spent in libraries for images?"""
    part = case.part(name)
    return any(what.split(".")[0] in _IMAGES for what in (part.what if part else ()))


def makes_images(case: MeasuredLoad) -> bool:
    return is_video(case) or any(is_image(case, name) for name in ("decode", "transform"))


def is_video(case: MeasuredLoad) -> bool:
    part = case.part("decode")
    words = (word for what in (part.what if part else ()) for word in what.split("."))
    return any(word in _VIDEO for word in words)
