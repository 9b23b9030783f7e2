"""What values of a CPU's tensors tell of a training, at the few steps that are looked at: denormal
numbers, gradients that are all 0, layers whose units are one and the same or are dead, and where
numbers that are not finite come from.

Denormal float32 are below 1.18e-38 and have no leading one; x86 cores compute with them in
microcode, some 100 cycles an operation. Weights and averages that decay for long become such, and
gradients of a loss that is next to nothing.
"""

from __future__ import annotations

import contextlib
import itertools
import linecache
import math
import re
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, Final

import numpy as np
import torch
from numpy.typing import NDArray
from torch.utils.data import Dataset

from trainfit.hooks.losses import shape_of
from trainfit.hooks.owners import tensors_of
from trainfit.results.runs.learning import Misuse
from trainfit.torch_private.autograd import operator_of, saved_exponent
from trainfit.torch_private.operators import item, no_dispatch

#: Tensors of each kind that are looked at, and numbers of each: some 50 µs in all.
_TENSORS: Final = 3
_NUMBERS: Final = 256
_SMALLEST: Final = float(np.finfo(np.float32).tiny)
#: An average that an optimizer keeps of each parameter.
_AVERAGES: Final = ("exp_avg", "exp_avg_sq", "momentum_buffer")
#: Looks in a row that show gradients of 0.
_LOOKS: Final = 2
#: Units of a layer that are hardly alike by chance, what of their largest number they may differ
#: by (products of the same rows are rounded differently), and layers that are looked at.
_LEAST_UNITS: Final = 4
_ALIKE: Final = 1e-3
_LAYERS: Final = 64
#: Units of a layer inside a model, what share of them must get no gradient in so many looks in a
#: row: of one batch a ReLU may let few samples pass.
_WIDE: Final = 64
_DEAD: Final = 0.9
_LOOKS_AT_UNITS: Final = 4
_WITH_UNITS: Final = (torch.nn.Linear, torch.nn.Conv1d, torch.nn.Conv2d, torch.nn.Conv3d)


def loss_of(known: weakref.ref[Any] | None) -> float:
    """The last loss, where the CPU has it and the script still does; else 0."""
    root = known() if known is not None else None
    if root is None or root.device.type != "cpu" or root.numel() != 1:
        return 0.0
    return float(item(root.detach()))


def denormals(optimizer: Any) -> dict[str, float]:
    """The share of denormal numbers in a sample of an optimizer's "weights", "gradients" and
    "averages" on the CPU. Where the core counts them as 0 there are none."""
    found: dict[str, float] = {}
    with contextlib.suppress(Exception):  # a tensor of another kind is not looked at
        for kind, tensors in _kinds(optimizer):
            shares = [share for tensor in tensors if (share := _share(tensor)) is not None]
            if shares:
                found[kind] = max(shares)
    return found


def _kinds(optimizer: Any) -> Iterator[tuple[str, list[Any]]]:
    weights = _some(tensors_of(optimizer))
    yield "weights", weights
    yield "gradients", [weight.grad for weight in weights]
    states = [optimizer.state.get(weight, {}) for weight in weights]
    yield "averages", [state.get(name) for state in states for name in _AVERAGES]


def _some(tensors: Sequence[Any]) -> list[Any]:
    """The largest, in which most of the time goes."""
    return sorted(tensors, key=lambda each: -each.numel())[:_TENSORS]


def _is_plain(tensor: Any) -> bool:
    """Can its numbers be read as they lie in memory?"""
    if type(tensor) not in (torch.Tensor, torch.nn.Parameter):
        return False
    if tensor.dtype != torch.float32 or tensor.device.type != "cpu" or tensor.is_sparse:
        return False
    return bool(tensor.is_contiguous())


def _share(tensor: Any) -> float | None:
    sample = _sample(tensor)
    return None if sample is None else float(np.mean((sample > 0) & (sample < _SMALLEST)))


