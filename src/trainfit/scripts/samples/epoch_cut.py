"""The DataLoaders that a script makes, and epochs of them that end early."""

from __future__ import annotations

import contextlib
import dataclasses
import math
import weakref
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from torch.utils.data import DataLoader

from trainfit.hooks.ranks import length_of
from trainfit.results.runs.steps import Coverage
from trainfit.results.runs.trace import CallSite, LoaderCut, LoaderInfo
from trainfit.scripts.samples.batch_sizes import FedBatches
from trainfit.simgpu.patching import PatchSet
from trainfit.torch_private import data_loading as private


class MadeLoader:
    """One constructed DataLoader, and how many batches it gave so far.

    ``held`` is the loader itself, where it shall outlive the script's own references.
    """

    def __init__(
        self,
        loader: Any,
        index: int,
        where: str | None,
        keep: bool,
        sites: tuple[CallSite, ...] = (),
    ) -> None:
        sampler = getattr(loader, "batch_sampler", None)
        self.loader = weakref.ref(loader)
        self.held = loader if keep else None
        self.batch_sampler = _reference(sampler)
        self.index = index
        self.where = where
        self.sites = sites
        self.data_set = id(getattr(loader, "dataset", None))
        self.batches = 0
        #: Did it give some of the first training step's?
        self.trains = False
        self.on_gpu = False
        self.fed = FedBatches()
        data = getattr(loader, "dataset", None)
        self._data = type(data), length_of(data)
        #: What it was when it was last iterated: the script may keep no more than the iterator.
        self.known: LoaderInfo | None = None
        #: What the data set held open before the loader asked it for a sample: path → type.
        self.handles: Mapping[str, str] = {}

    def has_like(self, data_set: object) -> bool:
        """Is its data set this one, or of the same class and length?"""
        return id(data_set) == self.data_set or (
            self._data[1] is not None and self._data == (type(data_set), length_of(data_set))
        )

    def is_again(self, other: MadeLoader) -> bool:
        """Was it made by the same calls as ``other``, of the same data set or one like it, as a
        script does that makes both again for each epoch?"""
        if (self.where, self.sites) != (other.where, other.sites):
            return False
        is_alike = self._data == other._data and self._data[1] is not None
        return self.data_set == other.data_set or is_alike


