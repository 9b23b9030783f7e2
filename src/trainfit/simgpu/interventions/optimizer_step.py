"""Interventions on the optimizer's step: inside the backward pass, or after several."""

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
from trainfit.torch_private.modules import UNSCALE_GRADS


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
