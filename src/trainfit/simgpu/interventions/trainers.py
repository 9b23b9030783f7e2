"""Interventions on Hugging Face's ``Trainer``, and on what is made of it (TRL): adapters, weights
of 4 bits, and a cross-entropy without all logits at once.

Interventions on what TRL's trainers are configured with: the reference model's
log-probabilities, the number and length of completions, and the length of samples.
"""

from __future__ import annotations

import dataclasses
import functools
import importlib.util
import inspect
import weakref
from collections.abc import Callable, Mapping
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

_LOADING: Final = "transformers.modeling_utils"
#: First words of TRL's trainers that make adapters themselves of what they are given.
_OF_TRL: Final = ("SFT", "DPO", "KTO", "Reward", "GRPO", "RLOO")
#: What PEFT's own documentation begins with.
_RANK: Final = 16
#: How QLoRA quantizes (Dettmers 2023): values and scales, computing in 16 bits.
_NF4: Final[Mapping[str, Any]] = {
    "load_in_4bit": True,
    "bnb_4bit_quant_type": "nf4",
    "bnb_4bit_use_double_quant": True,
    "bnb_4bit_compute_dtype": torch.bfloat16,
}


class _OfTrainer(Intervention):
    """Sees each ``Trainer`` before it is made: its model and its ``TrainingArguments``."""

    def __init__(self, targets: tuple[str, ...] = ()) -> None:
        super().__init__(targets)
        self._places: dict[str, None] = {}
        self._why = "the script makes no Trainer of Transformers with a model"
        self._detail = ""

    def watch(self, scene: Scene) -> None:
        super().watch(scene)
        scene.watch_trainers(self._look)

    def finding(self) -> Applicability:
        if not self._places:
            return self.no(self._why)
        places = tuple(filter(None, self._places))
        return Applicability(self.name, True, detail=self._detail, places=places)

    def apply(self, scene: Scene) -> None:
        self.scene = scene
        scene.watch_trainers(self._change)

    def _look(self, trainer: Any, model: Any, args: Any) -> Any:
        """Note the place where the change applies; the model as it is."""
        why = self._refusal(model, args)
        if why:
            self._why = why
        else:
            self._places.setdefault(self._place(model) or "")
            self._detail = self._words(trainer)
        return model

    def _place(self, model: Any) -> str | None:
        """The user's line that is to be changed: the one that makes the trainer."""
        return user_frame()

    # -- the subclasses' -----------------------------------------------------------------------

    def _refusal(self, model: Any, args: Any) -> str:
        """Why the change does not apply; empty where it does."""
        raise NotImplementedError

    def _words(self, trainer: Any) -> str:
        """What to write where the trainer is made."""
        raise NotImplementedError

    def _change(self, trainer: Any, model: Any, args: Any) -> Any:
        """The model, changed."""
        raise NotImplementedError


