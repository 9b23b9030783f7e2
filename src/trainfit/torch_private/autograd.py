"""Autograd's engine and graph."""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any

import torch
from torch import autograd

from trainfit.torch_private.needed import attribute, needed, place

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

#: How often a tensor was changed in place.
version: Callable[[torch.Tensor], int] = attribute(torch.Tensor, "_version")
#: The number of a node.
node_number: Callable[[Any], int] = operator.methodcaller("_sequence_nr")

ENGINE_RUN_BACKWARD = place(autograd, "_engine_run_backward")
MAKE_GRADS = place(autograd, "_make_grads")


def apply_function(kind: Any, /, *args: Any, **kwargs: Any) -> Any:
    """``kind.apply(…)`` as ``torch.autograd.Function`` has it.

    A classmethod in Python up to PyTorch 2.13, one in C since; both bind alike.
    """
    return _apply(None, kind)(*args, **kwargs)
