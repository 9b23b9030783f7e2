"""Interventions on the optimizer's step and gradients: a step inside the backward pass, or after
several.

On gradients: autograd's mode, freed instead of zeroed, a frozen backbone.
"""

from __future__ import annotations

import functools
import inspect
import types
from typing import Any

import torch

from trainfit.results.runs.trace import Applicability
from trainfit.simgpu.device.user_location import user_frame
from trainfit.simgpu.interventions.optimizers import lines_of
from trainfit.simgpu.interventions.script_state import (
    Intervention,
    MadeOptimizer,
    Scene,
    on_configurations,
)
from trainfit.torch_private.modules import UNSCALE_GRADS, Convolution


class OptimizerInBackward(Intervention):
    """An optimizer for each parameter, stepped by ``register_post_accumulate_grad_hook``.

    As PyTorch's tutorial "How to save memory by fusing the optimizer step into the backward
    pass" does it. What needs all gradients at once (clipping their norm, a gradient scaler,
    accumulation) cannot go with it.
    """

    name = "optimizer-in-backward"

    def __init__(self, targets: tuple[str, ...] = ()) -> None:
        super().__init__(targets)
        self._needs_all: dict[str, None] = {}
        self._backwards = 0
        self._inner: dict[int, torch.optim.Optimizer] = {}

    # -- survey --------------------------------------------------------------------------

    def watch(self, scene: Scene) -> None:
        super().watch(scene)
        clip = torch.nn.utils.clip_grad
        for name in ("clip_grad_norm_", "clip_grad_value_"):
            self._note(clip, name, "clips all gradients together")
            scene.patches.set(torch.nn.utils, name, getattr(clip, name))
        self._note(torch.amp.GradScaler, "unscale_", "unscales all gradients together")
        self._note(*UNSCALE_GRADS, "unscales all gradients together")
        backward = torch.autograd.backward

        def counted(*args: Any, **kwargs: Any) -> Any:
            self._backwards += 1
            return backward(*args, **kwargs)

        scene.patches.set(torch.autograd, "backward", counted)

    def _note(self, owner: Any, name: str, what: str) -> None:
        function = getattr(owner, name)

        def noted(*args: Any, **kwargs: Any) -> Any:
            if not isinstance(args[0], torch.amp.GradScaler) or args[0].is_enabled():
                self._needs_all.setdefault(f"{what} ({name} at {user_frame()})")
            return function(*args, **kwargs)

        self.scene.patches.set(owner, name, noted)

    def finding(self) -> Applicability:
        scene = self.scene
        if not scene.optimizers:
            return self.no("the script creates no torch.optim optimizer")
        for need in self._needs_all:
            return self.no(f"the script {need}, which needs all of them at once")
        steps = scene.simulation.cycle.optimizer_steps
        if self._backwards > steps:
            return self.no(
                f"gradients are accumulated: {self._backwards} backward passes in "
                f"{steps} optimizer steps"
            )
        return Applicability(
            self.name, True, places=lines_of(scene), detail=scene.optimizers[0].kind
        )

    # -- trial ---------------------------------------------------------------------------

    def apply(self, scene: Scene) -> None:
        self.scene = scene
        scene.on_call.append(self._register)

    def _register(self, module: torch.nn.Module) -> None:
        """Register before a forward pass: by now the parameters are what they stay."""
        for made in self.scene.optimizers:
            for group in made.optimizer.param_groups:
                for parameter in group["params"]:
                    if id(parameter) not in self._inner and parameter.requires_grad:
                        self._take_over(made.optimizer, group, parameter)

    def _take_over(
        self, optimizer: torch.optim.Optimizer, group: dict[str, Any], parameter: Any
    ) -> None:
        known = inspect.signature(type(optimizer).__init__).parameters
        options = {k: v for k, v in group.items() if k in known and k != "params"}
        options |= {name: False for name in ("foreach", "fused") if name in known}
        with self.scene.own():
            inner = type(optimizer)([parameter], **options)
        # Steps are those of the script's own optimizers, which find no gradients left.
        self.scene.simulation.cycle.ignore(inner)
        self._inner[id(parameter)] = inner

        def update(tensor: torch.Tensor) -> None:
            inner.step()
            inner.zero_grad(set_to_none=True)

        parameter.register_post_accumulate_grad_hook(update)
        self.changed += 1


# ---
# Intervention: gradient accumulation, several backward passes per optimizer step.


