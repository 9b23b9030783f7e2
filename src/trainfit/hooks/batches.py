"""What the batches of a training are: one class after another, mostly padding, or each the first of
its pass over the data.

Labels and tokens are read where they are the host's, before anything is moved; what a data set has
of labels is looked at, none of its samples are loaded.
"""

from __future__ import annotations

import itertools
import math
import weakref
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from types import CodeType
from typing import Any, Final, NamedTuple

import numpy as np
import torch
from torch.utils.data import RandomSampler, SequentialSampler, Subset

from trainfit.hooks.held_objects import tensors_in
from trainfit.hooks.losses import OF_CLASSES
from trainfit.hooks.provenance.copies import lies_by_pixels, line_of_view
from trainfit.hooks.provenance.cuts import FirstOfKind
from trainfit.hooks.ranks import length_of
from trainfit.results.runs.learning import Misuse
from trainfit.simgpu.device.user_location import is_library, locals_of
from trainfit.torch_private.autograd import operands
from trainfit.torch_private.data_loading import dataset_of
from trainfit.torch_private.modules import outermost_call
from trainfit.torch_private.operators import no_dispatch, storage_key, version

#: Where data sets keep the label of each sample.
_LABELS: Final = ("targets", "labels", "y", "_labels")
#: Positions of a sequence, and the share of them that nothing uses, from which it is told.
_LEAST_POSITIONS: Final = 32
_UNUSED: Final = 0.5
#: The largest difference between the numbers of images that are of 8 bits, and were scaled once
#: more than they are to be; the target that losses over classes leave out.
_FLAT: Final = 0.01
_IGNORED: Final = -100
#: Numbers of images that are counted, and how many different ones 8 bits and three colours make.
_NUMBERS: Final = 1 << 16
_OF_8_BITS: Final = 768
#: Batches that show it.
_BATCHES: Final = 2
#: Embeddings of one model that are remembered: of tokens, positions, types of tokens.
_EMBEDDINGS: Final = 4
#: DataLoaders of inputs and of labels.
_PAIR: Final = 2
#: Tensors of one batch that are looked at.
_TENSORS: Final = 8
#: Steps in a row that begin a DataLoader for one batch: no epoch of a single step.
_RESTARTS: Final = 3
#: Batches whose losses are added from which it is worth a word: fewer may be of one comparison.
_SUMMED: Final = 4
#: Nodes of a sum of losses, and of what scales it, stacks or averages them.
_SUMS: Final = ("Add", "Sub", "Div", "Mul", "Stack", "Cat", "Unsqueeze")
_OF_ALL: Final = ("Mean", "Sum")
_MOST_TERMS: Final = 4096
#: Looks at steps, and steps, with the targets of the first, after which no others are expected.
_LOOKS: Final = 6
_STEPS: Final = 64


def storage_of(tensor: torch.Tensor) -> tuple[int, int]:
    """The storage of a tensor, and where in it the tensor begins."""
    return storage_key(tensor.untyped_storage()), int(tensor.storage_offset())


def is_own(module: Any, state: Mapping[str, Any]) -> bool:
    """Are all tensors of a state those that the module has already?"""
    own = {**dict(module.named_parameters()), **dict(module.named_buffers())}
    tensors = {name: tensor for name, tensor in state.items() if isinstance(tensor, torch.Tensor)}
    return bool(tensors) and all(
        name in own
        and own[name].shape == tensor.shape
        and storage_of(own[name]) == storage_of(tensor)
        for name, tensor in tensors.items()
        if tensor.numel()
    )


def terms_of(root: Any) -> int:
    """The number of terms of which this node is a sum; those of numbers alone have no node."""
    waiting, terms, seen = [root], 0, 0
    while waiting and seen < _MOST_TERMS:
        node = waiting.pop()
        if node is None:
            continue
        seen += 1
        inside = operands(node)
        are_losses = inside and inside[0].name().startswith(("Stack", "Cat"))
        if inside and (
            node.name().startswith(_SUMS) or (are_losses and node.name().startswith(_OF_ALL))
        ):
            waiting += inside
        else:
            terms += 1
    return terms


