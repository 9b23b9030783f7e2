"""Interventions on Hugging Face's ``Trainer``, and on what is made of it (TRL): adapters, weights
of 4 bits, and a cross-entropy without all logits at once."""

from __future__ import annotations

import dataclasses
import functools
import importlib.util
import inspect
import weakref
from collections.abc import Callable, Mapping
from types import ModuleType
from typing import Any, Final

import torch

from trainfit.results.runs.trace import Applicability
from trainfit.simgpu.device.user_location import user_frame
from trainfit.simgpu.interventions.script_state import Intervention, Scene

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
        found = super().finding()
        return dataclasses.replace(found, targets=found.places)

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
        if any(hasattr(each, "peft_config") for each in model.modules()):
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
        return next((at for each in model.modules() if (at := self._loaded.get(each))), None)

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
        for each in _with_heads(model):
            if not _no_liger(self.scene, each):
                _liger_models(self.scene)[_model_type(each)](model=each)
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
    return [each for each in model.modules() if named <= set(dict(each.named_children()))]


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
