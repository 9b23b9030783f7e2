"""Interventions on what TRL's trainers are configured with: the reference model's
log-probabilities, the number and length of completions, and the length of samples."""

from __future__ import annotations

import functools
from collections.abc import Callable
from types import ModuleType
from typing import Any, ClassVar, Final

import torch

from trainfit.results.runs.trace import Applicability
from trainfit.simgpu.device.user_location import user_frame
from trainfit.simgpu.interventions.script_state import (
    Intervention,
    Scene,
    on_configurations,
    places,
)

#: Batches whose log-probabilities are computed before the training: what others need follows.
_BATCHES: Final = 3


class _OfConfiguration(Intervention):
    """Changes fields of TRL's configurations (``SFTConfig`` and others) as they are made.

    ``trainers`` are the first words of the classes that have the fields.
    """

    trainers: ClassVar[tuple[str, ...]]

    def __init__(self, targets: tuple[str, ...] = ()) -> None:
        super().__init__(targets)
        self._places: dict[str, None] = {}
        self._detail = ""
        self._why = "the script makes no configuration of TRL's that has it"

    def watch(self, scene: Scene) -> None:
        super().watch(scene)
        on_configurations(scene, self.trainers, self._note)

    def apply(self, scene: Scene) -> None:
        self.scene = scene
        on_configurations(scene, self.trainers, self._change)

    def finding(self) -> Applicability:
        if not self._detail:
            return self.no(self._why)
        return Applicability(
            self.name, True, detail=self._detail, targets=self.targets, places=places(self._places)
        )

    def _note(self, config: Any) -> None:
        wanted = self._wanted(config)
        if isinstance(wanted, str):
            self._why = wanted
            return
        words = ", ".join(f"{name}={value}" for name, value in wanted.items())
        self._detail = f"in its {type(config).__name__}: {words}"
        self.targets = tuple(str(value) for value in wanted.values())
        if (place := user_frame()) is not None:
            self._places[place] = None

    def _change(self, config: Any) -> None:
        """Change it, but not a copy of one that is changed."""
        wanted = self._wanted(config)
        if isinstance(wanted, str) or str(next(iter(wanted.values()))) != self.targets[0]:
            return
        self.changed += 1
        for name, value in list(wanted.items())[: len(self.targets)]:
            setattr(config, name, value)

    # -- the subclasses' -----------------------------------------------------------------------

    def _wanted(self, config: Any) -> dict[str, Any] | str:
        """New values by field, or why there are none."""
        raise NotImplementedError


class ReferenceLogProbs(_OfConfiguration):
    """The reference model's log-probabilities of all samples are computed before the training,
    which then needs no second model."""

    name = "reference-logprobs"
    trainers = ("DPO", "KTO")

    def watch(self, scene: Scene) -> None:
        super().watch(scene)
        scene.watch_trainers(self._look)

    def apply(self, scene: Scene) -> None:
        super().apply(scene)
        for trainer in self.trainers:
            name = f"trl.trainer.{trainer.lower()}_trainer"
            scene.patches.when_imported(name, functools.partial(self._shorten, scene, trainer))

    def _look(self, trainer: Any, model: Any, args: Any) -> Any:
        if self._detail and hasattr(model, "peft_config"):
            self._detail = ""
            self._why = "with adapters there is no second model: without them it is the reference"
        return model

    def _wanted(self, config: Any) -> dict[str, Any] | str:
        if getattr(config, "precompute_ref_log_probs", None) is not False:
            return "its configuration computes them before the training"
        if getattr(config, "sync_ref_model", False):
            return "the reference model follows the trained one (sync_ref_model)"
        return {"precompute_ref_log_probs": True}

    def _shorten(self, scene: Scene, trainer: str, module: ModuleType) -> None:
        """Compute those of a few batches: the others' are none that anything depends on."""
        kind = getattr(module, f"{trainer}Trainer")
        if not hasattr(kind, "compute_ref_log_probs"):
            return

        def few(compute: Callable[..., Any]) -> Callable[..., Any]:
            made: dict[int | None, list[Any]] = {}

            @functools.wraps(compute)
            def compute_ref_log_probs(trainer: Any, model: Any, inputs: Any) -> Any:
                # By rows: the last batch may have fewer, and each sample gets one of its own.
                alike = made.setdefault(_rows(inputs), [])
                if len(alike) < _BATCHES:
                    alike.append(compute(trainer, model, inputs))
                return alike[-1]

            return compute_ref_log_probs

        scene.patches.hook(kind, "compute_ref_log_probs", few)


def _rows(inputs: Any) -> int | None:
    """The rows of a batch; ``None`` where it has no tensors by name."""
    values = inputs.values() if hasattr(inputs, "values") else ()
    return next((each.shape[0] for each in values if isinstance(each, torch.Tensor)), None)


class _Halved(_OfConfiguration):
    """Halves a number of the configuration."""

    field: ClassVar[str]
    least: ClassVar[int] = 2

    def _wanted(self, config: Any) -> dict[str, Any] | str:
        present = getattr(config, self.field, None)
        if not isinstance(present, int):
            return f"its configuration has no {self.field}"
        if present < self.least:
            return f"{self.field}={present} is small"
        return {self.field: present // 2}


class FewerGenerations(_Halved):
    """Half as many completions of each prompt, in batches of half the size: as many prompts.

    With one target the batch size is left to who asks for it, by the command or the DataLoader.
    """

    name = "fewer-generations"
    trainers = ("GRPO", "RLOO")
    field = "num_generations"
    least = 4

    def _wanted(self, config: Any) -> dict[str, Any] | str:
        found = super()._wanted(config)
        if isinstance(found, str):
            return found
        if config.num_generations % 2 or config.per_device_train_batch_size % 2:
            return "completions and batch cannot be halved together"
        return found | {"per_device_train_batch_size": config.per_device_train_batch_size // 2}


class ShorterCompletions(_Halved):
    """Completions of half the length."""

    name = "shorter-completions"
    trainers = ("GRPO", "RLOO")
    field = "max_completion_length"


class ShorterSamples(_Halved):
    """Samples of half the length, longer ones are cut."""

    name = "shorter-sequences"
    trainers = ("SFT", "DPO", "KTO", "Reward")
    field = "max_length"