class _Loader(NamedTuple):
    """A DataLoader, the line that goes over it, its data set, which its iterators keep, and the
    batches of an epoch (0: not known)."""

    loader: weakref.ref[Any]
    place: str | None
    data: weakref.ref[Any] | None = None
    batches: int = 0


class TrainingBatches(FirstOfKind):
    """Follows the batches of a training's first steps."""

    def __init__(self, place: Callable[[], str | None]) -> None:
        super().__init__(place)
        #: What was gone over last and has given nothing yet, two at most; the DataLoader of each
        #: iterator, by identity; those that gave batches since the last backward pass; that of the
        #: training.
        self._begun: deque[_Loader] = deque(maxlen=_PAIR)
        self._of: dict[int, _Loader] = {}
        self._current: list[_Loader] = []
        self._training: _Loader | None = None
        #: Positions that batches of a shape use, one number for each batch.
        self._used: dict[tuple[int, ...], list[int]] = {}
        self._embedded: set[tuple[int, ...]] = set()
        #: The least and the largest number of each batch of images.
        self._spreads: list[tuple[float, float]] = []
        #: Shapes of batches of class numbers of pixels, each with the least and the largest.
        self._pixels: list[tuple[tuple[int, ...], int, int]] = []
        #: The only class of all pixels that a loss was given, and the batches.
        self._of_one_class: tuple[int, int] | None = None
        #: Of each batch of images in colours that was made, and that a model was given: how its
        #: numbers differ where they lie by pixels; and where a model was given them.
        self._made_by: list[tuple[float, float] | None] = []
        self._used_by: list[tuple[float, float] | None] = []
        self._used_at = ""
        self._calls = 0
        self.wants_given = True
        """Is what a model is given looked at? The first calls' suffice."""
        #: Of the last batch of tokens: labels at padding, and the shape.
        self._labels_at_padding: tuple[int, tuple[int, ...]] | None = None
        #: Of a batch that a loss went over, positions of padding with labels, and all positions.
        self._padding_learned: tuple[int, int] | None = None
        #: What was embedded last (positions are, too): its storage, where in it, its shape.
        self._tokens: deque[tuple[int, int, tuple[int, ...]]] = deque(maxlen=_EMBEDDINGS)
        #: Are classes learned, one for each sample of a batch?
        self._learns_classes = False
        #: What a loss was compared with at each look so far, and its version; looks with nothing
        #: else; batches that were taken until then, and while steps were looked at.
        self._targets: tuple[weakref.ref[Any], int] | None = None
        self._same = self._taken = self._steps = 0
        self._others = False
        #: DataLoaders that give single tensors, by identity: whether these are labels.
        self._single: dict[int, bool] = {}
        self._is_told = False

    def found(self) -> tuple[Misuse, ...]:
        """What was seen so far, and what all batches so far have in common."""
        return (*super().found(), *self._in_common())

    def _in_common(self) -> Iterator[Misuse]:
        if (padded := self._padded()) is not None:
            yield Misuse.of("padding_everywhere", *padded, place=self.place)
        if (only := self._only_one()) is not None:
            yield Misuse.of("one_batch", *only, place=self.place)
        if (one := self._of_one_class) is not None:
            yield Misuse.of("pixels_of_one_class", *one, place=self.made_at)
        if (padding := self._padding_learned) is not None:
            yield Misuse.of("padding_learned", *padding, place=self.place)
        if (flat := self._flat()) is not None:
            yield Misuse.of("images_flat", *(f"{each:.3g}" for each in flat), place=self.made_at)
        if (mixed := self._by_pixels()) is not None:
            *spreads, place = mixed
            yield Misuse.of(
                "images_by_pixels", *(f"{spread:.3g}" for spread in spreads), place=place
            )

    @property
    def place(self) -> str | None:
        """The line that goes over the batches which are trained on."""
        return self._training.place if self._training is not None else None

    @property
    def made_at(self) -> str | None:
        """The script's own method that makes the samples which are trained on, or else the line
        that goes over them."""
        code = self._making
        return self.place if code is None else f"{code.co_filename}:{code.co_firstlineno}"

    @property
    def _making(self) -> CodeType | None:
        code = getattr(getattr(type(self.data), "__getitem__", None), "__code__", None)
        return None if code is None or is_library(code.co_filename) else code

    @property
    def _viewed_at(self) -> str | None:
        """The last view in that method, or else :attr:`made_at`."""
        code = self._making
        if code is not None:
            last = max(line for *_, line in code.co_lines() if line)
            found = line_of_view(f"{code.co_filename}:{last}")
            if code.co_firstlineno <= int(found.rpartition(":")[2]) < last:
                return found
        return self.made_at

    @property
    def of_epoch(self) -> int:
        """Batches that the DataLoader which is trained on has; 0: there is none, or it is not
        known."""
        return self._training.batches if self._training is not None else 0

    @property
    def data(self) -> Any:
        """The data set of the batches which are trained on."""
        known = self._training.data if self._training is not None else None
        return None if known is None else known()

    def iterated(self, loader: Any, place: str | None) -> None:
        """A DataLoader begins to be gone over."""
        data = getattr(loader, "dataset", None)
        known = weakref.ref(data) if hasattr(data, "__weakref__") else None
        self._begun.append(_Loader(weakref.ref(loader), place, known, length_of(loader) or 0))

    def asked(self, iterator: Any) -> None:
        """The iterator of a DataLoader is asked for a batch."""
        for each in reversed(self._begun):  # of two that are begun together, by zip()
            # The loader may be gone by then, as of `for x in DataLoader(data)`; not its data.
            known = each.data() if each.data is not None else None
            if known is None or known is dataset_of(iterator):
                self._of[id(iterator)] = each
                self._begun.remove(each)
                break
        self._current += [each for each in [self._of.get(id(iterator))] if each is not None]
        self._taken += 1

    def trained(self, root: Any = None) -> None:
        """A backward pass begins at this node: of losses of several batches? Where an evaluation
        had batches, too, it tells nothing of what is trained on."""
        last = itertools.takewhile(lambda each: each is self._current[-1], self._current[::-1])
        # The first pass that is told of comes after others, whose batches are there as well.
        is_known = "backward_of_many" in self._found
        asked = len(list(last)) if self._is_told and not is_known else 0
        self._is_told = True
        # A pass that came to its end was asked once more.
        batches = min(asked, self._current[-1].batches or asked) if asked else 0
        if batches >= _SUMMED and terms_of(root) >= batches:
            self._note("backward_of_many", batches)
        if self._current and all(loader is self._current[0] for loader in self._current):
            self._training = self._current[0]
        if len(self._current) == _PAIR:
            self._look_at_pair(*self._current)
        self._current = []

    def _look_at_pair(self, one: _Loader, other: _Loader) -> None:
        """Do two DataLoaders give the inputs and the labels, each shuffled by itself?"""
        loaders = [each.loader() for each in (one, other)]
        kinds = {self._single.get(id(loader)) for loader in loaders}
        samples = {length_of(getattr(loader, "dataset", None)) for loader in loaders}
        is_shuffled = all(
            type(sampler) is RandomSampler and sampler.generator is None
            for sampler in (getattr(loader, "sampler", None) for loader in loaders)
        )
        if kinds == {True, False} and len(samples) == 1 and is_shuffled:
            self._note("shuffled_apart", samples.pop() or 0, place=one.place or "")

    def looked(self, steps: int) -> None:
        """A step that is looked at, of so many, is about to use its gradients."""
        if self._targets is not None and not self._others:
            self._same, self._steps = self._same + 1, steps

    def _only_one(self) -> tuple[int, int] | None:
        """Steps that all learn from the one batch that was taken from a DataLoader, and the batches
        that it has; ``None``: there are others, or it is not known."""
        if self._others or self._taken != 1 or self._same < _LOOKS or self._steps < _STEPS:
            return None
        loader = self._training.loader() if self._training is not None else None
        batches = None if loader is None else length_of(loader)
        return None if not batches or batches < 2 else (self._steps, batches)

    def given(self, batch: Any) -> None:
        """A DataLoader gave a batch."""
        if isinstance(batch, torch.Tensor) and self._current:
            is_labels = batch.dtype == torch.int64 and batch.dim() == 1
            self._single[id(self._current[-1].loader())] = is_labels
        self._labels_at_padding = _padding_labelled(batch) if isinstance(batch, Mapping) else None
        for tensor in tensors_of_batch(batch):
            if len(self._spreads) < _LOOKS and _is_image(tensor):
                self._spreads.append(_spread(tensor))
            if len(self._pixels) < _LOOKS and _is_map(tensor):
                self._look_at_map(tensor)
            if len(self._made_by) < _LOOKS and _has_colours(tensor):
                self._made_by.append(lies_by_pixels(tensor))
            if tensor.dtype != torch.int64 or tensor.dim() != 2 or tensor.device.type != "cpu":
                continue
            if tensor.shape[0] > 1 and tensor.shape[1] >= _LEAST_POSITIONS:
                with no_dispatch():
                    self._used.setdefault(tuple(tensor.shape), []).append(_positions_used(tensor))

    def used(self, given: Any, place: Callable[[], str | None]) -> None:
        """A model is about to be called with these."""
        self._calls += 1
        self.wants_given = self._calls < _LOOKS
        for tensor in tensors_of_batch(given):
            if _has_colours(tensor):
                self._used_by.append(lies_by_pixels(tensor))
                self._used_at = self._used_at or line_of_view(place() or "")

    def _by_pixels(self) -> tuple[float, float, str] | None:
        """How the numbers of images differ whose colours and positions are mixed, and the line that
        makes them so."""
        for looks, place in ((self._made_by, self._viewed_at), (self._used_by, self._used_at)):
            found = [look for look in looks if look is not None]
            if len(found) >= _BATCHES and len(found) == len(looks):
                return *found[0], place or ""
        return None

    def _look_at_map(self, classes: torch.Tensor) -> None:
        with no_dispatch():
            least, largest = (int(each) for each in torch.aminmax(classes))
        self._pixels.append((tuple(classes.shape), least, largest))

    def compares(self, target: Any, ignored: Any) -> None:
        """A loss over classes of these targets is called, without those that are ``ignored``."""
        known = {number for _, *both in self._pixels for number in both}
        is_one = len(known) == 1 and len(self._pixels) >= _BATCHES
        self._of_one_class = None
        if is_one and getattr(target, "shape", None) in [shape for shape, _, _ in self._pixels]:
            self._of_one_class = known.pop(), len(self._pixels)
        found, shape = self._labels_at_padding or (0, ())
        if not found or not isinstance(target, torch.Tensor) or ignored != _IGNORED:
            return
        if target.numel() in (math.prod(shape), shape[0] * (shape[1] - 1)):
            self._padding_learned = found, math.prod(shape)

    def _flat(self) -> tuple[float, float] | None:
        """The least and the largest number of batches of images whose numbers hardly differ."""
        spreads = self._spreads
        if len(spreads) < _BATCHES:
            return None
        least, largest = min(low for low, _ in spreads), max(high for _, high in spreads)
        return (least, largest) if 0 < largest - least <= _FLAT else None

    def embedded(self, tokens: Any) -> None:
        """An embedding of tokens is about to be computed."""
        if isinstance(tokens, torch.Tensor) and tokens.dim() == 2:
            shape = tuple(tokens.shape)
            if shape not in self._embedded and not _is_in_frozen_model():
                self._embedded.add(shape)
            self._tokens.append((*storage_of(tokens), tuple(tokens.shape)))

    def follows(self, labels: Any) -> bool:
        """Are these tokens that were embedded just now, from the second on?"""
        if not isinstance(labels, torch.Tensor) or labels.dim() != 2:
            return False
        storage, offset = storage_of(labels)
        return (storage, offset - 1, tuple(labels.shape)) in self._tokens

    def compared(self, name: str, output: Any, target: Any) -> None:
        """A loss function of what a model gave and of what it shall give is called."""
        if not isinstance(target, torch.Tensor):
            return
        if name in OF_CLASSES and target.dim() == 1:
            self._learns_classes |= bool(getattr(output, "requires_grad", False))
        if self._targets is None:
            self._targets = weakref.ref(target), version(target)
        elif self._targets[1] != version(target) or self._targets[0]() is not target:
            self._others = True

    def _padded(self) -> tuple[str, int] | None:
        """The shape of batches of tokens that are mostly padding in all of their rows, and the most
        positions that one of them uses; ``None``: there are none. Where all of them are of one
        number, they stand for text (a script that is tried out), and are none that is padded."""
        for shape, used in self._used.items():
            is_seen = shape in self._embedded and len(used) >= _BATCHES
            if is_seen and 0 < max(used) <= (1 - _UNUSED) * shape[1]:
                return "×".join(map(str, shape)), max(used)
        return None

    def sorted_by_class(self) -> tuple[int, int] | None:
        """The classes of the data set that is trained on, and the batch size, where each batch has
        samples of one class; ``None``: that is not so, or not known, or what is learned are no
        classes (a style, by images from folders)."""
        if not self._learns_classes:
            return None
        loader = self._training.loader() if self._training is not None else None
        size = getattr(loader, "batch_size", None)
        if type(getattr(loader, "sampler", None)) is not SequentialSampler or not size:
            return None
        labels = _labels(getattr(loader, "dataset", None))
        if labels is None or size < 2:
            return None
        changes = np.count_nonzero(labels[1:] != labels[:-1])
        classes = len(np.unique(labels))
        is_sorted = classes > 1 and changes == classes - 1
        return (classes, size) if is_sorted and len(labels) / classes >= 2 * size else None


