"""Interventions on a model and its layers: global pooling, in-place activations, channels_last, a
smaller model.

That is the next smaller model of the same family, where the script creates one by its
name.
"""

from __future__ import annotations

import functools
import math
import re
import sys
from collections.abc import Callable, Collection, Mapping
from types import ModuleType
from typing import Any, Final

import torch
from torch.nn.modules import module as nn_module

from trainfit.results.runs.trace import Applicability
from trainfit.simgpu.device.tensor import SimulatedTensor
from trainfit.simgpu.device.user_location import user_frame
from trainfit.simgpu.device.values import tensors_in
from trainfit.simgpu.interventions.script_state import Intervention, Scene, places
from trainfit.torch_private.modules import Dropout, children_of
from trainfit.torch_private.operators import map_leaves

#: Share of the model's parameters from which on a head is worth removing.
_LARGE = 0.1


class GlobalPooling(Intervention):
    """The mean over the feature map, and one linear layer, for a head on the flattened map.

    Found where a ``Linear`` takes exactly the elements (C·h·w, h·w > 1) of the feature map
    that was made last, and it with what follows in its ``Sequential`` holds a tenth of the
    model's parameters. The head's last ``Linear`` says how many outputs there are.
    """

    name = "global-pooling"

    def __init__(self, targets: tuple[str, ...] = ()) -> None:
        super().__init__(targets)
        self._map: tuple[int, ...] | None = None
        self._found: dict[int, tuple[torch.nn.Linear, int]] = {}

    # -- survey --------------------------------------------------------------------------

    def watch(self, scene: Scene) -> None:
        super().watch(scene)
        before = nn_module.register_module_forward_pre_hook(self._before)
        after = nn_module.register_module_forward_hook(self._after)
        scene.patches.on_restore(before.remove, after.remove)

    def _before(self, module: torch.nn.Module, args: Any) -> None:
        if type(module) is not torch.nn.Linear or self._map is None or not args:
            return
        channels, *sides = self._map
        flat = isinstance(args[0], torch.Tensor) and args[0].dim() == 2
        if flat and module.in_features == channels * math.prod(sides) and math.prod(sides) > 1:
            self._found[id(module)] = (module, channels)

    def _after(self, module: torch.nn.Module, _: Any, result: Any) -> None:
        if isinstance(result, torch.Tensor) and result.dim() == 4:
            self._map = tuple(result.shape[1:])

    def finding(self) -> Applicability:
        for linear, channels in self._found.values():
            path = self.scene.path_of(linear)
            if path is None:
                continue
            model = self.scene.models[int(path.partition(":")[0])]
            head = _head(model, path.partition(":")[2])
            size = sum(p.numel() for layer in head for p in layer.parameters())
            if size >= _LARGE * sum(p.numel() for p in model.parameters()):
                outputs = _outputs(head)
                detail = f"{linear.in_features} inputs, {channels} channels, {outputs} outputs"
                return Applicability(self.name, True, targets=(path, str(channels)), detail=detail)
        return self.no("no large Linear layer has a flattened feature map as input")

    # -- trial ---------------------------------------------------------------------------

    def apply(self, scene: Scene) -> None:
        self.scene = scene
        scene.on_parameters.append(self._replace)

    def _replace(self, given: list[Any]) -> list[Any]:
        """Put the pooled layer into the model and into what the optimizer is given."""
        path, channels = self.targets
        linear = next(iter(self.scene.modules_at((path,))), None)
        if self.changed or not isinstance(linear, torch.nn.Linear):
            return given
        model = self.scene.models[int(path.partition(":")[0])]
        inner = path.partition(":")[2]
        head = _head(model, inner)
        gone = {id(p) for layer in head for p in layer.parameters()}
        pooled = _Pooled(int(channels), _outputs(head), linear.weight)
        parent, name = _parent(model, inner)
        children_of(parent)[name] = pooled
        if type(parent) is torch.nn.Sequential:
            later = list(children_of(parent))[list(children_of(parent)).index(name) + 1 :]
            for child in later:
                children_of(parent)[child] = torch.nn.Identity()
        self.changed += 1
        return _exchanged(given, gone, list(pooled.parameters()))


