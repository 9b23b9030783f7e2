"""The sequences that a run's models are given: how long they are, and how long they may be."""

from __future__ import annotations

import contextlib
from typing import Any, Final

import torch
from torch.nn.modules import module as nn_module

from trainfit.results.runs.trace import ContextSeen
from trainfit.simgpu.patching import PatchSet

#: What models call the positions that they are made for, in their configuration.
_POSITIONS: Final = (
    *("max_position_embeddings", "n_positions", "max_seq_len", "max_seq_length"),
    *("block_size", "context_length", "seq_len", "n_ctx", "max_target_positions"),
)


#: Ways to scale rotary positions that lengthen the context, by ``factor`` times what it was.
_SCALED: Final = ("yarn", "linear", "dynamic")


class ContextWatch:
    """Notes the longest sequence of token ids that embeddings of a model were given, and how many
    positions the model is made for."""

    def __init__(self) -> None:
        self._known: set[int] = set()
        #: Positions of the innermost model that an embedding is of, and what was given to such.
        self._of: dict[int, int] = {}
        self._given: dict[int | None, int] = {}

    def install(self, patches: PatchSet) -> None:
        """Watch from now on, until ``patches`` is restored."""
        patches.on_restore(nn_module.register_module_forward_pre_hook(self._enter).remove)

    def seen(self) -> ContextSeen:
        """What was noted so far: of a model that was given too much, else of the one that was given
        the most."""
        if not self._given:
            return ContextSeen(None, min(self._of.values(), default=None))
        known = [(longest, each) for each, longest in self._given.items() if each is not None]
        too_long = [(longest, each) for longest, each in known if longest > each]
        if not known:
            return ContextSeen(self._given[None], None)
        return ContextSeen(*max(too_long or known))

    def generates(self, positions: int, limit: int) -> None:
        """A text is so long that is given to a model that is made for ``limit`` positions."""
        self._given[limit] = max(self._given.get(limit, 0), positions)

    def _enter(self, module: torch.nn.Module, given: Any) -> None:
        with contextlib.suppress(Exception):  # a module of the user's, whatever it raises
            if isinstance(module, torch.nn.Embedding):
                self._note(module, given)
            elif id(module) not in self._known:
                self._known.add(id(module))
                positions = positions_of(module.__dict__.get("config"))
                if positions is not None:
                    embeddings = (e for e in module.modules() if isinstance(e, torch.nn.Embedding))
                    self._of.update((id(embedding), positions) for embedding in embeddings)

    def _note(self, embedding: torch.nn.Embedding, given: Any) -> None:
        ids = given[0] if given else None
        if isinstance(ids, torch.Tensor) and ids.dim() == 2:
            positions = self._of.get(id(embedding))
            self._given[positions] = max(self._given.get(positions, 0), int(ids.shape[1]))


def positions_of(config: Any) -> int | None:
    """The positions that a model of this configuration is made for; ``None``: it does not say."""
    with contextlib.suppress(Exception):  # an object of the user's, whatever it raises
        text = getattr(config, "get_text_config", lambda: config)()
        # T5's are relative, as many as there are tokens; that field is only in its files.
        is_relative = hasattr(text, "relative_attention_num_buckets")
        names = (name for name in _POSITIONS if not (is_relative and name == "n_positions"))
        found = (getattr(text, name, None) for name in names)
        positions = next((each for each in found if type(each) is int and each > 0), None)
        return None if positions is None else max(positions, _scaled(text, positions))
    return None


def _scaled(config: Any, positions: int) -> int:
    """The number of positions after a scaling of rotary positions."""
    scaling = getattr(config, "rope_parameters", None) or getattr(config, "rope_scaling", None)
    if not isinstance(scaling, dict):
        return positions
    kind, factor = scaling.get("rope_type", scaling.get("type")), scaling.get("factor")
    if kind not in _SCALED or not isinstance(factor, int | float):
        return positions
    before = scaling.get("original_max_position_embeddings")
    if not isinstance(before, int):
        # Where that is not said, yarn's positions are those with the factor.
        before = positions if kind != "yarn" else 0
    return int(before * factor)