class AccumulatedSteps(Intervention):
    """Only every ``targets[0]``-th call of ``optimizer.step`` and ``zero_grad`` counts, the model's
    own ``zero_grad``, which Transformers' Trainer calls, too.

    The micro-batch itself comes from the command or the DataLoader, whose batch size is
    divided by the same number. A ``Trainer`` of Transformers is told by its own argument: it clips
    and logs once a step, too. TRL's trainers that generate (a second target, as the survey's) make
    the texts of all micro-batches at once: their batches are as they were, and divided later.
    """

    name = "accumulate"

    def __init__(self, targets: tuple[str, ...] = ()) -> None:
        super().__init__(targets)
        self._places: dict[str, None] = {}
        #: Optimizers that have micro-batches of a step behind them, and some to come.
        self._within: set[int] = set()
        self._trainer_does = self._generates = False

    def watch(self, scene: Scene) -> None:
        super().watch(scene)
        scene.on_optimizer.append(self._note_steps)
        scene.watch_trainers(self._see)

    def _see(self, trainer: Any, model: Any, args: Any) -> Any:
        self._generates = hasattr(args, "steps_per_generation")
        return model

    def _note_steps(self, made: MadeOptimizer) -> None:
        optimizer: Any = made.optimizer

        def note(*_: Any) -> None:
            place = user_frame()
            if place is not None:
                self._places.setdefault(place)

        optimizer.register_step_pre_hook(note)

    def finding(self) -> Applicability:
        if not self.scene.optimizers:
            return self.no("the script creates no torch.optim optimizer")
        norms = sum(
            "BatchNorm" in type(module).__name__ and module.training
            for model in self.scene.models
            for module in model.modules()
            if any(True for _ in module.parameters(recurse=False))
        )
        return Applicability(
            self.name,
            True,
            places=tuple(self._places),
            detail="batch norm" if norms else "",
            targets=("generates",) if self._generates else (),
        )

    def apply(self, scene: Scene) -> None:
        if len(self.targets) > 1:
            on_configurations(scene, ("GRPO", "RLOO"), self._divide)
            return
        scene.on_optimizer.append(self._gate)
        zero_grad = torch.nn.Module.zero_grad

        @functools.wraps(zero_grad)
        def gated(module: torch.nn.Module, *args: Any, **kwargs: Any) -> None:
            if not self._within:
                zero_grad(module, *args, **kwargs)

        scene.patches.set(torch.nn.Module, "zero_grad", gated)
        scene.watch_trainers(self._tell)

    def _divide(self, config: Any) -> None:
        parts = int(self.targets[0])
        if config.per_device_train_batch_size % parts:
            return
        config.per_device_train_batch_size //= parts
        config.gradient_accumulation_steps *= parts
        self.changed += 1

    def _tell(self, trainer: Any, model: Any, args: Any) -> Any:
        present = getattr(args, "gradient_accumulation_steps", None)
        if isinstance(present, int):
            args.gradient_accumulation_steps = present * int(self.targets[0])
            self._trainer_does = True
            self.changed += 1
        return model

    def _gate(self, made: MadeOptimizer) -> None:
        every = int(self.targets[0])
        optimizer: Any = made.optimizer
        if self._trainer_does:
            return
        step, zero_grad = optimizer.step, optimizer.zero_grad
        calls = 0

        def gated_step(outer: Any, closure: Any = None) -> Any:
            nonlocal calls
            if (calls + 1) % every == 0:
                result = step(closure) if closure is not None else step()
            else:
                result = closure() if closure is not None else None
            calls += 1
            (self._within.add if calls % every else self._within.discard)(id(optimizer))
            return result

        def gated_zero_grad(outer: Any, *args: Any, **kwargs: Any) -> None:
            if calls % every == 0:
                zero_grad(*args, **kwargs)

        optimizer.step = types.MethodType(gated_step, optimizer)
        optimizer.zero_grad = types.MethodType(gated_zero_grad, optimizer)
        self.changed += 1


class NoGradInEvaluation(Intervention):
    """``torch.no_grad()`` around calls of models in evaluation mode, and around those at lines that
    are ``targets``: an evaluation may leave its model in training mode."""

    name = "no-grad-eval"

    def __init__(self, targets: tuple[str, ...] = ()) -> None:
        super().__init__(targets)
        self._places: dict[str, None] = {}
        self._evaluations = 0
        self._before: list[bool] = []

    def watch(self, scene: Scene) -> None:
        super().watch(scene)
        scene.on_call.append(self._note)

    def _note(self, module: torch.nn.Module) -> None:
        if module.training:
            return
        self._evaluations += 1
        if torch.is_grad_enabled():
            self._places.setdefault(user_frame() or "")

    def finding(self) -> Applicability:
        if self._places:
            return Applicability(self.name, True, places=tuple(filter(None, self._places)))
        if self._evaluations:
            return self.no("evaluation already runs without gradients")
        return self.no("no evaluation pass in the simulated steps")

    def apply(self, scene: Scene) -> None:
        scene.on_call.append(self._enter)
        scene.after_call.append(self._leave)

    def _enter(self, module: torch.nn.Module) -> None:
        self._before.append(torch.is_grad_enabled())
        if not torch.is_grad_enabled():
            return
        if not module.training or (self.targets and user_frame() in self.targets):
            torch.set_grad_enabled(False)
            self.changed += 1

    def _leave(self, module: torch.nn.Module, _: Any) -> None:
        if self._before:
            torch.set_grad_enabled(self._before.pop())


