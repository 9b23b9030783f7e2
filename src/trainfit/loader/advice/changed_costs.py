"""Changes beyond a DataLoader's settings: what each does to the measured costs.

No remedy is carried out here: each changes the load under an assumption that it states.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

from trainfit.loader.model.dataloader import Load
from trainfit.loader.model.garbage_collection import Pauses
from trainfit.loader.tune.bottleneck import COLDER, cheaper
from trainfit.results.files.words import size
from trainfit.results.loader import CostPart, LoaderMachine, LoaderSettings, Probe

#: Of available RAM, what a cache may take.
_CACHE_SHARE: Final = 0.8
#: Bytes per second that one core copies from RAM: half of what one core of present servers
#: reads (10 to 15 GB/s by STREAM). An assumption.
_COPY_BYTES_PER_S: Final = 5e9
#: What a GPU takes for transforms or decoding of a batch, of one core's time for it. An
#: assumption: published gains of whole batches on a GPU are tenfold and more.
_GPU_SHARE: Final = 0.1
#: What images of half the side cost to read and decode: a quarter of the pixels.
_HALF_SIDE: Final = 0.25
#: Of a video's decoded frames, those that were wanted: the rest lie between the keyframe
#: before and the frame itself.
_WANTED_FRAMES: Final = 0.5
#: How much of an ideal gain further threads of a video decoder give.
_THREAD_EFFICIENCY: Final = 0.8
_MOST_DECODER_THREADS: Final = 4
#: Tensors of a packed batch: one of each of the usual types.
_PACKED: Final = 2
#: Variation of batch costs from which order costs something (reference: 2% at 0.3).
_VARIES: Final = 0.2
#: Of a worker's time, what garbage collection takes at least to be worth a word.
_COLLECTS: Final = 0.05

_VIDEO: Final = ("av", "decord", "torchcodec", "pyav")
_IMAGES: Final = (
    *("PIL", "torchvision", "cv2", "simplejpeg", "turbojpeg", "skimage", "albumentations"),
    *("kornia", "imageio", "pyvips", "imgaug"),
)
#: Of a batch's time, what collating takes at least where calls for each sample are the cost.
_COLLATES: Final = 0.3


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

    def share(self, *names: str) -> float:
        """The share of these parts in a batch's time."""
        return min(1.0, sum(part.share for part in self.probe.parts if part.name in names))

    def part(self, name: str) -> CostPart | None:
        return next((part for part in self.probe.parts if part.name == name), None)

    def without(self, *names: str, left: float = 0.0) -> Load:
        """The load with these parts down to ``left`` of their time.

        Reading is taken from what batches wait for first, all else from their work.
        """
        costs = self.load.costs
        wait_s = sum(cost.wait_s for cost in costs) / len(costs)
        work_s = sum(cost.work_s for cost in costs) / len(costs)
        read_s = self.share(*({"read"} & set(names))) * (1 - left) * self.batch_s
        other_s = self.share(*(set(names) - {"read"})) * (1 - left) * self.batch_s
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
class Remedy:
    """One change, before it is known what it gains."""

    kind: str
    summary: str
    how: str
    assumed: str
    load: Load
    settings: LoaderSettings | None = None


# --- Hand-off ---------------------------------------------------------------------------------
def _uint8(case: Case) -> Remedy | None:
    """Bytes are copied when they are pinned (or by the driver, if not)."""
    probe, load = case.probe, case.load
    floats = probe.batch_bytes if probe.float_bytes is None else probe.float_bytes
    if not probe.batch_bytes or floats < probe.batch_bytes / 2 or not _makes_images(case):
        return None
    kept = 1 - 0.75 * floats / probe.batch_bytes
    transfer = dataclasses.replace(load.transfer, pin_s=load.transfer.pin_s * kept)
    consumer = dataclasses.replace(load.consumer, pageable_s=load.consumer.pageable_s * kept)
    sure = "are" if probe.float_bytes is not None else "are assumed to be"
    return Remedy(
        "uint8",
        "send images as uint8 and convert them to float32 on the GPU",
        "remove ToDtype/Normalize from the data set; batch = batch.to(device, "
        "non_blocking=True).float().div_(255) in the step",
        f"{size(floats)} of a batch's {size(probe.batch_bytes)} {sure} float32 that hold 8-bit "
        "values; copy time grows with bytes, transfer time with the number of tensors; the "
        "workers' conversion time is not included",
        dataclasses.replace(load, transfer=transfer, consumer=consumer),
    )