def _is_map(tensor: torch.Tensor) -> bool:
    """Is it a batch with a class's number for each pixel?"""
    is_whole = tensor.dtype == torch.int64 and tensor.device.type == "cpu"
    return is_whole and tensor.dim() == 3 and min(tensor.shape[1:]) > 1


def _is_in_frozen_model() -> bool:
    """Is the outermost module that is being called one that learns nothing? What is trained on its
    results may be made for their length, padding and all (the text encoder of Stable Diffusion)."""
    frame = outermost_call()
    outermost = None if frame is None else locals_of(frame).get("self")
    if not isinstance(outermost, torch.nn.Module):
        return False
    return not any(parameter.requires_grad for parameter in outermost.parameters())


def tensors_of_batch(batch: Any) -> Iterator[torch.Tensor]:
    """The tensors of a batch, or of its first level."""
    return tensors_in(batch, most=_TENSORS)


def _is_image(tensor: torch.Tensor) -> bool:
    """Is it a batch of images with colours or grey, on the CPU?"""
    if tensor.dim() != 4 or tensor.device.type != "cpu" or tensor.dtype != torch.float32:
        return False
    return tensor.shape[0] > 1 and tensor.shape[1] in (1, 3) and min(tensor.shape[2:]) > 7


def _has_colours(tensor: torch.Tensor) -> bool:
    """Is it a batch of images with three colours, whatever their numbers are?"""
    if tensor.dim() != 4 or tensor.device.type != "cpu" or tensor.dtype == torch.bool:
        return False
    # A view of (N, H, W, 3) is as its numbers lie in memory; permuted ones are not.
    return tensor.shape[1] == 3 and min(tensor.shape[2:]) > 7 and tensor.is_contiguous()


