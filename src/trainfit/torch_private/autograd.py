"""Autograd's engine and its graphs: nodes, what they are computed of, and what they keep.

A graph is that of a backward pass: from a loss's node to those of the parameters. What a node is
computed of are its operands; of an operand without a graph there is no node.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterable, Iterator
from typing import Any, Final

import torch
from torch import autograd

from trainfit.torch_private.needed import needed, place
from trainfit.torch_private.operators import no_dispatch

#: Nodes of a graph up to which it is looked at as a whole.
_NODES: Final = 20_000

with needed():
    #: The number of the backward pass that this thread is in; -1 outside of one.
    graph_task_id: Callable[[], int] = torch._C._current_graph_task_id
    #: The node whose backward is computed.
    current_node: Callable[[], Any] = torch._C._current_autograd_node
    #: The number that the next node gets.
    sequence_number: Callable[[], int] = torch._C._autograd._get_sequence_nr
    _engine: Any = autograd.Variable._execution_engine
    #: Calls a function at the end of the backward pass that goes on.
    queue_callback: Callable[[Callable[[], None]], None] = _engine.queue_callback
    torch._C._FunctionBase._sequence_nr  # noqa: B018
    _apply = vars(autograd.Function)["apply"].__get__

#: The number of a node.
node_number: Callable[[Any], int] = operator.methodcaller("_sequence_nr")

ENGINE_RUN_BACKWARD = place(autograd, "_engine_run_backward")
MAKE_GRADS = place(autograd, "_make_grads")


def apply_function(kind: Any, /, *args: Any, **kwargs: Any) -> Any:
    """``kind.apply(…)`` as ``torch.autograd.Function`` has it.

    A classmethod in Python up to PyTorch 2.13, one in C since; both bind alike.
    """
    return _apply(None, kind)(*args, **kwargs)


# ---
# Ways through a graph.


def operands(node: Any) -> list[Any]:
    """The nodes that a node is computed of."""
    return [each for each, _ in node.next_functions if each is not None]


def first_operand(node: Any) -> Any | None:
    """The node of the first operand; ``None``: it has no graph, or there is no operand."""
    return node.next_functions[0][0] if node.next_functions else None


def only_operand(node: Any) -> Any | None:
    """The one operand of a node that has a graph; ``None``: it has several, or none."""
    known = operands(node)
    return known[0] if len(known) == 1 else None


def walk(
    *roots: Any, following: Callable[[Any], Iterable[Any]] = operands, most: int = _NODES
) -> Iterator[Any]:
    """The nodes of a graph, at most so many, depth first, the last operand's first. ``following``:
    the nodes to go on to."""
    known: set[Any] = set()
    waiting = list(roots)
    while waiting and len(known) < most:
        node = waiting.pop()
        if node is None or node in known:
            continue
        known.add(node)
        yield node
        waiting += following(node)


def nodes_of(root: Any, ends: Callable[[Any], bool] = lambda _: False) -> list[Any] | None:
    """The nodes of a graph, none beyond those where it ``ends``; ``None``: it is too large for a
    look."""
    way = walk(root, following=lambda node: [] if ends(node) else operands(node), most=_NODES + 1)
    found = list(way)
    return found if len(found) <= _NODES else None


def behind(node: Any, through: tuple[str, ...], most: int = 8) -> Any | None:
    """The node itself or, of those behind it, the first that is of none of these operators, by the
    first operand; ``None``: there is none within so many."""
    for _ in range(most):
        if node is None or not node.name().startswith(through):
            return node
        node = first_operand(node)
    return None


# ---
# What a node is of, and what it keeps.


def operator_of(node: Any) -> str:
    """The operator that a node of a graph is of: "Mul"."""
    name: str = node.name()
    return name.split("Backward")[0]


def parameters_of(nodes: Iterable[Any]) -> list[torch.nn.Parameter]:
    """The parameters that these nodes of a graph stand for."""
    leaves = (getattr(node, "variable", None) for node in nodes)
    return [leaf for leaf in leaves if isinstance(leaf, torch.nn.Parameter)]


def number_of(value: Any) -> float | None:
    """A number that a node keeps of the host's; ``None``: it keeps a tensor, or nothing."""
    if not isinstance(value, torch.Tensor) or value.device.type != "cpu" or value.numel() != 1:
        return None
    # A number that PyTorch wrapped is none for a mode that sees all operators.
    with no_dispatch():
        return float(value)


def saved_other(node: Any) -> Any:
    """What a node of a product or quotient keeps of its second operand; ``None``: nothing."""
    return getattr(node, "_saved_other", None)


def saved_exponent(node: Any) -> float | None:
    """What a node of a power keeps of its exponent; ``None``: it is no number."""
    exponent = getattr(node, "_saved_exponent", None)
    return float(exponent) if isinstance(exponent, int | float) else None


def saved_limits(node: Any) -> tuple[float | None, float | None]:
    """The least and the largest number that a node of a clamp lets pass; ``None``: no limit, or it
    is not told."""
    found = (getattr(node, f"_saved_{name}", None) for name in ("min", "max"))
    least, largest = (float(each) if isinstance(each, int | float) else None for each in found)
    return least, largest


def is_mean(node: Any) -> bool | None:
    """Does a node of a loss function average (no sum, no numbers one by one)? ``None``: it is not
    told."""
    # As torch.nn.functional numbers reductions: 0 none, 1 mean, 2 sum.
    reduction = getattr(node, "_saved_reduction", None)
    return None if reduction is None else reduction == 1


def forward_of(node: Any) -> Any:
    """``forward`` of the function of the script's own that a node of a graph is of; ``None``: it is
    of none."""
    return getattr(getattr(type(node), "_forward_cls", None), "forward", None)


def saved_dimension(node: Any) -> int | None:
    """The dimension that a node of a softmax goes along, which may be counted from the end;
    ``None``: not known."""
    dim = getattr(node, "_saved_dim", None)
    # It is handed out as a number without a sign.
    return dim - (1 << 64) if isinstance(dim, int) and dim >= 1 << 63 else dim


def sizes_of(node: Any) -> tuple[int, ...] | None:
    """Sizes of the tensor that a node computed; ``None``: they are not told."""
    made = getattr(node, "_input_metadata", None)
    return tuple(made[0].shape) if made else None


def softmax_over(node: Any) -> int | None:
    """Numbers that a softmax's node was taken over; ``None``: it is not told."""
    sizes, dim = sizes_of(node), saved_dimension(node)
    if sizes is None or dim is None:
        return None
    return int(sizes[dim]) if -len(sizes) <= dim < len(sizes) else None


#: torch/csrc/autograd/saved_variable.cpp
_CHANGED: Final = "modified by an inplace operation"
_KEPT: Final = "_saved_"


def needs_changed(root: Any) -> str | None:
    """The operator of a graph that keeps a tensor which was changed in place since ("Mul");
    ``None``: none does, or the graph is too large for a look."""
    for node in nodes_of(root) or ():
        for name in dir(node):
            if name.startswith(_KEPT):
                try:
                    getattr(node, name)
                except RuntimeError as error:
                    if _CHANGED in str(error):
                        return operator_of(node)
    return None
