"""What a script trains and what feeds it: its largest model, and each DataLoader."""

from __future__ import annotations

import collections
import contextlib
import itertools
import math
import operator
import statistics
import weakref
from collections.abc import Hashable, Mapping
from typing import Any, Final

import torch
from torch.nn.parameter import is_lazy

from trainfit.findings.source_code import relative_place
from trainfit.results.runs.watched import WatchedLoader
from trainfit.scripts.samples.batch_sizes import samples_in
from trainfit.simgpu.device.user_location import user_frame
from trainfit.torch_private.data_loading import next_task, queues_of, tasks_of

#: Steps whose calls of models are remembered, and that tell how many are usual; a step has by far
#: more that has so many times as many, and so many more.
_REMEMBERED: Final = 15
_LEAST_REMEMBERED: Final = 8
_TIMES_USUAL: Final = 2
_MORE: Final = 2
#: Arguments of a module that are looked at, and steps whose sizes are kept.
_GIVEN: Final = 4
_SEVERAL: Final[tuple[type, ...]] = (list, tuple, type(dict[str, int]().values()))
_MOST_SIZES: Final = 200


class CalledModels:
    """Outermost modules that were called with gradients since :meth:`begin`.

    By far more calls than usual in a step, with no backward pass more, are of an evaluation that is
    made with gradients.
    """

    def __init__(self) -> None:
        self._elements: weakref.WeakKeyDictionary[torch.nn.Module, int]
        self._elements = weakref.WeakKeyDictionary()
        #: In which a recurrent network or an attention wants the time before the batch: whether
        #: the model itself does is not told.
        self._timed: weakref.WeakSet[torch.nn.Module] = weakref.WeakSet()
        self.samples = 0
        """First dimensions of what the largest model was given, their sum; 0: not known."""
        self._largest = 0
        self._usual: collections.deque[tuple[int, int]] = collections.deque(maxlen=_REMEMBERED)
        self._many = math.inf
        self._calls = 0
        self.extra_at = ""
        """Where the script makes the calls that are more than usual."""

    def begin(self) -> None:
        """A step begins."""
        self.samples = self._largest = self._calls = 0

    def counted(self) -> bool:
        """One of these is called; are they by far more than usual?"""
        self._calls += 1
        if self._calls < self._many:
            return False
        if self._calls == self._many:
            self.extra_at = script_place()
        return True

    def extra(self, backwards: int) -> float:
        """The share of the calls of a step with so many backward passes, at its end, that is more
        than usual and that none of these follows."""
        if self._calls >= self._many:
            usual, passes = (statistics.median(each) for each in zip(*self._usual, strict=True))
            return 1 - usual / self._calls if backwards <= passes else 0.0
        self._usual.append((self._calls, backwards))
        if len(self._usual) >= _LEAST_REMEMBERED:
            usual = statistics.median([calls for calls, _ in self._usual])
            self._many = _TIMES_USUAL * int(usual) + _MORE
        return 0.0

    def elements(self, module: torch.nn.Module) -> int:
        """Elements of its parameters that are trained, as when it was first seen; of averaged
        weights (EMA), those that are averaged."""
        found = self._elements.get(module)
        if found is None:
            parameters = [parameter for parameter in module.parameters() if parameter.requires_grad]
            if any(map(is_lazy, parameters)):
                return 0  # this call makes them (nn.LazyLinear)
            found = sum(parameter.numel() for parameter in parameters)
            if not found and len(self._usual) >= _LEAST_REMEMBERED and not module.training:
                found = self._averaged(module)
            self._elements[module] = found
            if any(getattr(each, "batch_first", True) is False for each in module.modules()):
                self._timed.add(module)
        return found

    def _averaged(self, module: torch.nn.Module) -> int:
        """Elements of a model that has the shapes of one that is trained. A teacher has them, too,
        and was called in the first steps."""
        own = [parameter.shape for parameter in module.parameters()]
        for known, found in self._elements.items():
            if found and own == [parameter.shape for parameter in known.parameters()]:
                return found
        return 0

    def note(self, module: torch.nn.Module, given: tuple[Any, ...], sized: bool) -> bool:
        """A call; ``sized`` where nobody else tells the samples. Is it the largest so far?"""
        elements = self.elements(module)
        is_largest = elements > self._largest
        if is_largest:
            self._largest, self.samples = elements, 0
        if sized and given and elements == self._largest and module not in self._timed:
            self.samples += samples_in(given[0]) or 0
        return is_largest


class InputSizes:
    """Elements of the largest tensor that outermost modules were given, by step: of every fourth
    step, of a long run every eighth and so on."""

    def __init__(self) -> None:
        self._sizes: list[tuple[int, int]] = []
        self._largest = 0
        self.passed_over = 3
        """Bits of a step's number that are all 0 where it is looked at: others cost no call."""

    def note(self, given: tuple[Any, ...]) -> None:
        """A module is called with ``given``."""
        for each in given[:_GIVEN]:
            parts = each.values() if type(each) is dict else each
            for part in itertools.islice(parts, _GIVEN) if type(parts) in _SEVERAL else (each,):
                if isinstance(part, torch.Tensor):
                    self._largest = max(self._largest, part.numel())

    def end(self, step: int) -> None:
        """The step is over."""
        if self._largest:
            self._sizes.append((step, self._largest))
        self._largest = 0
        if len(self._sizes) > _MOST_SIZES:
            self._sizes = self._sizes[::2]
            self.passed_over = 2 * self.passed_over + 1

    def found(self) -> tuple[tuple[int, int], ...]:
        return tuple(self._sizes)