def _fewer_tensors(case: Case) -> Remedy | None:
    """Each tensor is transferred as a file with its own descriptor (rf-detr#1399)."""
    probe, load = case.probe, case.load
    tensors, samples = probe.batch_tensors, probe.batch_size or 0
    if case.settings.num_workers == 0 or tensors <= 2 * _PACKED:
        return None
    per_sample = samples > 1 and tensors >= samples
    packed = math.ceil(tensors / samples) + _PACKED if per_sample else _PACKED
    if packed >= tensors:
        return None
    kept = packed / tensors
    transfer = dataclasses.replace(
        load.transfer,
        receive_s=load.transfer.receive_s * kept,
        busy_wait_s=load.transfer.busy_wait_s * kept,
    )
    return Remedy(
        "fewer_tensors",
        f"pack the {tensors} tensors of a batch into {packed}",
        "concatenate the samples' tensors of one field in collate_fn, with their lengths, and "
        "split() them in the step",
        "transferring a batch costs time per tensor "
        f"({1e3 * load.transfer.receive_s / tensors:.2g} ms each, as measured for {tensors})",
        dataclasses.replace(load, transfer=transfer),
    )


def _sampler(case: Case) -> Remedy | None:
    probe, transfer = case.probe, case.load.transfer
    if probe.sampler_s is None or probe.sampler_s > transfer.next_s:
        return None
    return Remedy(
        "sampler",
        "precompute the sampler's indices",
        "draw an epoch's indices at once with torch.randperm (weighted: torch.multinomial) "
        "and yield from them",
        f"the sampler needs {1e3 * probe.sampler_s:.2g} ms per batch in the main thread; iterating "
        "over a list costs almost nothing",
        dataclasses.replace(
            case.load,
            transfer=dataclasses.replace(transfer, next_s=transfer.next_s - probe.sampler_s),
        ),
    )


# --- What a batch costs -----------------------------------------------------------------------
def _resize(case: Case) -> Remedy | None:
    if _is_video(case) or not _is_image(case, "decode"):
        return None
    return Remedy(
        "resize",
        "store the images smaller, close to the model's input size",
        "re-encode once (PIL: image.draft and thumbnail, quality 95) into a copy of the data set",
        "at half the side length they need a quarter of the time to read and decode "
        f"({case.share('read', 'decode'):.0%} of a batch now); whether they are that "
        "much larger than the model's input was not checked",
        case.without("read", "decode", left=_HALF_SIDE),
    )


def _cache(case: Case) -> Remedy | None:
    """Decoded samples in RAM, if all of them fit."""
    probe = case.probe
    total = _decoded_bytes(case)
    free = case.machine.available_bytes
    if total is None or free is None or case.share("read", "decode") == 0:
        return None
    if total > _CACHE_SHARE * free:
        return None
    copied = case.without("read", "decode")
    extra = probe.batch_bytes / _COPY_BYTES_PER_S
    added = dataclasses.replace(
        copied,
        costs=tuple(dataclasses.replace(c, work_s=c.work_s + extra) for c in copied.costs),
        alone=tuple(dataclasses.replace(c, work_s=c.work_s + extra) for c in copied.alone),
    )
    return Remedy(
        "cache",
        f"keep decoded samples in RAM: {size(total)} of {size(free)} available",
        "decode once into a shared tensor (torch.empty(...).share_memory_()) or a .npy file "
        "that each worker opens with mmap_mode='r'",
        f"a decoded sample is assumed to be as large as in the batch; {probe.samples} samples; "
        "reading and decoding become a copy at 5 GB/s, transforms stay",
        added,
    )