class EpochCut:
    """Ends the epochs of DataLoaders early, as ``cut`` says (``None``: it does not).

    Their samplers give no more batches: workers are asked for none, and end as they always do.
    """

    def __init__(self, cut: LoaderCut | None) -> None:
        self.cut = cut
        self.ended: Callable[[], None] = lambda: None
        """Called when an epoch of the training ends early."""
        self.of_evaluation: Callable[[int], int] = lambda batches: batches
        """Of so many batches of another loader, those that are asked for."""
        self._made: list[MadeLoader] = []
        self._original: Callable[[MadeLoader], MadeLoader] = lambda made: made
        #: Batches that other loaders than the training's would have given.
        self._whole: dict[int, int] = {}
        self._sizes: dict[int, int] = {}
        self._making: MadeLoader | None = None
        #: Batches that iterators were asked for, of which loader, and batches that they gave.
        self._asked: weakref.WeakKeyDictionary[Any, list[Any]] = weakref.WeakKeyDictionary()
        #: Iterators of the script's own ``iter()``, and batches that they have given.
        self._by_hand: weakref.WeakKeyDictionary[Any, int] = weakref.WeakKeyDictionary()
        self._is_by_hand = False

    def install(
        self,
        patches: PatchSet,
        find: Callable[[Any], MadeLoader | None],
        made: list[MadeLoader],
        original: Callable[[MadeLoader], MadeLoader],
    ) -> None:
        """Cut from now on, until ``patches`` is restored."""
        self._made, self._original = made, original
        ask, reset, length = private.NEXT_INDEX.now, private.RESET.now, DataLoader.__len__

        def _next_index(batches: Any) -> Any:
            found = self._asked.get(batches)
            if found is None and self._making is not None:
                found = self._asked[batches] = [0, self._making, 0]
                if self._is_by_hand and self.cut is not None:
                    self._by_hand[batches] = 0
            if found is not None and self.cut is not None:
                # One more is for a loop that counts to be left with.
                if found[0] >= self._most(found[1]) + (batches in self._by_hand):
                    if self._is_training(found[1]):
                        self.ended()
                    raise StopIteration
                found[0] += 1
                if self._is_training(found[1]) and found[0] == self.cut.batches:
                    return _shortened(ask(batches), self.cut.remainder)
            return ask(batches)

        def _reset(batches: Any, loader: Any, *args: Any, **kwargs: Any) -> None:
            if batches in self._asked:
                self._asked[batches][0] = self._asked[batches][2] = 0
                if batches in self._by_hand:
                    self._by_hand[batches] = 0
            reset(batches, loader, *args, **kwargs)

        def __len__(loader: Any) -> int:
            whole, made = length(loader), find(loader)
            return whole if made is None else int(min(whole, self._most(made)))

        self._length = length
        patches.set(*private.NEXT_INDEX, _next_index)
        patches.set(*private.RESET, _reset)
        patches.set(DataLoader, "__len__", __len__)

    def covered(self, found: Coverage) -> Coverage:
        """``found`` with the batches that the longest of the loaders that no training step takes
        from would have given, and the samples of one."""
        others = {at: whole for at, whole in self._whole.items() if not self._made[at].trains}
        if not others:
            return found
        position = max(others, key=lambda index: others[index])
        of_batch = self._sizes.get(position)
        return dataclasses.replace(
            found, evaluation_batches=others[position], evaluation_batch_size=of_batch
        )

    @contextlib.contextmanager
    def making(self, made: MadeLoader | None, *, by_hand: bool = False) -> Iterator[None]:
        """An iterator of ``made`` is made, which asks for batches before it is there, ``by_hand``
        with the script's own ``iter()``."""
        self._making, self._is_by_hand = made, by_hand
        loader = made.loader() if made is not None else None
        if made and loader is not None and self.cut and not self._is_training(made):
            with contextlib.suppress(Exception):
                self._whole[made.index] = self.of_evaluation(self._length(loader))
                self._sizes[made.index] = int(loader.batch_size)
        try:
            yield
        finally:
            self._making, self._is_by_hand = None, False

    def begun(self, batches: Any, made: MadeLoader, *, by_hand: bool = False) -> None:
        """An iterator of ``made`` is there; it may have asked for batches already."""
        self._asked.setdefault(batches, [0, made, 0])
        if by_hand and self.cut is not None:
            self._by_hand.setdefault(batches, 0)

    def given(self, batches: Any, made: MadeLoader) -> bool:
        """An iterator gave a batch; is it the one after the last that it has in a cut epoch?"""
        if batches not in self._by_hand or self.cut is None:
            return False
        self._by_hand[batches] += 1
        is_over = self._by_hand[batches] > self._most(made)
        if is_over and self._is_training(made):
            self.ended()
        return is_over

    def is_last(self, batches: Any, made: MadeLoader) -> bool:
        """Is the batch that the iterator has just given the last of an epoch of another loader than
        the training's, to be the largest of its data set?"""
        if self.cut is None or not self.cut.look_s or self._is_training(made):
            return False
        found, last = self._asked[batches], self._most(made)
        loader: Any = made.loader()
        found[2] += 1
        with contextlib.suppress(Exception):  # it may have no length
            last = min(last, self._length(loader))
        return bool(found[2] == last)

    def _most(self, made: MadeLoader) -> float:
        if self.cut is None:
            return math.inf
        return self.cut.batches if self._is_training(made) else self.cut.others

    def _is_training(self, made: MadeLoader | None) -> bool:
        index = self.cut.index if self.cut is not None else None
        if made is None or index is None or index >= len(self._made):
            return False
        first = self._made[index]
        return made is first or made.is_again(first) or self._original(made) is first


def _shortened(samples: Any, count: int) -> Any:
    """The first ``count`` of a batch's indices; all for 0."""
    return samples[:count] if count and isinstance(samples, list) else samples


def _reference(value: Any) -> Any:
    """A weak reference, or a call that gives nothing where there can be none."""
    try:
        return weakref.ref(value)
    except TypeError:
        return lambda: None
