"""The sequences that a run's models are given: how long they are, and how long they may be."""

from __future__ import annotations

import contextlib
from typing import Any, Final

import torch
from torch.nn.modules import module as nn_module

from trainfit.results.runs.trace import ContextSeen

#: What models call the positions that they are made for, in their configuration.
_POSITIONS: Final = (
    *("max_position_embeddings", "n_positions", "max_seq_len", "max_seq_length"),
    *("block_size", "context_length", "seq_len", "n_ctx", "max_target_positions"),
)


class ContextWatch:
    """Notes the longest sequence of token ids that an embedding was given, and how many positions
    the script's models are made for."""

    def __init__(self) -> None:
        self._handle: Any = None
        self._known: set[int] = set()
        self._longest: int | None = None
        self._positions: int | None = None

    def install(self) -> None:
        """Watch from now on, until :meth:`remove` is called."""
        self._handle = nn_module.register_module_forward_pre_hook(self._enter)

    def remove(self) -> None:
        """Take the hook away."""
        if self._handle is not None:
            self._handle.remove()

    def seen(self) -> ContextSeen:
        """What was noted so far."""
        return ContextSeen(self._longest, self._positions)

    def _enter(self, module: torch.nn.Module, given: Any) -> None:
        with contextlib.suppress(Exception):  # a module of the user's, whatever it raises
            if isinstance(module, torch.nn.Embedding):
                self._given(given)
            elif id(module) not in self._known:
                self._known.add(id(module))
                self._made_for(module.__dict__.get("config"))

    def _given(self, given: Any) -> None:
        ids = given[0] if given else None
        if isinstance(ids, torch.Tensor) and ids.dim() == 2:
            self._longest = max(self._longest or 0, int(ids.shape[1]))

    def _made_for(self, config: Any) -> None:
        positions = positions_of(config)
        # The model and its parts say the same; of two models the smaller counts.
        if positions is not None:
            self._positions = min(positions, self._positions or positions)


def positions_of(config: Any) -> int | None:
    """The positions that a model of this configuration is made for; ``None``: it does not say."""
    with contextlib.suppress(Exception):  # an object of the user's, whatever it raises
        text = getattr(config, "get_text_config", lambda: config)()
        found = (getattr(text, name, None) for name in _POSITIONS)
        return next((each for each in found if type(each) is int and each > 0), None)
    return None
