"""Changes beyond the settings that would help: with the simulated rate where measured costs give
it, else with the measured share of the time that they concern.

What gains less than 3%, or concerns less than 10%, is left out, and so is everything where the GPU
is the limit.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from typing import Final

from trainfit.loader.bottleneck import (
    COLDER,
    LoaderChange,
    MeasuredLoad,
    batches,
    cheaper,
    decoded_bytes,
    is_image,
    is_video,
    limit,
    makes_images,
    rate,
)
from trainfit.loader.measure.model import Load, Pauses, simulate
from trainfit.results.dataloader import LoaderMachine, LoaderSettings, Probe, StartMethod
from trainfit.results.findings import Finding
from trainfit.results.loader import advice_finding, most_helpful_first
from trainfit.results.runs.measurement import Consumer
from trainfit.results.text import cores, count, duration, percent, size
from trainfit.results.text import rate as rate_text

# ---
# Changes beyond a DataLoader's settings: the measured reason of each, and what it does to the
# measured costs where these alone give it.
#
# No remedy is carried out here. What a change gains is predicted where it takes away a cost that
# was measured; of any other the reason is the measured share of the time that it concerns.


#: Of available RAM, what a cache may use.
_CACHE_SHARE: Final = 0.8
#: Decoder threads that are advised at the most.
_MOST_DECODER_THREADS: Final = 4
#: Tensors of a batch from which packing them is advised.
_MANY_TENSORS: Final = 5
#: Variation of batch costs from which order costs something (reference: 2% at 0.3).
_VARIES: Final = 0.2
#: Of a worker's time, what garbage collection takes at least to be worth a word.
_COLLECTS: Final = 0.05
#: Of a batch's time, what collating takes at least where calls for each sample are the cost.
_COLLATES: Final = 0.3


# --- Transfer to the main process ---------------------------------------------------------------
def _uint8(case: MeasuredLoad) -> LoaderChange | None:
    """Bytes are copied when they are pinned (or by the driver, if not)."""
    probe, load = case.probe, case.load
    floats = probe.batch_bytes if probe.float_bytes is None else probe.float_bytes
    if not probe.batch_bytes or floats < probe.batch_bytes / 2 or not makes_images(case):
        return None
    if not case.settings.pin_memory or case.limit != "transfer":
        return None
    sure = "are" if probe.float_bytes is not None else "may be"
    return LoaderChange(
        "uint8",
        "send images as uint8 and convert them to float32 on the GPU",
        "remove ToDtype/Normalize from the data set; batch = batch.to(device, "
        "non_blocking=True).float().div_(255) in the step",
        f"copying a batch into pinned memory needs {duration(load.transfer.pin_s)}; "
        f"{size(floats)} of its {size(probe.batch_bytes)} {sure} float32 that hold 8-bit values, "
        "four times their bytes",
        load.transfer.pin_s * case.base,
    )


def _fewer_tensors(case: MeasuredLoad) -> LoaderChange | None:
    """Each tensor is transferred as a file with its own descriptor (rf-detr#1399)."""
    tensors, receive_s = case.probe.batch_tensors, case.load.transfer.receive_s
    if case.settings.num_workers == 0 or tensors < _MANY_TENSORS or case.limit != "transfer":
        return None
    return LoaderChange(
        "fewer_tensors",
        f"pack the {tensors} tensors of a batch into one for each field",
        "concatenate the samples' tensors of one field in collate_fn, with their lengths, and "
        "split() them in the step",
        f"receiving a batch needs {duration(receive_s)}, {duration(receive_s / tensors)} for each "
        "tensor",
        receive_s * case.base,
    )


def _sampler(case: MeasuredLoad) -> LoaderChange | None:
    probe, transfer = case.probe, case.load.transfer
    if probe.sampler_s is None or probe.sampler_s > transfer.next_s:
        return None
    return LoaderChange(
        "sampler",
        "precompute the sampler's indices",
        "draw an epoch's indices at once with torch.randperm (weighted: torch.multinomial) "
        "and yield from them",
        f"the sampler needs {duration(probe.sampler_s)} per batch in the main thread; iterating "
        "over a list costs almost nothing",
        load=dataclasses.replace(
            case.load,
            transfer=dataclasses.replace(transfer, next_s=transfer.next_s - probe.sampler_s),
        ),
    )


# --- What a batch costs -----------------------------------------------------------------------
def _of_batch(
    case: MeasuredLoad, parts: tuple[str, ...], kind: str, summary: str, how: str, why: str
) -> LoaderChange | None:
    """What makes these parts of a batch's time shorter, by how much is not known."""
    part = case.share(*parts)
    if not part or not case.waits_for_batches:
        return None
    text = f"{_PARTS[parts]} {percent(part)} of a batch's time"
    return LoaderChange(kind, summary, how, f"{text}; {why}" if why else text, part)


_PARTS: Final = {
    ("read", "decode"): "reading and decoding are",
    ("decode",): "decoding is",
    ("transform",): "transforms are",
}


def _resize(case: MeasuredLoad) -> LoaderChange | None:
    if is_video(case) or not is_image(case, "decode"):
        return None
    return _of_batch(
        case,
        ("read", "decode"),
        "resize",
        "store the images smaller, close to the model's input size",
        "re-encode once (PIL: image.draft and thumbnail, quality 95) into a copy of the data set",
        "both grow with the number of pixels; whether the images are larger than the model's "
        "input was not checked",
    )


def _cache(case: MeasuredLoad) -> LoaderChange | None:
    """Decoded samples in RAM, if all of them fit."""
    probe = case.probe
    total = decoded_bytes(case)
    free = case.machine.available_bytes
    share = case.share("read", "decode")
    if total is None or free is None or share == 0 or total > _CACHE_SHARE * free:
        return None
    return LoaderChange(
        "cache",
        f"keep decoded samples in RAM: {size(total)} of {size(free)} available",
        "decode once into a shared tensor (torch.empty(...).share_memory_()) or a .npy file "
        "that each worker opens with mmap_mode='r'",
        f"reading and decoding are {percent(share)} of a batch's time, and are left out here; "
        f"transforms and collation stay; {probe.samples} samples, each as large as in the batch",
        load=case.without("read", "decode"),
    )


def _gpu_transforms(case: MeasuredLoad) -> LoaderChange | None:
    if not makes_images(case):
        return None
    return _of_batch(
        case,
        ("transform",),
        "gpu_transforms",
        "run the transforms on the GPU, on whole batches",
        "torchvision.transforms.v2 or kornia on the batch, after .to(device); random ones "
        "then draw once per batch unless the library draws per sample",
        "the GPU's step becomes longer by what they need there",
    )


def _gpu_decoding(case: MeasuredLoad) -> LoaderChange | None:
    how = "torchvision.io.decode_jpeg(list_of_bytes, device='cuda') (JPEG only), or NVIDIA DALI"
    if is_video(case):
        how = "torchcodec.decoders.VideoDecoder(path, device='cuda') in the main process"
    elif not is_image(case, "decode"):
        return None
    why = "the GPU's step becomes longer by what it needs there"
    return _of_batch(case, ("decode",), "gpu_decoding", "decode on the GPU", how, why)


def _decoder_threads(case: MeasuredLoad) -> LoaderChange | None:
    """Threads within a sample, where cores are idle that workers do not use."""
    spare = case.machine.usable_cores / max(1, case.settings.num_workers)
    threads = min(_MOST_DECODER_THREADS, int(spare))
    single = case.probe.threads is not None and case.probe.threads < 1.2
    if not is_video(case) or threads < 2 or not single:
        return None
    return _of_batch(
        case,
        ("decode",),
        "decoder_threads",
        f"decode video with {threads} threads",
        f'stream.thread_type = "FRAME"; stream.codec_context.thread_count = {threads} (PyAV), '
        f"num_ffmpeg_threads={threads} (torchcodec), num_threads={threads} (decord)",
        f"one thread was busy, and {cores(spare)} cores per worker are usable",
    )


def _frame_alignment(case: MeasuredLoad) -> LoaderChange | None:
    if not is_video(case):
        return None
    return _of_batch(
        case,
        ("decode",),
        "frame_alignment",
        "store videos with keyframes where samples begin",
        "re-encode with a short keyframe interval (ffmpeg -g 2 for single frames; for clips the "
        "clip's length), or store the frames as images",
        "to reach a frame, all frames since the previous keyframe are decoded",
    )


def _batched_indexing(case: MeasuredLoad) -> LoaderChange | None:
    """Tiny samples in RAM: Python's calls for each of them are the cost (pytorch#154318)."""
    total, free = decoded_bytes(case), case.machine.available_bytes
    if total is None or free is None or total > _CACHE_SHARE * free or not case.waits_for_batches:
        return None
    stored = case.probe.storage
    if not case.probe.parts or (stored is not None and stored.files):
        return None
    indexed = 0.0 if stored is None else _indexed(case)
    others = case.share("read", "decode", "transform") - indexed
    if others > 0.5 or case.share("collate") + indexed < _COLLATES or _own_collate(case):
        return None
    calls = case.share("collate", "unknown") + indexed
    return LoaderChange(
        "batched_indexing",
        "fetch a whole batch with one indexing operation instead of sample by sample",
        "give the data set __getitems__(indices) that indexes tensors once, and a collate_fn "
        "that passes the result on",
        f"{size(total)} fit in RAM, and {percent(calls)} of a batch's time is collation and calls "
        "for each sample",
        calls,
    )


def _own_collate(case: MeasuredLoad) -> bool:
    """Is collating the user's own work (to tokenize text), none of it PyTorch's stacking?"""
    names = [name for part in case.probe.parts if part.name == "collate" for name in part.what]
    return bool(names) and not any(name.startswith("torch.") for name in names)


def _indexed(case: MeasuredLoad) -> float:
    """The share of a batch's time that goes to indexing tensors in RAM (TensorDataset)."""
    reads = [part for part in case.probe.parts if part.name == "read"]
    return sum(part.share for part in reads if all(map(_of_torch, part.what)))


def _of_torch(name: str) -> bool:
    return name.startswith("torch.utils.data.dataset.")


def _storage(case: MeasuredLoad) -> LoaderChange | None:
    storage = case.probe.storage
    if storage is None or storage.cold_s is None or storage.cold_s < COLDER * storage.warm_s:
        return None
    waits = sum(cost.wait_s for cost in case.load.costs) / len(case.load.costs)
    if waits <= 0:
        return None
    left = max(0.0, 1 - (storage.cold_s - storage.warm_s) / waits)
    return LoaderChange(
        "storage",
        "keep the files on fast storage: a local NVMe disk, or the page cache",
        "copy the data set to the machine's own disk before training, in few large files",
        f"a batch needs {duration(storage.cold_s)} from storage and "
        f"{duration(storage.warm_s)} from the page cache; the difference is left out here",
        load=cheaper(case.load, left, 1.0),
    )


def _garbage(case: MeasuredLoad) -> LoaderChange | None:
    """A full collection looks at every object of the process, its imports among them; code that
    makes many objects for each sample sets it off every few batches."""
    share = case.probe.collecting
    if share is None or share < _COLLECTS:
        return None
    return LoaderChange(
        "gc_freeze",
        "exclude existing objects from Python's garbage collection",
        "import gc; gc.freeze() in worker_init_fn (without workers: before the loop)",
        f"{percent(share)} of a worker's time is garbage collection, triggered by the many objects "
        "that each sample creates; all of it is left out here",
        # Without workers what a batch costs contains them.
        load=dataclasses.replace(
            cheaper(case.load, 1.0, 1 - share), costs=case.load.costs, pauses=Pauses()
        ),
    )


def _in_order(case: MeasuredLoad) -> LoaderChange | None:
    settings, variation = case.settings, case.probe.variation
    if not settings.in_order or settings.num_workers < 2:
        return None
    if variation is None or variation < _VARIES:
        return None
    return LoaderChange(
        "in_order",
        "return batches as they are ready: in_order=False",
        "DataLoader(..., in_order=False), since PyTorch 2.6; the order of batches then differs "
        "from run to run",
        f"batch times vary by {percent(variation)} of their mean; in order, each batch waits for "
        "slower ones before it",
        load=case.load,
        settings=dataclasses.replace(settings, in_order=False),
    )


CHANGES: Final[tuple[Callable[[MeasuredLoad], LoaderChange | None], ...]] = (
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


#: The least predicted gain that is worth a change of code or data.
_LEAST_GAIN: Final = 1.03
#: The least share of the time that a change concerns whose gain is not predicted.
_LEAST_SHARE: Final = 0.1
#: Batches of an epoch that are simulated; the rest goes on at the steady rate.
_EPOCH_BATCHES: Final = 400


def beyond(
    load: Load,
    probe: Probe,
    settings: LoaderSettings,
    consumer: Consumer,
    machine: LoaderMachine,
    epoch_batches: int | None = None,
) -> tuple[Finding, ...]:
    """What would help at these settings: what is predicted first, each the most first.

    Nothing is advised where the consumer is the limit: the rate cannot rise by 3% then.

    Args:
        epoch_batches: batches of an epoch, if it has an end; what it takes to start workers
            each time is weighed against it.
    """
    load = dataclasses.replace(load, consumer=consumer)
    number = batches(settings)
    base = rate(load, settings, number)
    if math.isinf(base):
        return ()
    case = MeasuredLoad(
        load, probe, settings, machine, epoch_batches, base, number, limit(load, settings, probe)
    )
    found = [*_epochs(case)]
    if consumer.step_s * base * _LEAST_GAIN <= 1:  # the GPU has room for more
        found += [_advice(case, remedy) for make in CHANGES if (remedy := make(case))]
    return tuple(most_helpful_first(filter(_is_worth_it, found)))


def _is_worth_it(advice: Finding) -> bool:
    if advice.fix.gain is not None:
        return advice.fix.gain >= _LEAST_GAIN
    return (advice.share or 0.0) >= _LEAST_SHARE


def _advice(case: MeasuredLoad, remedy: LoaderChange) -> Finding:
    told = (remedy.kind, remedy.summary, remedy.how)
    if remedy.load is None:
        return advice_finding(*told, None, None, remedy.evidence, remedy.share)
    found = rate(remedy.load, remedy.settings or case.settings, case.count)
    how = f"simulated with the same settings, {rate_text(case.base)} batches/s before"
    return advice_finding(*told, found, found / case.base, f"{remedy.evidence}; {how}")


# --- Epochs -----------------------------------------------------------------------------------
def _epochs(case: MeasuredLoad) -> list[Finding]:
    """What restarting workers for each epoch costs; the rates are for whole epochs."""
    settings, starts = case.settings, case.probe.start_s
    if case.epoch_batches is None or settings.num_workers == 0 or settings.persistent_workers:
        return []
    now = _epoch_s(case, case.load, settings)
    kept = _epoch_s(case, case.load, dataclasses.replace(settings, persistent_workers=True))
    number = count(settings.num_workers, "worker")
    text = (
        f"starting {number} costs {duration(case.load.start_s)} each, in every epoch of "
        f"{case.epoch_batches} batches; rates are for whole epochs"
    )
    epochs = [
        _of_epochs(
            case, "persistent_workers", "keep the workers between epochs",
            "DataLoader(..., persistent_workers=True)", now, kept, text,
        )
    ]  # fmt: skip
    fork: StartMethod = "fork"
    if settings.start_method != fork and fork in starts:
        forked = dataclasses.replace(case.load, start_s=starts[fork])
        then = _epoch_s(case, forked, settings)
        epochs.append(
            _of_epochs(
                case, "start_method", "start workers with fork",
                'DataLoader(..., multiprocessing_context="fork"), if no library used '
                "before is fork-unsafe (CUDA in workers, OpenCV's or gRPC's threads)",
                now, then, f"{text}; forked ones need {duration(starts[fork])}",
            )
        )  # fmt: skip
    return epochs


def _of_epochs(
    case: MeasuredLoad, kind: str, summary: str, how: str, now: float, then: float, observed: str
) -> Finding:
    assert case.epoch_batches is not None
    return advice_finding(kind, summary, how, case.epoch_batches / then, now / then, observed)


def _epoch_s(case: MeasuredLoad, load: Load, settings: LoaderSettings) -> float:
    """Seconds of an epoch that is not the first."""
    assert case.epoch_batches is not None
    simulated = min(case.epoch_batches, _EPOCH_BATCHES)
    one = simulate(load, settings, simulated).finished_s
    two = simulate(load, settings, simulated, epochs=2).finished_s
    return two - one + (case.epoch_batches - simulated) / case.base