class _Pooled(torch.nn.Module):
    """(B, C·h·w) -> (B, outputs) through the mean of each channel."""

    def __init__(self, channels: int, outputs: int, like: torch.Tensor) -> None:
        super().__init__()
        self.channels = channels
        self.linear = torch.nn.Linear(channels, outputs, device=like.device, dtype=like.dtype)

    def forward(self, flat: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = self.linear(flat.view(len(flat), self.channels, -1).mean(-1))
        return result


def _parent(model: torch.nn.Module, path: str) -> tuple[torch.nn.Module, str]:
    before, _, name = path.rpartition(".")
    return model.get_submodule(before), name


def _head(model: torch.nn.Module, path: str) -> list[torch.nn.Module]:
    """The layer at ``path`` and, in a ``Sequential``, those behind it."""
    parent, name = _parent(model, path)
    if type(parent) is not torch.nn.Sequential:
        return [children_of(parent)[name]]
    return list(parent)[list(children_of(parent)).index(name) :]


def _outputs(head: list[torch.nn.Module]) -> int:
    linears = [layer for layer in head if isinstance(layer, torch.nn.Linear)]
    return int(linears[-1].out_features)


def _exchanged(given: list[Any], gone: set[int], new: list[Any]) -> list[Any]:
    """The optimizer's argument with ``new`` where the first of ``gone`` was."""
    left = list(new)

    def exchange(params: list[Any]) -> list[Any]:
        kept: list[Any] = []
        for parameter in params:
            is_named = isinstance(parameter, tuple)
            if id(parameter[1] if is_named else parameter) not in gone:
                kept.append(parameter)
                continue
            kept += [(f"pooled{i}", p) for i, p in enumerate(left)] if is_named else left
            left.clear()
        return kept

    if given and isinstance(given[0], dict):
        return [{**group, "params": exchange(list(group["params"]))} for group in given]
    return exchange(given)


# ---
# Intervention: in-place activations.


aten = torch.ops.aten

#: Backward operators that take an activation's input, or as well its result, which is what
#: they take after an activation in place (``tools/autograd/derivatives.yaml``).
_FROM_RESULT = frozenset(
    {
        *(aten.threshold_backward.default, aten.leaky_relu_backward.default),
        *(aten.elu_backward.default, aten.hardtanh_backward.default),
    }
)


class InplaceActivations(Intervention):
    """``inplace=True`` for activation modules where nobody else reads their input.

    Autograd refuses an overwritten tensor that it needs itself, but not one that the script
    reads again later, which would be silently wrong. So an activation qualifies only if, in
    every call that was watched, no operator of the forward or backward pass but its own took
    the storage of its input afterwards.
    """

    name = "inplace"

    def __init__(self, targets: tuple[str, ...] = ()) -> None:
        super().__init__(targets)
        self._calls: dict[int, torch.nn.Module] = {}
        self._refused: set[int] = set()
        #: By the number of an input's allocation: the modules that took it.
        self._inputs: dict[int, list[int]] = {}
        self._active = 0

    # -- survey --------------------------------------------------------------------------

    def watch(self, scene: Scene) -> None:
        super().watch(scene)
        before = nn_module.register_module_forward_pre_hook(self._before)
        after = nn_module.register_module_forward_hook(self._after)
        scene.patches.on_restore(before.remove, after.remove)
        scene.operators.listen(self._look)

    def _before(self, module: torch.nn.Module, _: Any) -> None:
        self._active += _could_be_inplace(module)

    def _after(self, module: torch.nn.Module, args: Any, result: Any) -> None:
        if not _could_be_inplace(module):
            return
        self._active -= 1
        if not torch.is_grad_enabled() or len(args) != 1:
            return
        value = args[0]
        self._calls[id(module)] = module
        if type(value) is not SimulatedTensor or value._life.number < 0 or value.is_leaf:
            self._refused.add(id(module))
            return
        takers = self._inputs.setdefault(value._life.number, [])
        self._refused.update(takers, [id(module)] if takers else [])
        takers.append(id(module))

    def _look(self, func: Any, args: tuple[Any, ...], _: Any) -> None:
        if self._active or not self._inputs or func in _FROM_RESULT:
            return
        for tensor in tensors_in(args):
            takers = self._inputs.get(tensor._life.number)
            if takers:
                self._refused.update(takers)

    def finding(self) -> Applicability:
        scene = self.scene
        good = [module for key, module in self._calls.items() if key not in self._refused]
        targets = tuple(path for module in good if (path := scene.path_of(module)))
        if targets:
            kinds = dict.fromkeys(type(module).__name__ for module in good)
            names = ", ".join(target.partition(":")[2] for target in targets)
            return Applicability(
                self.name, True, targets=targets, detail=f"{', '.join(kinds)}: {names}"
            )
        if self._calls:
            return self.no("the input of every activation module is used again afterwards")
        return self.no("the model calls no activation module with inplace=False")

    # -- trial ---------------------------------------------------------------------------

    def apply(self, scene: Scene) -> None:
        self.scene = scene
        scene.on_call.append(self._switch)

    def _switch(self, _: torch.nn.Module) -> None:
        if self.changed:
            return
        modules: list[Any] = self.scene.modules_at(self.targets)
        for module in modules:
            module.inplace = True
            self.changed += 1


def _could_be_inplace(module: Any) -> bool:
    """Is it an activation? (Dropout in place is another kernel, with a larger mask.)"""
    return (
        getattr(module, "inplace", None) is False
        and not children_of(module)
        and not isinstance(module, Dropout)
    )


# ---
# Intervention: channels_last memory format for convolution networks.


class ChannelsLast(Intervention):
    """Models and image batches in ``torch.channels_last``."""

    name = "channels-last"

    def finding(self) -> Applicability:
        convolutions = [
            module
            for model in self.scene.models
            for module in model.modules()
            if isinstance(module, torch.nn.Conv2d | torch.nn.ConvTranspose2d)
        ]
        wide = [conv for conv in convolutions if max(conv.kernel_size) > 1]
        if not wide:
            return self.no("the model has no 2-d convolutions larger than 1x1")
        if all(conv.weight.is_contiguous(memory_format=torch.channels_last) for conv in wide):
            return self.no("the model is already in channels_last")
        return Applicability(self.name, True, detail=type(self.scene.models[0]).__name__)

    def apply(self, scene: Scene) -> None:
        self.scene = scene
        scene.on_model.append(self._convert)
        scene.on_batch.append(self._convert_batch)

    def _convert(self, model: torch.nn.Module) -> None:
        model.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
        self.changed += 1

    def _convert_batch(self, batch: Any) -> Any:
        return map_leaves(torch.Tensor, _in_channels_last, batch)


def _in_channels_last(tensor: torch.Tensor) -> torch.Tensor:
    if tensor.dim() != 4:
        return tensor
    pinned = tensor.is_pinned()
    tensor = tensor.contiguous(memory_format=torch.channels_last)
    return tensor.pin_memory() if pinned else tensor


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
