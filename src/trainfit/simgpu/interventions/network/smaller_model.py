"""Intervention: the next smaller model of the same family, where the script creates one by its
name."""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Collection, Mapping
from types import ModuleType
from typing import Any, Final

from trainfit.results.runs.trace import Applicability
from trainfit.simgpu.import_hook import ImportHook
from trainfit.simgpu.interventions.base import Intervention, places
from trainfit.simgpu.interventions.network.model_families import next_smaller
from trainfit.simgpu.interventions.script_state import Scene
from trainfit.simgpu.recording.user_location import user_frame

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
            hook = ImportHook(module, functools.partial(replace, scene))
            hook.install()
            scene.at_end.append(hook.remove)

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