class Adapters(_OfTrainer):
    """LoRA on all linear layers, the weights frozen, as PEFT makes it."""

    name = "lora"

    def _refusal(self, model: Any, args: Any) -> str:
        if importlib.util.find_spec("peft") is None:
            return "PEFT is not installed here: pip install peft"
        if hasattr(model, "peft_config"):
            return "the model has adapters already"
        return ""

    def _words(self, trainer: Any) -> str:
        made = 'LoraConfig(target_modules="all-linear")'
        if "peft_config" in inspect.signature(type(trainer).__init__).parameters:
            return f"{type(trainer).__name__}(…, peft_config={made})  # from peft import LoraConfig"
        return f"before it, model = get_peft_model(model, {made})  # from peft import …"

    def apply(self, scene: Scene) -> None:
        super().apply(scene)
        for trainer in _OF_TRL:
            name = f"trl.trainer.{trainer.lower()}_trainer"
            scene.patches.when_imported(name, functools.partial(self._give, scene, trainer))

    def _give(self, scene: Scene, trainer: str, module: ModuleType) -> None:
        """Give TRL's trainer its own argument: it casts adapters on weights of 4 bits, and has
        inputs of checkpointed blocks need gradients."""
        kind = getattr(module, f"{trainer}Trainer")
        if "peft_config" not in inspect.signature(kind.__init__).parameters:
            return

        def given(construct: Callable[..., None]) -> Callable[..., None]:
            @functools.wraps(construct)
            def __init__(trainer: Any, *args: Any, **named: Any) -> None:
                bound = inspect.signature(construct).bind_partial(trainer, *args, **named)
                there = bound.arguments
                if there.get("peft_config") or self._refusal(there.get("model"), None):
                    construct(trainer, *args, **named)
                    return
                self.changed += 1
                there["peft_config"] = self._config()
                construct(*bound.args, **bound.kwargs)

            return __init__

        scene.patches.hook(kind, "__init__", given)

    def _change(self, trainer: Any, model: Any, args: Any) -> Any:
        if self._refusal(model, args):
            return model
        import peft

        self.changed += 1
        return peft.get_peft_model(model, self._config())

    @staticmethod
    def _config() -> Any:
        import peft

        return peft.LoraConfig(r=_RANK, lora_alpha=2 * _RANK, target_modules="all-linear")


class FourBits(_OfTrainer):
    """The trained model's weights loaded in 4 bits, as Transformers does it with bitsandbytes.

    Adapters, without which nothing could be trained, are the script's, with any loop, or
    :class:`Adapters`'.
    """

    name = "qlora"

    def __init__(self, targets: tuple[str, ...] = ()) -> None:
        super().__init__(targets)
        self._loaded: weakref.WeakKeyDictionary[Any, str] = weakref.WeakKeyDictionary()

    def watch(self, scene: Scene) -> None:
        super().watch(scene)
        self._on_loading(scene, self._noted)
        scene.on_model.append(self._look_in_loop)

    def apply(self, scene: Scene) -> None:
        self.scene = scene
        self._on_loading(scene, self._quantized)

    def finding(self) -> Applicability:
        applicability = super().finding()
        return dataclasses.replace(applicability, targets=applicability.places)

    def _refusal(self, model: Any, args: Any) -> str:
        for package in ("bitsandbytes", "peft"):
            if importlib.util.find_spec(package) is None:
                return f"{package} is not installed here: pip install {package}"
        if self._place(model) is None:
            return "the trained model's weights are not loaded by from_pretrained, or quantized"
        return ""

    def _look_in_loop(self, model: torch.nn.Module) -> None:
        """Look at a model before its first optimizer: in a loop of the script's own it has
        adapters."""
        if self._places or self._refusal(model, None):
            return
        if any(hasattr(module, "peft_config") for module in model.modules()):
            self._look(None, model, None)
        else:
            self._why = "the trained model has no adapters, and weights of 4 bits are not trained"

    def _words(self, trainer: Any) -> str:
        values = ", ".join(
            f"{name}={value if isinstance(value, torch.dtype) else repr(value)}"
            for name, value in _NF4.items()
        )
        return f"there, quantization_config=BitsAndBytesConfig({values})  # from transformers"

    def _place(self, model: Any) -> str | None:
        return next((at for module in model.modules() if (at := self._loaded.get(module))), None)

    def _on_loading(self, scene: Scene, make: Callable[[Any], Any]) -> None:
        def seen(module: ModuleType) -> None:
            scene.patches.hook(module.PreTrainedModel, "from_pretrained", make)

        scene.patches.when_imported(_LOADING, seen)

    def _noted(self, load: Any) -> Any:
        @functools.wraps(load)
        def from_pretrained(kind: Any, *args: Any, **named: Any) -> Any:
            found, place = load(kind, *args, **named), user_frame()
            model = found[0] if isinstance(found, tuple) else found  # output_loading_info=True
            if place is not None and getattr(model, "hf_quantizer", None) is None:
                self._loaded[model] = place
            return found

        return from_pretrained

    def _quantized(self, load: Any) -> Any:
        @functools.wraps(load)
        def from_pretrained(kind: Any, *args: Any, **named: Any) -> Any:
            if user_frame() in self.targets and named.get("quantization_config") is None:
                import transformers

                made: Any = transformers.BitsAndBytesConfig
                named["quantization_config"] = made(**_NF4)
                self.changed += 1
            return load(kind, *args, **named)

        return from_pretrained


