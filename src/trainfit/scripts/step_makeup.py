"""Derives the composition of an optimizer step from a run's batches and backward passes.

The batches that the DataLoader gave are trusted first, for they are whole samples; but loaders
give batches ahead of their use, and some for an evaluation. So the model's calls that a backward
pass followed are counted separately: where the loader gave more than those, the rest was not
trained on. Where it gave fewer, each was used several times (two networks, two views of an image),
unless the calls together have exactly the batch's samples: then it was cut into pieces.
"""

from __future__ import annotations

import dataclasses
import json
import statistics
from collections import Counter
from collections.abc import Iterable, Sequence
from types import FrameType
from typing import Final

from trainfit.results.files.decoding import as_json
from trainfit.results.runs.recording import Recording
from trainfit.results.runs.steps import Framework, StepMakeup
from trainfit.results.runs.trace import StepFeed

_REMEDY: Final = "load batches with a DataLoader"


def makeup_of(feeds: Sequence[StepFeed], batch_size: int | None = None) -> StepMakeup | None:
    """The makeup of the steps that ``feeds`` tells of, first to last; ``None`` where there is none.

    ``batch_size`` is what the command says, for scripts without a DataLoader.
    """
    if not feeds:
        return None
    feeds = _in_their_steps(feeds)
    usual = _usual_rounds(feeds)
    batches = most_frequent([len(feed.batches) for feed in feeds], near=usual)
    if batches:
        return _by_loader(feeds, batches)
    is_whole = len(feeds) > 1 and all(feed.is_same for feed in feeds[1:])
    return dataclasses.replace(_by_calls(feeds, batch_size), is_whole=is_whole)


def _usual_rounds(feeds: Sequence[StepFeed]) -> int:
    return most_frequent([max(feed.calls, feed.backwards) for feed in feeds])


def _in_their_steps(feeds: Sequence[StepFeed]) -> Sequence[StepFeed]:
    """Batches that were fetched ahead, moved to the steps that used them.

    In an epoch of two steps a loader that is one batch ahead gives the first both: neither
    number is the usual one then. Only where a step was given none and worked nevertheless.
    """
    each = _usual_rounds(feeds)
    if not each or all(feed.batches or not feed.calls for feed in feeds):
        return feeds
    waiting: list[int | None] = []
    found = []
    for feed in feeds:
        waiting += feed.batches
        if len(waiting) < each:  # several calls share a batch: it is not as was thought
            return feeds
        found.append(dataclasses.replace(feed, batches=tuple(waiting[:each])))
        del waiting[:each]
    return found


