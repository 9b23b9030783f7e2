"""Interventions: other optimizers over the same parameters, and the same one with fused kernels."""

from __future__ import annotations

import importlib.util
import inspect
import types
from collections.abc import Collection
from typing import Any, ClassVar, Final

import torch

from trainfit.results.changes import ADAMW, PAGED
from trainfit.results.runs.trace import Applicability
from trainfit.simgpu.device.user_location import user_frame
from trainfit.simgpu.interventions.script_state import Intervention, MadeOptimizer, Scene
from trainfit.torch_private.modules import unscales_itself

# ---
# The memory of bitsandbytes' 8-bit optimizers, where bitsandbytes is not installed.


#: bitsandbytes/optim: classes and how many states each keeps for a parameter.
EIGHT_BIT: Final = {
    "Adam8bit": 2,
    "AdamW8bit": 2,
    "SGD8bit": 1,
    "RMSprop8bit": 1,
    "Adagrad8bit": 1,
}

#: ``min_8bit_size`` of bitsandbytes/optim/optimizer.py: smaller tensors keep float32 states.
MIN_ELEMENTS: Final = 4096
#: Elements that share one scale (``blocksize`` there; 2048 before version 0.44).
BLOCK: Final = 256
#: ``fill_qmap``: each of the two maps from a byte to its value.
MAP_ELEMENTS: Final = 256