def _spread(images: torch.Tensor) -> tuple[float, float]:
    with no_dispatch():
        least, largest = images.aminmax()
        is_flat = float(largest - least) <= _FLAT
        seen = images.flatten()[:_NUMBERS]
        if is_flat and (len(seen) <= 2 * _OF_8_BITS or len(seen.unique()) > _OF_8_BITS):
            return -math.inf, math.inf  # too few to tell, or of another kind, as of sounds
        return float(least), float(largest)


def _padding_labelled(batch: Mapping[Any, Any]) -> tuple[int, tuple[int, ...]] | None:
    """Positions of padding that are labelled with the token that is there, and the shape, as
    tokenizers and their collators name them."""
    given: list[Any] = [batch.get(each) for each in ("input_ids", "attention_mask", "labels")]
    if not all(
        isinstance(tensor, torch.Tensor) and tensor.device.type == "cpu" for tensor in given
    ):
        return None
    tokens, mask, labels = given
    if tokens.dim() != 2 or not tokens.shape == mask.shape == labels.shape:
        return None
    with no_dispatch():
        padded = mask == 0
        found = int((padded & (labels == tokens)).sum())
        return (found, tuple(tokens.shape)) if found and found == int(padded.sum()) else None


def _positions_used(tokens: torch.Tensor) -> int:
    """The number of positions up to the last at which one of the rows has another token than all
    have at the end."""
    rows = tokens.numpy()
    differs = np.flatnonzero((rows != rows[0, -1]).any(axis=0))
    return int(differs[-1]) + 1 if len(differs) else 0