class ChunkedLoss(_OfTrainer):
    """Liger's fused cross-entropy: logits of a part of the tokens at a time, and no float32 copy
    of them. By the trainer's own switch; in a loop of the script's own, its patch of the model."""

    name = "chunked-loss"

    def __init__(self, targets: tuple[str, ...] = ()) -> None:
        super().__init__(targets)
        self._is_trainers = False

    def watch(self, scene: Scene) -> None:
        super().watch(scene)
        scene.on_model.append(self._note)

    def apply(self, scene: Scene) -> None:
        super().apply(scene)
        scene.on_model.append(self._patch)

    def finding(self) -> Applicability:
        if self._is_trainers or not self._detail:
            return super().finding()
        return Applicability(self.name, True, detail=self._detail)

    def _look(self, trainer: Any, model: Any, args: Any) -> Any:
        self._is_trainers = True
        return super()._look(trainer, model, args)

    def _note(self, model: torch.nn.Module) -> None:
        """Note, before a model's first optimizer, why its loss cannot be chunked, or what to write:
        with a trainer, that has said all."""
        heads = [] if self._is_trainers else _with_heads(model)
        if not heads:
            return
        why = _no_liger(self.scene, heads[0])
        if why:
            self._why = why
        else:
            patch = _liger_models(self.scene)[_model_type(heads[0])].__name__
            self._detail = (
                f"before the model is made, {patch}()  # from liger_kernel.transformers import …; "
                "pip install liger-kernel"
            )

    def _patch(self, model: torch.nn.Module) -> None:
        if self.changed:
            return
        for module in _with_heads(model):
            if not _no_liger(self.scene, module):
                _liger_models(self.scene)[_model_type(module)](model=module)
                self.changed += 1

    def _refusal(self, model: Any, args: Any) -> str:
        if not _has_liger():
            return _NO_LIGER
        if getattr(args, "use_liger_kernel", None) is not False:
            return "the trainer's arguments have no use_liger_kernel, or it is on"
        return _no_liger(self.scene, model)

    def _words(self, trainer: Any) -> str:
        return "in its arguments: use_liger_kernel=True (pip install liger-kernel)"

    def _change(self, trainer: Any, model: Any, args: Any) -> Any:
        if not self._refusal(model, args):
            self.changed += 1
            args.use_liger_kernel = True
        return model


_NO_LIGER: Final = "liger-kernel is not installed here: pip install liger-kernel"


def _has_liger() -> bool:
    return importlib.util.find_spec("liger_kernel") is not None


def _with_heads(model: torch.nn.Module) -> list[torch.nn.Module]:
    """The language models in it that make logits: those of Transformers have an ``lm_head``."""
    named = {"lm_head", "model"}
    return [module for module in model.modules() if named <= set(dict(module.named_children()))]


def _model_type(model: Any) -> str:
    return str(getattr(getattr(model, "config", None), "model_type", ""))


def _no_liger(scene: Scene, model: Any) -> str:
    """Why Liger changes nothing of a model; empty where it does."""
    if not _has_liger():
        return _NO_LIGER
    kind = _model_type(model)
    return "" if kind in _liger_models(scene) else f"Liger has no kernels for {kind!r}"


def _liger_models(scene: Scene) -> Any:
    """What changes a model, by its type; Liger's kernels' launches need Triton, or its stand-in."""
    scene.simulation.absent.choose("triton")
    from liger_kernel.transformers.monkey_patch import MODEL_TYPE_TO_APPLY_LIGER_FN

    return MODEL_TYPE_TO_APPLY_LIGER_FN


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
    return next((value.shape[0] for value in values if isinstance(value, torch.Tensor)), None)


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
