"""Intervention: the next smaller model of the same family, where the script creates one by its
name."""

from __future__ import annotations

import functools
import re
import sys
from collections.abc import Callable, Collection, Mapping
from types import ModuleType
from typing import Any, Final

from trainfit.results.runs.trace import Applicability
from trainfit.simgpu.device.user_location import user_frame
from trainfit.simgpu.interventions.script_state import Intervention, Scene, places

# ---
# The next smaller model of a family, by the names of torchvision and timm.


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
    """How much smaller the size ``other`` is than ``part``; ``None`` where it is not."""
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


_Builder = Callable[..., Any]
#: Arguments that name or load weights: another model has others, and a simulation needs none.
_WEIGHTS: Final = ("weights", "pretrained", "weights_backbone", "pretrained_cfg")


class SmallerModel(Intervention):
    """``torchvision.models.resnet101(…)`` for ``resnet152(…)``, and so on, by the names that
    ``torchvision.models`` and ``timm.create_model`` know.

    The smaller model is made without its pretrained weights. A finding's ``targets`` are the
    present name and the smaller one, its ``detail`` both in words.
    """

    name = "smaller-model"

    def __init__(self, targets: tuple[str, ...] = ()) -> None:
        super().__init__(targets)
        #: By the name of a model that was made: the names there are, and the lines that made it.
        self._made: dict[str, Collection[str]] = {}
        self._places: dict[str, None] = {}
        self._inside = False

    def watch(self, scene: Scene) -> None:
        super().watch(scene)
        self._hook(scene)

    def apply(self, scene: Scene) -> None:
        self.scene = scene
        self._hook(scene)

    def finding(self) -> Applicability:
        if len(self._made) > 1:
            return self.no(f"several models are created by name ({', '.join(sorted(self._made))})")
        for name, names in self._made.items():
            smaller = next_smaller(name, names)
            if smaller is None:
                return self.no(f"no smaller variant of {name} is known")
            detail = f"{smaller} instead of {name}"
            found = places(self._places)
            return Applicability(
                self.name, True, targets=(name, smaller), places=found, detail=detail
            )
        if any(_is_of(model, "transformers") for model in self.scene.models):
            return self.no(
                "the model is from Transformers; choose a smaller one on the Hub, "
                "put its name into the command and re-run the plan"
            )
        return self.no("the script creates no model by a torchvision or timm name")

    # -- the factories -------------------------------------------------------------------------

    def _hook(self, scene: Scene) -> None:
        for module, replace in (
            ("torchvision.models", self._replace_torchvision),
            ("timm.models._factory", self._replace_timm),
        ):
            scene.patches.when_imported(module, functools.partial(replace, scene))

    def _replace_torchvision(self, scene: Scene, models: ModuleType) -> None:
        """Every builder, wherever it is looked up: its own module, the package, the registry."""
        registry = sys.modules["torchvision.models._api"]
        builders: Mapping[str, _Builder] = registry.BUILTIN_MODELS
        classifiers = {k: v for k, v in builders.items() if v.__module__.count(".") == 2}
        replaced = {k: self._builder(k, classifiers) for k in classifiers}
        for name, builder in classifiers.items():
            for owner in (models, sys.modules[builder.__module__]):
                if vars(owner).get(builder.__name__) is builder:
                    scene.patches.set(owner, builder.__name__, replaced[name])
        scene.patches.set(registry, "BUILTIN_MODELS", {**builders, **replaced})

    def _replace_timm(self, scene: Scene, factory: ModuleType) -> None:
        """What ``create_model`` looks a name up with."""
        look_up: Callable[[str], _Builder] = factory.model_entrypoint
        registry = sys.modules["timm.models._registry"]

        def model_entrypoint(name: str, *args: Any, **kwargs: Any) -> _Builder:
            present = look_up(name, *args, **kwargs)
            names = registry._model_entrypoints
            return self._builder(name, {**names, name: present})

        scene.patches.set(factory, "model_entrypoint", model_entrypoint)

    def _builder(self, name: str, builders: Mapping[str, _Builder]) -> _Builder:
        """``builders[name]``, watched or replaced; not where it is called by another of them."""
        present = builders[name]

        @functools.wraps(present)
        def build(*args: Any, **kwargs: Any) -> Any:
            if self._inside:
                return present(*args, **kwargs)
            self._inside = True
            try:
                if self.targets[:1] == (name,):
                    self.changed += 1
                    kept = {k: v for k, v in kwargs.items() if k not in _WEIGHTS}
                    return builders[self.targets[1]](**kept)
                self._note(name, builders)
                return present(*args, **kwargs)
            finally:
                self._inside = False

        return build

    def _note(self, name: str, builders: Mapping[str, _Builder]) -> None:
        self._made[name] = tuple(builders)
        place = user_frame()
        if place is not None:
            self._places[place] = None


def _is_of(model: Any, package: str) -> bool:
    return any(type(part).__module__.partition(".")[0] == package for part in model.modules())
