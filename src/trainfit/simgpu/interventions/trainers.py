"""Interventions on Hugging Face's ``Trainer``, and on what is made of it (TRL): adapters, and a
cross-entropy without all logits at once."""

from __future__ import annotations

import functools
import importlib.util
import inspect
from collections.abc import Callable
from types import ModuleType
from typing import Any, Final

from trainfit.results.runs.trace import Applicability
from trainfit.simgpu.device.user_location import user_frame
from trainfit.simgpu.interventions.script_state import Intervention, Scene
from trainfit.simgpu.patching import ImportHook

_TRAINER: Final = "transformers.trainer"
#: What PEFT's own documentation begins with.
_RANK: Final = 16


class _OfTrainer(Intervention):
    """Sees each ``Trainer`` before it is made: its model and its ``TrainingArguments``."""

    def __init__(self, targets: tuple[str, ...] = ()) -> None:
        super().__init__(targets)
        self._places: dict[str, None] = {}
        self._why = "the script makes no Trainer of Transformers with a model"
        self._detail = ""

    def watch(self, scene: Scene) -> None:
        super().watch(scene)
        self._hook(scene, self._look)

    def finding(self) -> Applicability:
        if not self._places:
            return self.no(self._why)
        places = tuple(filter(None, self._places))
        return Applicability(self.name, True, detail=self._detail, places=places)

    def apply(self, scene: Scene) -> None:
        self.scene = scene
        self._hook(scene, self._change)

    def _look(self, trainer: Any, model: Any, args: Any) -> Any:
        """Note the place where the change applies; the model as it is."""
        why = self._refusal(model, args)
        if why:
            self._why = why
        else:
            self._places.setdefault(user_frame() or "")
            self._detail = self._words(trainer)
        return model

    def _hook(self, scene: Scene, look: Callable[[Any, Any, Any], Any]) -> None:
        def seen(module: ModuleType) -> None:
            scene.patches.hook(module.Trainer, "__init__", functools.partial(_looked_at, look))

        hook = ImportHook(_TRAINER, seen)
        hook.install()
        scene.at_end.append(hook.remove)

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


def _looked_at(
    look: Callable[[Any, Any, Any], Any], construct: Callable[..., None]
) -> Callable[..., None]:
    @functools.wraps(construct)
    def __init__(
        trainer: Any, model: Any = None, args: Any = None, *more: Any, **named: Any
    ) -> None:
        if model is not None and hasattr(model, "named_parameters"):
            model = look(trainer, model, args)
        construct(trainer, model, args, *more, **named)

    return __init__


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

    def _change(self, trainer: Any, model: Any, args: Any) -> Any:
        import peft

        if self._refusal(model, args):
            return model
        self.changed += 1
        config = peft.LoraConfig(r=_RANK, lora_alpha=2 * _RANK, target_modules="all-linear")
        return peft.get_peft_model(model, config)


class ChunkedLoss(_OfTrainer):
    """Liger's fused cross-entropy: logits of a part of the tokens at a time, and no float32 copy
    of them."""

    name = "chunked-loss"

    def _refusal(self, model: Any, args: Any) -> str:
        if importlib.util.find_spec("liger_kernel") is None:
            return "liger-kernel is not installed here: pip install liger-kernel"
        if getattr(args, "use_liger_kernel", None) is not False:
            return "the trainer's arguments have no use_liger_kernel, or it is on"
        kind = getattr(getattr(model, "config", None), "model_type", "")
        return "" if kind in _liger_models(self.scene) else f"Liger has no kernels for {kind!r}"

    def _words(self, trainer: Any) -> str:
        return "in its arguments: use_liger_kernel=True (pip install liger-kernel)"

    def _change(self, trainer: Any, model: Any, args: Any) -> Any:
        if not self._refusal(model, args):
            self.changed += 1
            args.use_liger_kernel = True
        return model


def _liger_models(scene: Scene) -> Any:
    """Model types that Liger changes; its kernels' launches need Triton, or its stand-in."""
    scene.simulation.absent.choose("triton")
    from liger_kernel.transformers.monkey_patch import MODEL_TYPE_TO_APPLY_LIGER_FN

    return MODEL_TYPE_TO_APPLY_LIGER_FN