def _decoded_bytes(case: Case) -> int | None:
    probe = case.probe
    if not probe.samples or not probe.batch_size or not probe.batch_bytes:
        return None
    return probe.samples * probe.batch_bytes // probe.batch_size


def _to_gpu(case: Case, name: str, kind: str, summary: str, how: str) -> Remedy | None:
    share = case.share(name)
    if share == 0:
        return None
    added = share * case.batch_s * _GPU_SHARE
    load = case.without(name)
    consumer = dataclasses.replace(load.consumer, step_s=load.consumer.step_s + added)
    return Remedy(
        kind,
        summary,
        how,
        f"{name} is {share:.0%} of a batch's time; on the GPU it is assumed to add a "
        f"tenth of that ({1e3 * added:.2g} ms) to the step",
        dataclasses.replace(load, consumer=consumer),
    )


def _gpu_transforms(case: Case) -> Remedy | None:
    if not _makes_images(case):
        return None
    return _to_gpu(
        case,
        "transform",
        "gpu_transforms",
        "run the transforms on the GPU, on whole batches",
        "torchvision.transforms.v2 or kornia on the batch, after .to(device); random ones "
        "then draw once per batch unless the library draws per sample",
    )


def _gpu_decoding(case: Case) -> Remedy | None:
    how = "torchvision.io.decode_jpeg(list_of_bytes, device='cuda') (JPEG only), or NVIDIA DALI"
    if _is_video(case):
        how = "torchcodec.decoders.VideoDecoder(path, device='cuda') in the main process"
    elif not _is_image(case, "decode"):
        return None
    return _to_gpu(case, "decode", "gpu_decoding", "decode on the GPU", how)


def _decoder_threads(case: Case) -> Remedy | None:
    """Threads within a sample, where cores are idle that workers do not use."""
    spare = case.machine.usable_cores / max(1, case.settings.num_workers)
    threads = min(_MOST_DECODER_THREADS, int(spare))
    single = case.probe.threads is not None and case.probe.threads < 1.2
    if not _is_video(case) or threads < 2 or not single:
        return None
    return Remedy(
        "decoder_threads",
        f"decode video with {threads} threads",
        f'stream.thread_type = "FRAME"; stream.codec_context.thread_count = {threads} (PyAV), '
        f"num_ffmpeg_threads={threads} (torchcodec), num_threads={threads} (decord)",
        f"one thread was busy, {spare:.1f} cores per worker are free; {threads} threads are "
        f"assumed to be {threads * _THREAD_EFFICIENCY:.1f} times as fast at decoding "
        f"({case.share('decode'):.0%} of a batch)",
        case.without("decode", left=1 / (threads * _THREAD_EFFICIENCY)),
    )


def _frame_alignment(case: Case) -> Remedy | None:
    if not _is_video(case):
        return None
    return Remedy(
        "frame_alignment",
        "store videos with keyframes where samples begin",
        "re-encode with a short keyframe interval (ffmpeg -g 2 for single frames; for clips the "
        "clip's length), or store the frames as images",
        "to reach a frame, all frames since the previous keyframe are decoded; keyframes "
        "where samples begin are assumed to save half of the decoding (more with long intervals)",
        case.without("decode", left=_WANTED_FRAMES),
    )


def _is_image(case: Case, name: str) -> bool:
    """Is this part's time spent in libraries for images?"""
    part = case.part(name)
    return any(what.split(".")[0] in _IMAGES for what in (part.what if part else ()))


def _makes_images(case: Case) -> bool:
    return _is_video(case) or any(_is_image(case, name) for name in ("decode", "transform"))


