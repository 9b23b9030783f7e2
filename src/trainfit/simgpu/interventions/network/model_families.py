"""The next smaller model of a family, by the names of torchvision and timm."""

from __future__ import annotations

import re
from collections.abc import Collection
from typing import Final

#: Words for sizes, the smallest first; those in one place mean the same.
_SIZES: Final = (
    *(("atto",), ("femto",), ("pico",), ("nano",), ("tiny", "t", "xxs"), ("mini", "xs")),
    *(("small", "s"), ("medium", "m"), ("base", "b"), ("large", "l"), ("xlarge", "xl")),
    *(("huge", "h"), ("giant", "g"), ("gigantic",)),
)
_RANK: Final = {word: rank for rank, words in enumerate(_SIZES) for word in words}
_NUMBERED: Final = re.compile(r"([a-z_0-9]*?)(\d+)([a-z]*)")
#: Numbers behind these are no sizes: of patches, of windows, versions.
_NO_SIZE: Final = ("patch", "window", "v", "p", "w")
#: Of families whose sizes are bare numbers; elsewhere those are resolutions and patches.
_BARE: Final = ("regnet",)
#: densenet161 is wider than densenet169 and densenet201, and the largest of them.
_LARGER_THAN_NAMED: Final = ("densenet161",)


def next_smaller(name: str, names: Collection[str]) -> str | None:
    """The largest of ``names`` that is called as ``name`` is but for a smaller size.

    "resnet152" -> "resnet101", "vit_large_patch16_224" -> "vit_base_patch16_224",
    "efficientnet_b4" -> "efficientnet_b3". ``None`` where there is none, or where the name does
    not tell.
    """
    parts = name.split("_")
    known = {each for each in names if each not in _LARGER_THAN_NAMED} - {name}
    for index, part in enumerate(parts):
        ranks = {}
        for other in known:
            others = other.split("_")
            if len(others) == len(parts) and _differ_at(parts, others) == [index]:
                rank = _smaller_by(part, others[index], parts[0])
                if rank is not None:
                    ranks[other] = rank
        if ranks:
            return min(ranks, key=lambda each: (ranks[each], each))
    return None


def _differ_at(parts: list[str], others: list[str]) -> list[int]:
    return [i for i, (one, two) in enumerate(zip(parts, others, strict=True)) if one != two]


def _smaller_by(part: str, other: str, family: str) -> int | None:
    """By how much the size ``other`` is below ``part``; ``None`` where it is not."""
    if part in _RANK and other in _RANK:
        steps = _RANK[part] - _RANK[other]
        return steps if steps > 0 else None
    one, two = _NUMBERED.fullmatch(part), _NUMBERED.fullmatch(other)
    if one is None or two is None or (one[1], one[3]) != (two[1], two[3]):
        return None
    bare = not one[1] and not one[3]
    if one[1] in _NO_SIZE or (bare and not family.startswith(_BARE)):
        return None
    steps = int(one[2]) - int(two[2])
    return steps if steps > 0 else None