def script_place() -> str:
    """The line of the script that runs: "train.py:41"; empty: none of it does."""
    return relative_place(user_frame())


# ---
# A DataLoader of the script, as far as the recorder knows it.


class LoaderRecord:
    """``role`` is found out by what its batches are used for."""

    def __init__(self, loader: Any, place: str) -> None:
        self.place = place
        self.role = "unknown"
        self.made = self.passes = 0
        self._dataset: weakref.ref[Any] | None = None
        self._told = self._facts(loader)
        self._batch_size = self._told["batch_size"]

    def describe(self) -> WatchedLoader:
        told = self._told
        counts = {"made": self.made, "passes": self.passes}
        return WatchedLoader(role=self.role, place=self.place, **counts, **told)  # type: ignore[arg-type]

    def note_dataset(self, loader: Any) -> None:
        """The loader of now may have another data set than those before it."""
        if not self._told["num_workers"]:
            with contextlib.suppress(Exception):  # it has none, or one of a kind like a list's
                self._dataset = weakref.ref(loader.dataset)

    @property
    def own_dataset(self) -> Any:
        """The data set whose samples the training process makes itself; ``None``: workers do, or it
        is not there any more."""
        return None if self._dataset is None else self._dataset()

    def is_of(self, loader: Any) -> bool:
        """Has the loader still the settings that it had?"""
        return self._told == self._facts(loader)

    @property
    def key(self) -> Hashable:
        """The key that is the same for loaders that are made at one place with the same
        settings."""
        return self.place, *self._told.values()

    def samples(self, batch: Any) -> int:
        """The number of samples of a batch; -1 where it does not tell."""
        likely = self._batch_size
        # What most loaders give: the first tensor has the batch size, but for the last batch.
        first = batch[0] if type(batch) is list and batch else None
        if type(first) is torch.Tensor and first.dim() and first.size(0) == likely:
            return first.size(0)
        part = batch
        if isinstance(part, (list, tuple)):  # a union costs ten times as much
            part = part[0] if part else None
        elif isinstance(part, Mapping):
            part = next(iter(part.values()), None)
        # The first tensor of a usual batch has the batch size: nothing else is to be asked.
        if isinstance(part, torch.Tensor) and part.dim() and len(part) == likely:
            return len(part)
        found = samples_in(batch, likely)
        return -1 if found is None else found

    @staticmethod
    def _facts(loader: Any) -> dict[str, Any]:
        size = getattr(loader, "batch_size", None)
        if size is None:
            size = getattr(getattr(loader, "batch_sampler", None), "batch_size", None)
        context = getattr(loader, "multiprocessing_context", None)
        method = context.get_start_method() if context is not None else ""
        if loader.num_workers and not method:
            method = torch.multiprocessing.get_start_method(allow_none=True) or "fork"
        return {
            "num_workers": int(loader.num_workers),
            "prefetch_factor": loader.prefetch_factor,
            "pin_memory": bool(loader.pin_memory),
            "persistent_workers": bool(loader.persistent_workers),
            "batch_size": size if isinstance(size, int) else None,
            "batches": _length(loader),
            "start_method": method,
        }


def _length(loader: Any) -> int | None:
    # A data set that streams has no length to give; asking its own ``__len__`` could take long.
    if isinstance(getattr(loader, "dataset", None), torch.utils.data.IterableDataset):
        return None
    try:
        length = operator.index(len(loader))
    except (TypeError, NotImplementedError, ValueError, OverflowError):
        return None
    return length if length < 1 << 62 else None


class ReadyBatches:
    """Batches that are ready in an iterator of a DataLoader with workers.

    Batches are given in their workers' turns: those of others do not help while the next one is
    made. Whether it was among those that lay in the queue shows once it has come: the queue is
    read in order, and what was read before it waits in a dictionary.
    """

    __slots__ = ("_batches", "_early", "_in_queue", "_is_here")

    def __init__(self, batches: Any) -> None:
        self._batches = batches
        self._early = self._in_queue = 0
        self._is_here = False

    def count(self) -> int:
        """Now, when ``next`` is called."""
        self._early, self._is_here = self._look(tasks_of(self._batches))
        self._in_queue = sum(int(queue.qsize()) for queue in queues_of(self._batches))
        return self._early + self._in_queue

    def had_next(self) -> bool:
        """Was the batch that ``next`` has given meanwhile among them?"""
        if self._is_here or not self._in_queue:
            return self._is_here
        early, _ = self._look(tasks_of(self._batches))
        return early - self._early < self._in_queue

    def _look(self, told: Mapping[int, tuple[Any, ...]]) -> tuple[int, bool]:
        """How many have come out of their order (with a second element), and is the next one
        there?"""
        early = sum(len(each) == 2 for each in itertools.islice(told.values(), 256))
        return early, len(told.get(next_task(self._batches), ())) == 2
