"""DeepSpeed's optimizers on the simulated device: the extensions that they build are not built.

What a kernel of theirs reads and writes is read from ``csrc/adam`` (0.19): Adam's of a GPU updates
in place, without memory of its own, as PyTorch's fused one does; that of the CPU updates what is
in the host's memory.
"""

from __future__ import annotations

import types
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final

import torch

from trainfit.torch_private import operators as private


def _fused_adam(assume: Callable[[str], None]) -> Any:
    def multi_tensor_adam(
        chunk: int,
        skips: torch.Tensor,
        lists: Sequence[Sequence[torch.Tensor]],
        lr: float,
        beta1: float,
        beta2: float,
        eps: float,
        *_: Any,
    ) -> None:
        """Gradients, parameters and both states; the last of the arguments is the weight decay."""
        gradients, parameters, means, squares = (list(each) for each in lists)
        private.fused_adamw_(
            parameters, gradients, means, squares, [], [], lr=lr, beta1=beta1, beta2=beta2,
            weight_decay=float(_[-1]), eps=eps, amsgrad=False, maximize=False,
        )  # fmt: skip

    return types.SimpleNamespace(multi_tensor_adam=multi_tensor_adam)


def _cpu_adam(assume: Callable[[str], None]) -> Any:
    def ignored(*_: Any) -> None:
        """What is on the host is not known, and its time is not counted."""

    assume("the time of DeepSpeed's Adam on the CPU was not counted")
    names = ("create_adam", "adam_update", "adam_rollback", "destroy_adam")
    return types.SimpleNamespace(**dict.fromkeys(names, ignored))


#: By the name of an extension that is built when it is loaded: what takes its place.
EXTENSIONS: Final[Mapping[str, Callable[[Callable[[str], None]], Any]]] = {
    "fused_adam": _fused_adam,
    "cpu_adam": _cpu_adam,
}
#: Where DeepSpeed's sources are.
_SOURCES: Final = "deepspeed"


def extension_of(name: str, sources: Sequence[str], assume: Callable[[str], None]) -> Any:
    """What stands in for an extension of DeepSpeed's; ``None`` for all others."""
    made = EXTENSIONS.get(name)
    if made is None or not any(_SOURCES in source for source in sources):
        return None
    return made(assume)