class ForwardGrad(Intervention):
    """Every outermost call with gradients on or off (``targets[0]``): what an inference
    script needs with and without ``torch.no_grad``."""

    name = "forward-grad"

    def __init__(self, targets: tuple[str, ...] = ()) -> None:
        super().__init__(targets)
        self._before: list[bool] = []

    def finding(self) -> Applicability:
        return self.no("it applies only to scripts that do not train")

    def apply(self, scene: Scene) -> None:
        self._on = self.targets[0] == "on"
        if self._on:
            # Tensors of inference mode can never be saved for a backward pass.
            mode = torch.autograd.grad_mode.inference_mode
            enter: Any = mode.__enter__

            def without_mode(context: Any) -> Any:
                context.mode = False
                return enter(context)

            scene.patches.set(mode, "__enter__", without_mode)
        scene.on_call.append(self._enter)
        scene.after_call.append(self._leave)

    def _enter(self, module: torch.nn.Module) -> None:
        self._before.append(torch.is_grad_enabled())
        torch.set_grad_enabled(self._on)
        self.changed += 1

    def _leave(self, module: torch.nn.Module, _: Any) -> None:
        if self._before:
            torch.set_grad_enabled(self._before.pop())


# ---
# Intervention: gradients freed between steps instead of filled with zeros.


_OWNERS = (torch.optim.Optimizer, torch.nn.Module)


class SetToNone(Intervention):
    """``zero_grad(set_to_none=True)`` where the script says False."""

    name = "set-to-none"

    def __init__(self, targets: tuple[str, ...] = ()) -> None:
        super().__init__(targets)
        self._places: dict[str, None] = {}
        self._calls = 0

    def watch(self, scene: Scene) -> None:
        super().watch(scene)
        self._patch(scene, keep=True)

    def finding(self) -> Applicability:
        if self._places:
            return Applicability(self.name, True, places=tuple(self._places))
        if not self._calls:
            return self.no("no call of zero_grad was observed")
        return self.no("zero_grad already sets gradients to None")

    def apply(self, scene: Scene) -> None:
        self._patch(scene, keep=False)

    def _patch(self, scene: Scene, *, keep: bool) -> None:
        for owner in _OWNERS:
            scene.patches.set(owner, "zero_grad", self._wrapped(owner.zero_grad, keep=keep))

    def _wrapped(self, zero_grad: Any, *, keep: bool) -> Any:
        def wrapped(owner: Any, set_to_none: bool = True) -> None:
            self._calls += 1
            if not set_to_none:
                self._places.setdefault(user_frame() or "")
                self.changed += 1
            zero_grad(owner, set_to_none=set_to_none if keep else True)

        return wrapped


# ---
# Intervention: a frozen backbone.


#: Share of the spatial convolutions' parameters that a trunk holds.
_TRUNK = 0.9


class FreezeBackbone(Intervention):
    """``requires_grad_(False)`` for the backbone before the optimizer is made.

    The backbone is, by rule, the smallest module that holds 90% of the parameters of the
    convolutions larger than 1x1; in a model without such a module, all of its parts but the
    last one that has parameters (behind wrappers that hold a single part).
    """

    name = "freeze-backbone"

    def finding(self) -> Applicability:
        scene = self.scene
        if not scene.models:
            return self.no("no model was found behind the optimizer's parameters")
        model = scene.models[0]
        parts = backbone_of(model)
        trained = sum(p.numel() for p in model.parameters() if p.requires_grad)
        chosen = {id(p): p.numel() for part in parts for p in part.parameters() if p.requires_grad}
        if not parts:
            return self.no("the model has no distinguishable backbone")
        if not chosen:
            return self.no("its backbone is already frozen")
        if sum(chosen.values()) >= trained:
            return self.no("nothing would be left to train")
        targets = tuple(path for part in parts if (path := scene.path_of(part)))
        names = ", ".join(target.partition(":")[2] for target in targets)
        return Applicability(self.name, True, targets=targets, places=lines_of(scene), detail=names)

    def apply(self, scene: Scene) -> None:
        self.scene = scene
        scene.on_model.append(self._freeze)

    def _freeze(self, model: torch.nn.Module) -> None:
        if len(self.scene.models) != 1:
            return
        for module in self.scene.modules_at(self.targets):
            module.requires_grad_(False)
            self.changed += 1


def backbone_of(model: torch.nn.Module) -> list[torch.nn.Module]:
    """The backbone's modules by the rule of :class:`FreezeBackbone`; empty if there is none."""
    total = _spatial(model)
    if total:
        trunks = [
            module
            for module in model.modules()
            if module is not model and _spatial(module) >= _TRUNK * total
        ]
        trunks = [t for t in trunks if _elements(t) < _elements(model)]
        if trunks:
            return [min(trunks, key=_elements)]
    parts = _parts(model)
    while len(parts) == 1:
        parts = _parts(parts[0])
    return parts[:-1]


def _parts(module: torch.nn.Module) -> list[torch.nn.Module]:
    return [child for child in module.children() if _elements(child)]


def _elements(module: torch.nn.Module) -> int:
    return sum(parameter.numel() for parameter in module.parameters())


def _spatial(module: torch.nn.Module) -> int:
    """Parameters of the convolutions that look at more than one place."""
    return sum(
        conv.weight.numel()
        for conv in module.modules()
        if isinstance(conv, Convolution) and max(conv.kernel_size) > 1
    )