def _is_video(case: Case) -> bool:
    part = case.part("decode")
    words = (word for what in (part.what if part else ()) for word in what.split("."))
    return any(word in _VIDEO for word in words)


def _batched_indexing(case: Case) -> Remedy | None:
    """Tiny samples in RAM: Python's calls for each of them are the cost (pytorch#154318)."""
    total, free = _decoded_bytes(case), case.machine.available_bytes
    if total is None or free is None or total > _CACHE_SHARE * free:
        return None
    if not case.probe.parts or case.share("read", "decode", "transform") > 0.5:
        return None
    stored = case.probe.storage
    if case.share("collate") < _COLLATES or (stored is not None and stored.files):
        return None
    copy_s = case.probe.batch_bytes / _COPY_BYTES_PER_S
    kept = min(1.0, case.share("transform") + copy_s / max(case.batch_s, copy_s))
    return Remedy(
        "batched_indexing",
        "fetch a whole batch with one indexing operation instead of sample by sample",
        "give the data set __getitems__(indices) that indexes tensors once, and a collate_fn "
        "that passes the result on",
        f"{size(total)} fit in RAM, and {case.share('collate', 'unknown'):.0%} of a batch "
        "is collation and calls; one indexing copies it at 5 GB/s",
        cheaper(case.load, kept, kept),
    )


def _storage(case: Case) -> Remedy | None:
    storage = case.probe.storage
    if storage is None or storage.cold_s is None or storage.cold_s < COLDER * storage.warm_s:
        return None
    waits = sum(cost.wait_s for cost in case.load.costs) / len(case.load.costs)
    if waits <= 0:
        return None
    left = max(0.0, 1 - (storage.cold_s - storage.warm_s) / waits)
    return Remedy(
        "storage",
        "keep the files on fast storage: a local NVMe disk, or the page cache",
        "copy the data set to the machine's own disk before training, in few large files",
        f"a batch needs {1e3 * storage.cold_s:.3g} ms from storage and "
        f"{1e3 * storage.warm_s:.3g} ms from the page cache; the difference is assumed saved",
        cheaper(case.load, left, 1.0),
    )


def _garbage(case: Case) -> Remedy | None:
    """A full collection looks at every object of the process, its imports among them; code that
    makes many objects for each sample sets it off every few batches."""
    share = case.probe.collecting
    if share is None or share < _COLLECTS:
        return None
    return Remedy(
        "gc_freeze",
        "exclude existing objects from Python's garbage collection",
        "import gc; gc.freeze() in worker_init_fn (without workers: before the loop)",
        f"{share:.0%} of a worker's time is garbage collection, triggered by the many objects "
        "that each sample creates; all of it is assumed to be saved",
        # Without workers what a batch costs contains them.
        dataclasses.replace(
            cheaper(case.load, 1.0, 1 - share), costs=case.load.costs, pauses=Pauses()
        ),
    )


def _in_order(case: Case) -> Remedy | None:
    settings, variation = case.settings, case.probe.variation
    if not settings.in_order or settings.num_workers < 2:
        return None
    if variation is None or variation < _VARIES:
        return None
    return Remedy(
        "in_order",
        "return batches as they are ready: in_order=False",
        "DataLoader(..., in_order=False), since PyTorch 2.6; the order of batches then differs "
        "from run to run",
        f"batch times vary by {variation:.0%} of their mean; in order, each batch waits for "
        "slower ones before it",
        case.load,
        dataclasses.replace(settings, in_order=False),
    )


REMEDIES: Final[tuple[Callable[[Case], Remedy | None], ...]] = (
    _uint8,
    _fewer_tensors,
    _sampler,
    _resize,
    _cache,
    _gpu_transforms,
    _gpu_decoding,
    _decoder_threads,
    _frame_alignment,
    _batched_indexing,
    _storage,
    _garbage,
    _in_order,
)
