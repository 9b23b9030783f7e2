"""What is looked at to find changes beyond a DataLoader's settings: costs, and what makes them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from trainfit.loader.model.bottleneck import cheaper
from trainfit.loader.model.load import Load
from trainfit.results.loader.candidates import LoaderMachine
from trainfit.results.loader.probe import CostPart, Probe
from trainfit.results.loader.result import Limit
from trainfit.results.loader.settings import LoaderSettings

_VIDEO: Final = ("av", "decord", "torchcodec", "pyav")
_IMAGES: Final = (
    *("PIL", "torchvision", "cv2", "simplejpeg", "turbojpeg", "skimage", "albumentations"),
    *("kornia", "imageio", "pyvips", "imgaug"),
)


@dataclass(frozen=True)
class Case:
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


def decoded_bytes(case: Case) -> int | None:
    probe = case.probe
    if not probe.samples or not probe.batch_size or not probe.batch_bytes:
        return None
    return probe.samples * probe.batch_bytes // probe.batch_size


def is_image(case: Case, name: str) -> bool:
    """Is this part's time spent in libraries for images?"""
    part = case.part(name)
    return any(what.split(".")[0] in _IMAGES for what in (part.what if part else ()))


def makes_images(case: Case) -> bool:
    return is_video(case) or any(is_image(case, name) for name in ("decode", "transform"))


def is_video(case: Case) -> bool:
    part = case.part("decode")
    words = (word for what in (part.what if part else ()) for word in what.split("."))
    return any(word in _VIDEO for word in words)