class EightBitOptimizer(torch.optim.Optimizer):
    """States as ``Optimizer1State.init_state`` and ``Optimizer2State.init_state`` make them.

    A tensor of :data:`MIN_ELEMENTS` or more has for each state one byte an element and one
    float32 scale a block; a smaller one, and those that ``wide`` has the ids of, float32 states.
    The update is one kernel in place.
    """

    def __init__(self, params: Any, states: int, wide: Collection[int] = ()) -> None:
        super().__init__(params, {"lr": 1e-3})
        self._states, self._wide = states, wide
        self._maps: list[torch.Tensor] = []

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        """Make the states of parameters that have none, and update in place."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    if parameter not in self.state:
                        self.state[parameter] = self._state_of(parameter)
                    parameter.add_(parameter.grad, alpha=-group["lr"])
        return loss

    def _state_of(self, parameter: torch.Tensor) -> dict[str, torch.Tensor]:
        small = parameter.numel() < MIN_ELEMENTS or id(parameter) in self._wide
        dtype = torch.float32 if small else torch.uint8
        state = {
            f"state{number}": torch.zeros_like(parameter, dtype=dtype)
            for number in range(1, self._states + 1)
        }
        if small:
            return state
        while len(self._maps) < self._states:
            self._maps.append(torch.zeros(MAP_ELEMENTS, device=parameter.device))
        blocks = -(-parameter.numel() // BLOCK)
        for number in range(1, self._states + 1):
            state[f"absmax{number}"] = torch.zeros(blocks, device=parameter.device)
            state[f"qmap{number}"] = self._maps[number - 1]
        return state


#: Bytes of state a parameter element, from the optimizers' own ``init_state``: momentum of
#: SGD, the two moments of Adam in float32; one byte and its share of a scale in 8 bits.
_STATE_BYTES = {"SGD": 0.0, "SGD with momentum": 4.0, "Adam": 8.0, "Adafactor": 0.0}
#: Differences of state below this are none: factored moments, rounded blocks.
_SAME_BYTES = 0.5


class ReplaceOptimizer(Intervention):
    """Every optimizer's ``step`` is that of another kind, with its state.

    A ``Trainer`` of Transformers that would make AdamW makes the other kind itself, asked by its
    argument ``optim``: it has its own ways (its own Adafactor, embeddings in 32 bits).
    """

    title: ClassVar[str]
    #: Value of the argument ``optim``; empty where there is none.
    optim: ClassVar[str] = ""
    #: Else how a trainer is given the class and its arguments.
    kind_and_arguments: ClassVar[tuple[str, str]] = ("", "")

    def __init__(self, targets: tuple[str, ...] = ()) -> None:
        super().__init__(targets)
        #: The lines that make a ``Trainer`` whose optimizer would be AdamW.
        self.trainers: dict[str | None, None] = {}
        self._is_told = False

    def watch(self, scene: Scene) -> None:
        super().watch(scene)
        scene.watch_trainers(self._note)

    def make(self, optimizer: Any, groups: list[dict[str, Any]]) -> torch.optim.Optimizer:
        """The one that takes the place of ``optimizer``."""
        raise NotImplementedError

    def finding(self) -> Applicability:
        if not self.scene.optimizers:
            return self.no("the script creates no torch.optim optimizer")
        kinds = ", ".join(dict.fromkeys(described(m.optimizer) for m in self.scene.optimizers))
        present = state_bytes_an_element(self.scene)
        if present is None:
            return self.no(f"{kinds} made no step, so its state size is unknown")
        if _STATE_BYTES[self.title] >= present - _SAME_BYTES:
            return self.no(f"{self.title} keeps at least as much state as {kinds}")
        targets = told_trainers(self.scene, self.optim, *self.kind_and_arguments)
        return Applicability(self.name, True, "", targets, lines_of(self.scene), kinds)

    def apply(self, scene: Scene) -> None:
        self.scene = scene
        scene.on_optimizer.append(lambda made: self._replace(scene, made.optimizer))
        scene.watch_trainers(self._switch)

    def is_available(self) -> bool:
        """Can a trainer make it here?"""
        return bool(self.optim)

    def is_made(self, optimizer: Any) -> bool:
        """Is it of the kind that a trainer was told to make? It may not be ready yet."""
        return False

    def _note(self, trainer: Any, model: Any, args: Any) -> Any:
        present = getattr(args, "optim", None)
        if ADAMW.fullmatch(str(getattr(present, "value", present))):
            self.trainers.setdefault(user_frame())
        return model

    def _switch(self, trainer: Any, model: Any, args: Any) -> Any:
        self._note(trainer, model, args)
        if self.trainers and self.is_available():
            self._is_told = True
            args.optim = type(args.optim)(self.optim)
        return model

    def _replace(self, scene: Scene, optimizer: Any) -> None:
        if self._is_told and self.is_made(optimizer):
            self.changed += 1
            return
        inner: list[torch.optim.Optimizer] = []

        def step(outer: Any, closure: Any = None) -> Any:
            groups = [{"params": g["params"], "lr": g["lr"]} for g in outer.param_groups]
            with scene.own():
                if not inner:
                    inner.append(self.make(outer, groups))
                for group in groups[len(inner[0].param_groups) :]:
                    inner[0].add_param_group(group)
            return inner[0].step(closure)

        optimizer.step = types.MethodType(step, optimizer)
        self.changed += 1


class Sgd(ReplaceOptimizer):
    name = "sgd"
    title = "SGD"
    optim = "sgd"

    def is_made(self, optimizer: Any) -> bool:
        return type(optimizer) is torch.optim.SGD and not _has_momentum(optimizer)

    def make(self, optimizer: Any, groups: list[dict[str, Any]]) -> torch.optim.Optimizer:
        return torch.optim.SGD(groups)


class Momentum(ReplaceOptimizer):
    name = "momentum"
    title = "SGD with momentum"
    kind_and_arguments = ("torch.optim.SGD", "momentum=0.9")

    def make(self, optimizer: Any, groups: list[dict[str, Any]]) -> torch.optim.Optimizer:
        return torch.optim.SGD(groups, momentum=0.9)


class Adam(ReplaceOptimizer):
    name = "adam"
    title = "Adam"
    kind_and_arguments = ("torch.optim.Adam", "")

    def make(self, optimizer: Any, groups: list[dict[str, Any]]) -> torch.optim.Optimizer:
        return torch.optim.Adam(groups)


class Adafactor(ReplaceOptimizer):
    name = "adafactor"
    title = "Adafactor"
    optim = "adafactor"

    def is_made(self, optimizer: Any) -> bool:
        return type(optimizer).__name__ == "Adafactor"

    def make(self, optimizer: Any, groups: list[dict[str, Any]]) -> torch.optim.Optimizer:
        return torch.optim.Adafactor(groups)


class EightBit(ReplaceOptimizer):
    """bitsandbytes' optimizer of the same kind: itself, or its memory where it is not installed."""

    name = "optimizer-8bit"
    version: ClassVar[str] = "8-bit"
    optim = "adamw_8bit"

    def finding(self) -> Applicability:
        if not self.scene.optimizers:
            return self.no("the script creates no torch.optim optimizer")
        for made in self.scene.optimizers:
            if self.version_of(made.optimizer) is None:
                kind = described(made.optimizer)
                return self.no(f"there is no {self.version} version of {kind}")
        names = (str(self.version_of(made.optimizer)) for made in self.scene.optimizers)
        kinds = ", ".join(dict.fromkeys(names))
        # Its name for AdamW's; those of others differ between versions of Transformers.
        optim = self.optim if kinds == "AdamW8bit" else ""
        targets = told_trainers(self.scene, optim, f"bitsandbytes.optim.{kinds}", "")
        targets = tuple(f"{target} (pip install bitsandbytes)" for target in targets)
        return Applicability(self.name, True, "", targets, lines_of(self.scene), kinds)

    def version_of(self, optimizer: Any) -> str | None:
        """The class in ``bitsandbytes.optim`` that takes its place; ``None``: there is none."""
        return eight_bit_of(optimizer)

    def is_available(self) -> bool:
        return _library() is not None

    def is_made(self, optimizer: Any) -> bool:
        return type(optimizer).__module__.partition(".")[0] == "bitsandbytes"

    def make(self, optimizer: Any, groups: list[dict[str, Any]]) -> torch.optim.Optimizer:
        name, library = self.version_of(optimizer) or "", _library()
        if library is not None:
            kind = getattr(library, name)
            known = inspect.signature(kind).parameters
            same = {k: v for k, v in optimizer.param_groups[0].items() if k in known}
            made: torch.optim.Optimizer = kind(**{**same, "params": groups})
            return made
        is_trainers = any(
            made.trainer is not None
            for made in self.scene.optimizers
            if made.optimizer is optimizer
        )
        wide = self._embeddings() if is_trainers else ()
        return EightBitOptimizer(groups, EIGHT_BIT[name], wide)

    def _embeddings(self) -> set[int]:
        """What ``Trainer.create_optimizer`` has bitsandbytes keep in 32 bits."""
        return {
            id(module.weight)
            for model in self.scene.models
            for module in model.modules()
            if isinstance(module, torch.nn.Embedding)
        }