def _labels(dataset: Any) -> Any | None:
    """The label of each sample, as whole numbers; ``None``: they are not known."""
    if isinstance(dataset, Subset):
        whole = _labels(dataset.dataset)
        return None if whole is None else whole[np.asarray(dataset.indices)]
    kept = [getattr(dataset, name, None) for name in _LABELS]
    kept += [each for each in getattr(dataset, "tensors", ())[1:] if not each.is_floating_point()]
    for each in kept:
        if isinstance(each, torch.Tensor):
            if each.device.type != "cpu" or each.is_floating_point():
                continue
            with no_dispatch():
                each = each.numpy()
        if not isinstance(each, list | tuple | np.ndarray) or not len(each):
            continue
        labels = np.asarray(each)
        is_whole = labels.ndim == 1 and np.issubdtype(labels.dtype, np.integer)
        if is_whole and len(labels) == length_of(dataset):
            return labels
    return None


class Restarts:
    """Passes over the data of which a step uses the first batch alone.

    Attributes:
        given: batches that the last pass gave since it began.
        at: where passes are begun for one batch each, in some steps in a row; ``None``: nowhere.
        same_batch: whether that is the same batch each time.
    """

    def __init__(self) -> None:
        self.given = 0
        self.at: str | None = None
        self.same_batch = False
        #: What was begun since the last step: where, and whether in the same order.
        self._begun: tuple[str, bool] | None = None
        self._in_a_row = 0

    def begins(self, loader: Any, place: str) -> None:
        """A DataLoader begins to be gone over."""
        is_same = type(getattr(loader, "sampler", None)) is SequentialSampler
        costs = is_same or getattr(loader, "num_workers", 0) > 0
        self._begun = (place, is_same) if costs and length_of(loader) != 1 else None
        self.given = 0

    def step(self) -> None:
        """A step with a backward pass begins."""
        is_single = self._begun is not None and self.given == 1
        self._in_a_row = self._in_a_row + 1 if is_single else 0
        if self._in_a_row >= _RESTARTS and self.at is None and self._begun is not None:
            self.at, self.same_batch = self._begun
        self._begun = None

    def passed(self) -> None:
        """A step that is not looked at is over: how many batches it was given is not known."""
        if self._begun is None:
            self._in_a_row = 0  # it went on in the pass that an earlier one began
        self._begun = None