def with_makeup(recording: Recording, makeup: StepMakeup | None) -> Recording:
    """``recording``, whose header says what its steps consist of."""
    found = None
    if makeup is not None:
        replicas = max(1, recording.ranks // recording.sharing)
        found = json.loads(as_json(dataclasses.replace(makeup, processes=replicas)))
    return dataclasses.replace(recording, header={**recording.header, "step": found})


def most_frequent(values: Sequence[int], near: int | None = None) -> int:
    """The most frequent of ``values``; of several, ``near``, or else the largest: the last step
    of an epoch has less."""
    counted = Counter(values)
    maximum = max(counted.values())
    found = [value for value, times in counted.items() if times == maximum]
    return near if near in found else max(found)


def _by_loader(feeds: Sequence[StepFeed], batches: int) -> StepMakeup:
    calls = most_frequent([feed.calls for feed in feeds])
    backwards = most_frequent([feed.backwards for feed in feeds])
    given = [feed for feed in feeds if len(feed.batches) == batches]
    sums = [sum(filter(None, feed.batches)) for feed in given if None not in feed.batches]
    sizes = [size for feed in feeds for size in feed.batches if size is not None]
    if not sums:
        return StepMakeup(
            None,
            batches,
            None,
            "DataLoader",
            batches,
            why="the batch size cannot be read from a batch; let collate_fn return "
            "tensors whose first dimension is the batch",
        )
    # A batch may be fetched ahead, so that only an epoch's last step is given one alone.
    samples = _usual(sizes if batches == 1 else sums)
    lead = next((feed.call_samples for feed in given if feed.call_samples), None)
    pieces = calls == backwards and calls > batches and lead is not None and lead * calls == samples
    joined = batches > calls > 0 and lead is not None and lead * calls == samples
    if pieces or joined:
        per_step = [feed.calls for feed in feeds]
        return _made(lead, calls, samples, batches, per_step, sums)
    # Batches that are kept, given again and trained on in parts (TRL's completions).
    again = most_frequent([feed.is_given_again for feed in feeds])
    if again and calls == backwards and lead is not None and 0 < lead * calls < samples:
        per_step = [feed.calls for feed in feeds]
        makeup = _made(lead, calls, lead * calls, batches, per_step, ())
        return dataclasses.replace(makeup, source="model calls")
    trained = max(calls, backwards)
    if calls and batches > trained:  # the others were not trained on
        size = _usual(sizes)
        per_step = [max(feed.calls, feed.backwards) for feed in feeds]
        makeup = _made(size, trained, size * trained, trained, per_step, sizes)
        return dataclasses.replace(makeup, source="model calls")
    rounds = most_frequent([feed.rounds for feed in feeds])
    if rounds > 1:  # optimizers that step in turns: each accumulates as many
        per_step = [round(len(feed.batches) / feed.rounds) for feed in feeds]
        makeup = _made(None, max(1, round(batches / rounds)), samples, batches, per_step, sums)
        return dataclasses.replace(makeup, rounds=rounds)
    per_step = [len(feed.batches) for feed in feeds]
    if batches == (calls or backwards):  # what was fetched ahead is no part of a step
        per_step = [feed.calls if calls else feed.backwards for feed in feeds]
    return _made(_usual(sizes), batches, samples, batches, per_step, sums)


def _made(
    micro: int | None,
    accumulation: int,
    samples: int,
    batches: int,
    per_step: Iterable[int],
    sums: Sequence[int],
) -> StepMakeup:
    """Batches of different sizes have their mean as micro-batch; without ``micro``, what is left of
    the samples for each."""
    per_step = tuple(per_step)
    if micro is None or micro * accumulation != samples:
        micro = round(samples / accumulation)
    varied = len(set(per_step)) > 1 or len(set(sums)) > 1
    return StepMakeup(micro, accumulation, samples, "DataLoader", batches, per_step, varied)


def _by_calls(feeds: Sequence[StepFeed], batch_size: int | None) -> StepMakeup:
    calls = most_frequent([feed.calls for feed in feeds])
    backwards = most_frequent([feed.backwards for feed in feeds])
    lead = next((feed.call_samples for feed in reversed(feeds) if feed.call_samples), None)
    per_step = tuple(feed.calls for feed in feeds)
    why = ""
    if not calls:
        why = "no DataLoader returned a batch, and no model was called with gradients"
    elif any(feed.others for feed in feeds):
        why = "no DataLoader returned a batch, and several optimizers alternate"
    elif calls > backwards and batch_size is None:
        why = (
            f"no DataLoader returned a batch, and the model is called {calls} times for "
            f"{backwards} backward passes"
        )
    elif lead is None and batch_size is None:
        why = "no DataLoader returned a batch, and the model receives no tensor"
    if why:
        return StepMakeup(None, None, None, per_step=per_step, why=f"{why}; {_REMEDY}")
    if batch_size is None or (lead is not None and lead * calls == batch_size):
        micro = lead or 0
    else:
        micro = batch_size  # in the user's unit: the first dimension may be another
        if calls > backwards:  # a batch in pieces, or several views of it, for one pass
            calls = backwards
            per_step = tuple(feed.backwards for feed in feeds)
    varied = len(set(per_step)) > 1
    return StepMakeup(micro, calls, micro * calls, "model calls", None, per_step, varied)


def _usual(values: Sequence[int]) -> int:
    """The most frequent value; the median where none is more frequent than others."""
    counted = Counter(values).most_common(2)
    if len(counted) == 1 or counted[0][1] > counted[1][1]:
        return counted[0][0]
    if len(set(values)) == 2:  # a whole batch and an epoch's last, shorter one
        return max(values)
    return statistics.median_low(values)


# ---
# Whose training loop makes an optimizer step: a framework's, by the frames that call it.


#: Modules in whose frames an optimizer step is made, and whose loop that is.
_LOOPS: Final[tuple[tuple[str, Framework], ...]] = (
    ("lightning.", "Lightning"),
    ("pytorch_lightning.", "Lightning"),
    ("transformers.trainer", "Transformers"),
    ("accelerate.optimizer", "Accelerate"),
)


def loop_of(frame: FrameType | None) -> Framework:
    """The loop in ``frame`` and its callers; empty: the script's own."""
    names = []
    while frame is not None:
        names.append(str(frame.f_globals.get("__name__")))
        frame = frame.f_back
    for start, loop in _LOOPS:
        if any(name.startswith(start) for name in names):
            return loop
    return ""