class Paged(EightBit):
    """bitsandbytes' Adam with states of 8 bits in managed memory."""

    name = "paged-optimizer"
    version = "paged"
    optim = PAGED

    def finding(self) -> Applicability:
        if _library() is None:
            return self.no("bitsandbytes is not installed here: pip install bitsandbytes")
        applicability = super().finding()
        if not applicability.applies:
            return applicability
        detail = f"there, bitsandbytes.optim.{applicability.detail}(…) with the same arguments"
        places = applicability.places
        if trainers := told_trainers(self.scene, self.optim, "", ""):
            (detail,), places = trainers, tuple(filter(None, self.trainers))
        detail = f"{detail} (pip install bitsandbytes)"
        return Applicability(self.name, True, places=places, detail=detail)

    def version_of(self, optimizer: Any) -> str | None:
        root = type(optimizer).__module__.partition(".")[0]
        kind = type(optimizer).__name__.removesuffix("8bit")
        if root not in ("torch", "bitsandbytes") or kind not in ("Adam", "AdamW"):
            return None
        return None if getattr(optimizer, "is_paged", False) else f"Paged{kind}8bit"


def _library() -> Any:
    """bitsandbytes' optimizers; ``None`` where it is not installed, or does not load."""
    if importlib.util.find_spec("bitsandbytes") is None:
        return None
    try:
        import bitsandbytes
    except Exception:  # whatever a library of kernels says of a machine without a GPU
        return None
    return getattr(bitsandbytes, "optim", None)


