"""Arguments of training libraries for what a plan recommends: what a user of their loops changes in
a script, in the place of ``DataLoader(…)`` and ``torch.autocast(…)``."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Final

from trainfit.plan.command.tunables import LOADER_TUNABLES
from trainfit.results.runs.steps import Framework


@dataclasses.dataclass(frozen=True)
class FrameworkCall:
    """The call of a library that takes the settings of its training loop.

    ``names`` are its arguments for tunables (without one, the script makes that itself);
    ``precision`` is what to write for autocast's dtype, or "off". float16 comes with a gradient
    scaler in all of them.
    """

    call: str
    names: Mapping[str, str]
    precision: Mapping[str, str]

    def with_precision(self, dtype: str) -> str:
        """The call that computes in ``dtype``, or in float32 ("off")."""
        return f"{self.call}({self.precision[dtype]}, …)"

    @property
    def with_accumulation(self) -> str:
        """The call that sets the micro-batches of an optimizer step."""
        return f"{self.call}({self.names['grad_accum']}=…)"


FRAMEWORKS: Final[Mapping[Framework, FrameworkCall]] = {
    "Transformers": FrameworkCall(
        "TrainingArguments",
        {
            "batch_size": "per_device_train_batch_size",
            "grad_accum": "gradient_accumulation_steps",
            **{name: f"dataloader_{name}" for name in LOADER_TUNABLES},
        },
        {"bfloat16": "bf16=True", "float16": "fp16=True", "off": "bf16=False, fp16=False"},
    ),
    "Lightning": FrameworkCall(
        "Trainer",
        {"grad_accum": "accumulate_grad_batches"},
        {
            "bfloat16": 'precision="bf16-mixed"',
            "float16": 'precision="16-mixed"',
            "off": 'precision="32-true"',
        },
    ),
    "Accelerate": FrameworkCall(
        "Accelerator",
        {"grad_accum": "gradient_accumulation_steps"},
        {
            "bfloat16": 'mixed_precision="bf16"',
            "float16": 'mixed_precision="fp16"',
            "off": 'mixed_precision="no"',
        },
    ),
}
