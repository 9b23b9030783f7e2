"""A remedy is the script in which it is written by hand: a Trainer of Transformers."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

import pytest
import torch

from helpers_interventions import run
from trainfit.results.runs.trace import InterventionRequest
from trainfit.simgpu.operators.torchvision_operators import define_torchvision_operators

#: Of a sequence, and of the vocabulary: most of the peak are logits, then activations.
LENGTH, WORDS = 256, 4096
BATCH, PARTS = 4, 2


class Tokens(torch.utils.data.Dataset[Any]):
    def __len__(self) -> int:
        return 64

    def __getitem__(self, index: int) -> Any:
        tokens = torch.arange(index, index + LENGTH)
        return {"input_ids": tokens, "labels": tokens}


def train(folder: Path, batch: int = BATCH, steps: int = 3, **options: Any) -> None:
    import transformers

    arguments = transformers.TrainingArguments(
        output_dir=str(folder),
        per_device_train_batch_size=batch,
        max_steps=steps,
        report_to="none",
        save_strategy="no",
        disable_tqdm=True,
        **options,
    )
    config = transformers.LlamaConfig(
        hidden_size=256,
        intermediate_size=1024,
        num_hidden_layers=4,
        num_attention_heads=4,
        vocab_size=WORDS,
    )
    model = transformers.LlamaForCausalLM(config)
    transformers.Trainer(model=model, args=arguments, train_dataset=Tokens()).train()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "by_hand", "trial"),
    [
        ("checkpoint", {"gradient_checkpointing": True}, {}),
        (
            "accumulate",
            {"batch": BATCH // PARTS, "gradient_accumulation_steps": PARTS},
            {"batch": BATCH // PARTS, "steps": 3 * PARTS},
        ),
    ],
)
def test_a_remedy_is_the_script_with_it(
    tmp_path: Path, name: str, by_hand: dict[str, Any], trial: dict[str, Any]
) -> None:
    define_torchvision_operators()
    pytest.importorskip("transformers")
    pytest.importorskip("accelerate")
    once = functools.partial(train, tmp_path)
    before = run(once, survey=True)
    finding = before.findings[name]
    assert finding.applies, finding.reason
    targets = (str(PARTS),) if name == "accumulate" else finding.targets
    after = run(functools.partial(once, **trial), InterventionRequest(name, targets))
    hand = run(functools.partial(once, **by_hand))
    assert hand.peak < 0.9 * before.peak
    assert after.peak == pytest.approx(hand.peak, rel=0.01)