class Fused(Intervention):
    """``fused=True``: one kernel a chunk of parameters, without foreach's temporaries."""

    name = "fused-optimizer"
    _KINDS = (torch.optim.Adam, torch.optim.AdamW, torch.optim.SGD)

    def finding(self) -> Applicability:
        if not self.scene.optimizers:
            return self.no("the script creates no torch.optim optimizer")
        able = [made for made in self.scene.optimizers if self._is_able(made.optimizer)]
        if not able:
            kinds = ", ".join(dict.fromkeys(made.kind for made in self.scene.optimizers))
            return self.no(f"{kinds} is already fused, or has no fused version")
        lines = dict.fromkeys(made.place for made in able if made.place)
        kinds = ", ".join(dict.fromkeys(made.kind for made in able))
        optim = "adamw_torch_fused" if kinds == "AdamW" else ""
        targets = told_trainers(self.scene, optim, f"torch.optim.{kinds}", "fused=True")
        return Applicability(self.name, True, "", targets, tuple(lines), kinds)

    def apply(self, scene: Scene) -> None:
        scene.on_optimizer.append(self._fuse)

    def _is_able(self, optimizer: Any) -> bool:
        return type(optimizer) in self._KINDS and not any(
            group.get("fused") or group.get("differentiable") for group in optimizer.param_groups
        )

    def _fuse(self, made: MadeOptimizer) -> None:
        optimizer: Any = made.optimizer
        if not self._is_able(optimizer):
            return
        step = optimizer.step
        # What the constructor does with fused=True in addition to keeping it in the groups.
        unscales_itself(optimizer)

        def fused_step(outer: Any, *args: Any, **kwargs: Any) -> Any:
            for group in outer.param_groups:
                group["fused"], group["foreach"] = True, False
            return step(*args, **kwargs)

        optimizer.step = types.MethodType(fused_step, optimizer)
        self.changed += 1


def told_trainers(scene: Scene, optim: str, kind: str, arguments: str) -> tuple[str, ...]:
    """What to write where Transformers' ``Trainer`` chooses the optimizer; empty where the script
    does. ``optim`` is its argument's value, or else ``kind`` a class with ``arguments``."""
    trainers = [made.trainer for made in scene.optimizers]
    if not trainers or None in trainers:
        return ()
    if optim:
        return (f'in the trainer\'s arguments: optim="{optim}"',)
    given = ("lr=…", *filter(None, (arguments,)))
    if "optimizer_cls_and_kwargs" in inspect.signature(type(trainers[0]).__init__).parameters:
        made = f"optimizer_cls_and_kwargs=({kind}, dict({', '.join(given)}))"
    else:  # before Transformers 4.47
        made = f"optimizers=({kind}({', '.join(('model.parameters()', *given))}), None)"
    return (f"where the trainer is made: {made}",)


def lines_of(scene: Scene) -> tuple[str, ...]:
    """The lines that make the script's optimizers."""
    return tuple(dict.fromkeys(made.place for made in scene.optimizers if made.place))


def described(optimizer: Any) -> str:
    """The optimizer's class; SGD says whether it has momentum."""
    kind = type(optimizer).__name__
    if type(optimizer) is torch.optim.SGD:
        return "SGD with momentum" if _has_momentum(optimizer) else "SGD without momentum"
    return kind


def eight_bit_of(optimizer: Any) -> str | None:
    """The class in ``bitsandbytes.optim`` that does the same in 8 bits."""
    name = f"{type(optimizer).__name__}8bit"
    if type(optimizer).__module__.partition(".")[0] != "torch" or name not in EIGHT_BIT:
        return None
    return None if name == "SGD8bit" and not _has_momentum(optimizer) else name


def _has_momentum(optimizer: Any) -> bool:
    return any(group.get("momentum") for group in optimizer.param_groups)


def state_bytes_an_element(scene: Scene) -> float | None:
    """Bytes of optimizer state for each trained element; ``None`` where no step was made."""
    states = elements = 0
    for made in scene.optimizers:
        for parameter, state in made.optimizer.state.items():
            elements += parameter.numel()
            states += sum(
                value.numel() * value.element_size()
                for value in state.values()
                if isinstance(value, torch.Tensor) and value.dim() > 0
            )
    if not scene.simulation.steps:
        return None
    return states / elements if elements else 0.0