def _sample(tensor: Any) -> NDArray[np.float32] | None:
    """Some of a tensor's numbers, without their signs."""
    if not _is_plain(tensor) or tensor.numel() < _NUMBERS:
        return None
    values = tensor.detach().numpy().reshape(-1)
    # A step that is no power of two, so that not all are of one column.
    found: NDArray[np.float32] = np.abs(values[:: max(1, values.size // _NUMBERS) | 1])
    return found


class Stalled:
    """Follows trainings whose steps change nothing, or all units of a layer alike."""

    def __init__(self) -> None:
        self._zero: weakref.WeakKeyDictionary[Any, int] = weakref.WeakKeyDictionary()
        #: Weights whose gradients were 0 at the last looks, of how many of an optimizer; its line.
        self._without_slope: tuple[int, int, str | None] | None = None
        #: Layers whose units are one and the same, by identity of their weights: shape, units.
        self._alike: dict[int, tuple[str, int]] = {}
        #: Rate, weight decay and the share of weights that these have taken; the optimizer's line.
        self._decayed: Misuse | None = None
        self._live: dict[int, list[NDArray[np.bool_]]] = {}
        #: Layers most of whose units are dead, by identity of their weights: shape, dead units, all
        #: of them, the optimizer's line.
        self._dead: dict[int, tuple[str, int, int, str | None]] = {}

    def found(
        self, names: Mapping[int, str], initialized: Mapping[int, str | None]
    ) -> Iterator[Misuse]:
        """What holds at the last look; ``names`` are those of parameters, and ``initialized`` has
        the lines that gave all numbers of weights one value, both by identity. Where decay shrinks
        the weights, the rest follows from it."""
        if self._decayed is not None:
            yield self._decayed
            return
        if (zero := self._without_slope) is not None:
            yield Misuse.of("gradients_zero", *zero[:2], place=zero[2])
        elif dead := self._dead:
            key, (shape, number, of, at) = next(iter(dead.items()))
            yield Misuse.of("units_dead", len(dead), names.get(key, shape), number, of, place=at)
        if alike := self._alike:
            key, (shape, units) = next(iter(alike.items()))
            at = next((initialized[each] for each in alike if each in initialized), None)
            yield Misuse.of("units_alike", len(alike), names.get(key, shape), units, place=at)

    def look(
        self,
        optimizer: Any,
        place: str | None,
        loss: float,
        models: Iterable[Any],
        *,
        is_only: bool,
    ) -> None:
        """Look at the gradients that an optimizer, which a line made, is about to use for
        ``models``, and which maybe are those of a ``loss``."""
        trained = [tensor for tensor in tensors_of(optimizer) if tensor.grad is not None]
        weights = [tensor for tensor in trained if tensor.dim() > 1]
        if not weights or not all(
            _is_plain(weight) and _is_plain(weight.grad) for weight in weights
        ):
            return
        if (found := _decayed(optimizer, weights)) is not None:
            rate, decay, gone = found
            told = f"{rate:g}", f"{decay:g}", f"{gone:.3g}"
            self._decayed = Misuse.of("weights_decayed", *told, place=place)
        self._look_at_units(weights)
        own = {id(weight) for weight in weights}
        self._look_for_dead(models, own, place)
        none = not any(_has_slope(weight) for weight in weights)
        # A loss that has reached its least, 0, has no slope either.
        others = any(_has_slope(tensor) for tensor in trained if tensor.dim() < 2)
        is_zero = none and (others or (is_only and loss != 0))
        self._zero[optimizer] = self._zero.get(optimizer, 0) + 1 if is_zero else 0
        if is_zero and self._zero[optimizer] >= _LOOKS:
            self._without_slope = len(weights), len(trained), place
        elif self._without_slope is not None and self._without_slope[2] == place:
            self._without_slope = None

    def _look_at_units(self, weights: Sequence[Any]) -> None:
        self._alike = {
            key: told for key, told in self._alike.items() if key not in set(map(id, weights))
        }
        for weight in weights[:_LAYERS]:
            units = weight.shape[0]
            if units >= _LEAST_UNITS and weight.numel() > units and _are_alike(weight):
                self._alike[id(weight)] = shape_of(weight), units

    def _look_for_dead(self, models: Iterable[Any], own: set[int], place: str | None) -> None:
        """The gradient of a unit's bias is 0 where no sample of the batch passes the unit."""
        left = set(own)
        for weight, bias in itertools.chain.from_iterable(map(_inner_layers, models)):
            key, units = id(weight), len(bias)
            if key not in left or units < _WIDE or not _is_plain(bias.grad):
                continue
            left.remove(key)
            looks = self._live.setdefault(key, [])
            looks.append(bias.grad.detach().numpy() != 0)
            del looks[:-_LOOKS_AT_UNITS]
            live = int(np.logical_or.reduce(looks).sum())
            self._dead.pop(key, None)
            # A layer that no sample of any batch passes is one that is not used (an expert).
            if len(looks) == _LOOKS_AT_UNITS and 0 < live <= (1 - _DEAD) * units:
                self._dead[key] = shape_of(weight), units - live, units, place


def _inner_layers(model: Any) -> list[tuple[Any, Any]]:
    """Weights and biases of a model's layers but the last one, whose units may be actions of which
    one is chosen."""
    layers = [module for module in model.modules() if isinstance(module, _WITH_UNITS)]
    return [(layer.weight, layer.bias) for layer in layers[:-1][:_LAYERS] if layer.bias is not None]


#: Of each weight, what decay must take away in a step, a hundred times what is usual; numbers that
#: are nothing beside those of an initialization, and the share of them from which it is most.
_TAKES: Final = 0.01
_NOTHING: Final = 1e-8
_MOST: Final = 0.5


def _decayed(optimizer: Any, weights: Sequence[Any]) -> tuple[float, float, float] | None:
    """Rate, weight decay and the share of weights of which these have left nothing. Adam (but not
    AdamW) adds it to gradients, which it scales: it takes no share of a weight."""
    if not isinstance(optimizer, torch.optim.AdamW | torch.optim.SGD):
        return None
    for group in optimizer.param_groups:
        rate, decay = group.get("lr"), group.get("weight_decay")
        if not isinstance(rate, float | int) or not isinstance(decay, float | int):
            continue
        if rate * decay < _TAKES:
            continue
        own = {id(each) for each in group["params"]}
        samples = [
            _sample(each) for each in _some([weight for weight in weights if id(weight) in own])
        ]
        gone = max(
            (float(np.mean(sample < _NOTHING)) for sample in samples if sample is not None),
            default=0,
        )
        if gone >= _MOST:
            return float(rate), float(decay), gone
    return None


def _has_slope(tensor: Any) -> bool:
    return _is_plain(tensor.grad) and bool(tensor.grad.detach().numpy().any())


@np.errstate(all="ignore")  # numbers that are not finite would be warned of, in the script's name
def _are_alike(weights: Any) -> bool:
    """Have all units the same weights and the same gradients, which are not 0?"""
    for each in (weights, weights.grad):
        rows = each.detach().numpy().reshape(each.shape[0], -1)
        maximum = float(np.abs(rows[0]).max())
        # Of nearly all layers the second row tells.
        if not maximum > 0 or float(np.abs(rows[1] - rows[0]).max()) > _ALIKE * maximum:
            return False
        if float(np.abs(rows - rows[0]).max()) > _ALIKE * maximum:
            return False
    return True


# ---
# Numbers that are not finite: where they come from.

#: Functions whose slope is infinite (or 0/0) at the border of what they are defined for, by their
#: nodes, and how a script writes them.
_STEEP: Final = {
    "Sqrt": ("sqrt", r"\bsqrt\("),
    "Rsqrt": ("rsqrt", r"\brsqrt\("),
    "Pow": ("a power below 1", r"\bpow\(|\*\*\s*\(?(?:0?\.|1 */)"),
    "Acos": ("acos", r"\ba(?:rc)?cos\("),
    "Asin": ("asin", r"\ba(?:rc)?sin\("),
    "Std": ("std", r"\bstd\("),
}
#: Attributes of a data set and numbers of each that are looked at for a NaN.
_ATTRIBUTES: Final = 32
_MOST_NUMBERS: Final = 1 << 25
#: Samples in a list or a dictionary, and columns of a table.
_SAMPLES: Final = 1 << 13
_COLUMNS: Final = 256


def steep(optimizer: Any, loss: float, nodes: Iterable[Any]) -> Iterator[tuple[str, str]]:
    """The functions in the graph of a finite loss that may be why its gradients are not, and a
    pattern of how a script writes each."""
    trained = [tensor for tensor in tensors_of(optimizer) if tensor.grad is not None]
    if not np.isfinite(loss) or not any(_is_broken(tensor.grad) for tensor in trained[:_LAYERS]):
        return
    yield from _steep_of(nodes)


def _steep_of(nodes: Iterable[Any]) -> Iterator[tuple[str, str]]:
    known = {operator_of(node) for node in nodes if not _is_flat_power(node)}
    yield from (told for name, told in _STEEP.items() if name in known)


def _is_flat_power(node: Any) -> bool:
    return node.name().startswith("Pow") and not 0 < (saved_exponent(node) or 0) < 1


def only_line(file: str, patterns: Sequence[str]) -> str | None:
    """The one line of a file that has one of these; ``None``: none, or several have."""
    written = re.compile("|".join(patterns))
    lines = [
        number
        for number, line in enumerate(linecache.getlines(file), 1)
        if written.search(line.partition("#")[0])
    ]
    return f"{file}:{lines[0]}" if len(lines) == 1 else None


#: How a script sets autograd's anomaly mode, Lightning's Trainer too.
_ANOMALY: Final = r"\b(?:set_)?detect_anomaly\s*[(=](?!\s*(?:mode\s*=\s*)?False)"


def anomaly_at(place: Callable[[], str | None]) -> tuple[str, ...]:
    """Nothing: the anomaly mode is off; else the line that sets it, in the file of the training's
    line, or an empty one: none or several do there."""
    if not torch.is_anomaly_enabled():
        return ()
    return (only_line((place() or "").rpartition(":")[0], [_ANOMALY]) or "",)


#: How a script makes a tensor a root of gradients.
_ROOT: Final = r"\brequires_grad(?:_\(\s*(?:True\s*)?\)|\s*=\s*True\b)"


def rooted_at(backward: str) -> str:
    """The line that asks for the gradient of a loss that nothing was computed for, where the file
    has one; else that of its backward pass."""
    return only_line(backward.rpartition(":")[0], [_ROOT]) or backward


def _is_broken(tensor: Any) -> bool:
    return _is_plain(tensor) and not bool(np.isfinite(tensor.detach().numpy()).all())


#: Data sets within others that are looked at (``Subset``, ``ConcatDataset``, wrappers of a script).
_NESTED: Final = 8


def gap_in(data: Any) -> tuple[str, int, int] | None:
    """The tensor, array or column of a data set, or of one within it, that has a number which is
    not finite: its name, the row, and how many there are."""
    waiting = [("", data)]
    for prefix, each in itertools.islice(waiting, _NESTED):  # also what is added meanwhile
        for name, part in _parts(each):
            numbers = _numbers(part)
            if numbers is not None and numbers.size and numbers.size <= _MOST_NUMBERS:
                bad = ~np.isfinite(numbers)
                if bad.any():
                    return f"{prefix}{name}", int(np.argwhere(bad)[0][0]), int(bad.sum())
        waiting += [
            (f"{prefix}{name}.", part) for name, part in _held(each) if isinstance(part, Dataset)
        ]
    return None


def _held(data: Any) -> Iterator[tuple[str, Any]]:
    """Attributes of a data set, and the entries of those that are lists or dictionaries."""
    every = list(vars(data).items())[:_ATTRIBUTES] if hasattr(data, "__dict__") else []
    for name, value in every:
        if isinstance(value, list | tuple | dict):
            entries = value.items() if isinstance(value, dict) else enumerate(value)
            for key, part in itertools.islice(entries, _SAMPLES):
                within = part[:_TENSORS] if isinstance(part, list | tuple) else [part]
                for number, one in enumerate(within):
                    entry = f"{name}[{key!r}]"
                    yield entry if within[0] is part else f"{entry}[{number}]", one
        else:
            yield name, value


def _parts(data: Any) -> Iterator[tuple[str, Any]]:
    """Parts of a sample or batch with their paths, and the columns of tables."""
    for name, value in _held(data):
        if type(value).__module__.partition(".")[0] == "pandas" and hasattr(value, "columns"):
            for column in list(value.columns)[:_COLUMNS]:
                yield f"{name}[{column!r}]", value[column].to_numpy()
        else:
            yield name, value


def _numbers(part: Any) -> NDArray[Any] | None:
    if isinstance(part, torch.Tensor):
        is_known = part.device.type == "cpu" and part.dtype in (torch.float32, torch.float64)
        return part.detach().numpy() if is_known and part.dim() else None
    is_array = isinstance(part, np.ndarray) and part.dtype.kind == "f" and part.ndim
    return part if is_array else None


def where_not_finite(
    optimizer: Any, loss: float, nodes: Sequence[Any], data: Any, place: str
) -> Misuse | None:
    """The misuse behind numbers that are not finite and that an optimizer is about to use: the data
    of a ``loss`` that is not, or a function among the ``nodes`` of one that is; no kind: not known.
    """
    if not math.isfinite(loss):
        gap = gap_in(data)
        told = () if gap is None else (gap[0], str(gap[1]), str(gap[2]))
        return Misuse("data_not_finite" if gap else "", told)
    return _of_slopes(list(steep(optimizer, loss, nodes)) if nodes else [], place)


def steep_in(nodes: Sequence[Any], place: str) -> Misuse | None:
    """The functions among the ``nodes`` of a loss whose slope is infinite somewhere: where weights
    are not finite, and losses before that were and did not grow, one of them was there."""
    return _of_slopes(list(_steep_of(nodes)), place)


def _of_slopes(named: Sequence[tuple[str, str]], place: str) -> Misuse | None:
    if not named:
        return None
    at = only_line(place.rpartition(":")[0], [each for _, each in named])
    return Misuse("slope_infinite", tuple(name for name, _ in named), at)


# ---
# Numbers that are known to be 0, and what is infinite by them.


#: Numbers that are read.
_MOST_READ: Final = 1 << 20


def known_numbers(tensor: torch.Tensor) -> torch.Tensor | None:
    """The numbers of a tensor of the host, or of a simulated one where they are known."""
    if tensor.numel() > _MOST_READ:
        return None
    if tensor.device.type == "cpu":
        return tensor.detach()
    content: Callable[[], torch.Tensor | None] | None = getattr(tensor, "_content", None)
    return None if content is None else content()


def is_finite(tensor: torch.Tensor) -> bool:
    """Are all of a tensor's numbers known to be finite?"""
    numbers = known_numbers(tensor)
    with no_dispatch():
        return numbers is not None and bool(numbers.isfinite().all())


def holds_nan(copied: torch.Tensor, result: torch.Tensor) -> bool:
    """Is it a tensor of the host that is copied, with NaN in it?"""
    if copied.device.type != "cpu" or copied is result or not copied.is_floating_point():
        return False
    numbers = known_numbers(copied)
    with no_dispatch():
        return numbers is not None and bool(numbers.isnan().any())


def zeros_inverted(name: str, args: Sequence[Any], result: Any) -> tuple[str, ...] | None:
    """Of a function that is infinite at 0: how many numbers are 0, of how many, and what it does
    with them; ``None``: none is known to be."""
    if name == "pow":
        power = args[1] if len(args) > 1 else None
        if not isinstance(power, int | float) or power >= 0:
            return None
        below, how = args[0], f"0 ** {power:g}"
    elif name in ("rsqrt", "reciprocal", "rtruediv", "rdiv"):
        below, how = args[0], {"rsqrt": "rsqrt(0)"}.get(name, "1 / 0")
    else:
        below, how = args[1] if len(args) > 1 else None, "a division by 0"
    if isinstance(below, int | float):
        return ("1", "1", how) if below == 0 and result.is_floating_point() else None
    numbers = known_numbers(below) if isinstance(below, torch.Tensor) else None
    if numbers is None or not numbers.numel() or not result.is_floating_point():
        return None
    with no_dispatch():
        zeros = int(numbers.numel() - numbers.count_nonzero())
    return (str(zeros), str(numbers.numel()), how) if zeros else None
