"""Interventions on the configurations of TRL's trainers: what is changed, where, and once."""

from __future__ import annotations

import dataclasses
import sys
import types
from collections.abc import Callable
from typing import Any

import pytest
import torch

from helpers_interventions import run
from trainfit.results.runs.trace import InterventionRequest

WIDTH = 64


@dataclasses.dataclass
class DPOConfig:
    """A stand-in for TRL's, with what is derived from its fields."""

    per_device_train_batch_size: int = 8
    max_length: int | None = 1024
    precompute_ref_log_probs: bool = False
    sync_ref_model: bool = False

    def __post_init__(self) -> None:
        self.samples = self.per_device_train_batch_size


@dataclasses.dataclass
class GRPOConfig:
    per_device_train_batch_size: int = 8
    num_generations: int = 8
    gradient_accumulation_steps: int = 1
    max_completion_length: int | None = 256

    def __post_init__(self) -> None:
        per_step = self.gradient_accumulation_steps
        self.generation_batch_size = self.per_device_train_batch_size * per_step
        self.steps_per_generation = per_step


class Reference:
    """A stand-in for ``DPOTrainer`` that computes before it trains."""

    def __init__(self) -> None:
        self.calls = 0

    def compute_ref_log_probs(self, model: Any, inputs: dict[str, Any]) -> tuple[Any, Any]:
        self.calls += 1
        return inputs["input_ids"][:, 0], inputs["input_ids"][:, 1]


@pytest.fixture(autouse=True)
def trl(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Stand-ins for TRL's modules and for Transformers' ``Trainer``."""

    class Trainer:
        def __init__(self, model: Any = None, args: Any = None) -> None:
            self.model = model

    modules: dict[str, dict[str, Any]] = {
        "trl.trainer.dpo_config": {"DPOConfig": DPOConfig},
        "trl.trainer.dpo_trainer": {"DPOTrainer": Reference},
        "trl.trainer.grpo_config": {"GRPOConfig": GRPOConfig},
        "transformers.trainer": {"Trainer": Trainer},
    }
    for name, parts in modules.items():
        module: Any = types.ModuleType(name)
        vars(module).update(parts)
        monkeypatch.setitem(sys.modules, name, module)
    return Trainer


def making(made: list[Any], make: Callable[[], Any]) -> Callable[[], None]:
    def train() -> None:
        made.append(make())
        model = torch.nn.Linear(WIDTH, WIDTH).cuda()
        model(torch.randn(2, WIDTH, device="cuda")).sum().backward()
        torch.optim.SGD(model.parameters()).step()

    return train


def changed(name: str, make: Callable[[], Any]) -> tuple[str, Any]:
    """What is to be written by the survey, and the configuration of the run with it."""
    found = run(making([], make), survey=True).findings[name]
    assert found.applies, found.reason
    (place,) = found.places
    with open(__file__) as source:
        assert "Config(" in source.readlines()[int(place.rpartition(":")[2]) - 1]
    made: list[Any] = []
    after = run(making(made, make), InterventionRequest(name, found.targets))
    assert after.changed == {name: 1}
    return found.detail, made[0]


def test_samples_are_cut_at_half_the_length() -> None:
    said, config = changed("shorter-sequences", lambda: DPOConfig(max_length=512))
    assert said == "in its DPOConfig: max_length=256"
    assert config.max_length == 256


def test_half_as_many_completions_are_of_as_many_prompts() -> None:
    said, config = changed("fewer-generations", lambda: GRPOConfig())
    assert said == "in its GRPOConfig: num_generations=4, per_device_train_batch_size=4"
    assert (config.num_generations, config.generation_batch_size) == (4, 4)
    made: list[Any] = []
    run(making(made, GRPOConfig), InterventionRequest("fewer-generations", ("4",)))
    assert (made[0].num_generations, made[0].generation_batch_size) == (4, 8)


def test_a_trainer_that_generates_divides_its_batch_after_the_texts_are_made(trl: Any) -> None:
    """All of its texts are made at once: the DataLoader's batches are as they were."""

    def make() -> Any:
        config = GRPOConfig(per_device_train_batch_size=8, gradient_accumulation_steps=2)
        trl(torch.nn.Linear(WIDTH, WIDTH), config)
        return config

    found = run(making([], make), survey=True).findings["accumulate"]
    assert found.targets == ("generates",)
    made: list[Any] = []
    after = run(making(made, make), InterventionRequest("accumulate", ("4", *found.targets)))
    assert after.changed == {"accumulate": 1}
    assert (made[0].per_device_train_batch_size, made[0].gradient_accumulation_steps) == (2, 8)
    assert made[0].generation_batch_size == 16


def test_completions_of_half_the_length_in_a_configuration_of_the_scripts_own() -> None:
    @dataclasses.dataclass
    class Own(GRPOConfig):
        more: int = 0

    def make() -> Any:
        config = Own(max_completion_length=100)  # a subclass of GRPOConfig(
        return dataclasses.replace(config, more=1)  # the copy is not halved once more

    found = run(making([], make), survey=True).findings["shorter-completions"]
    made: list[Any] = []
    run(making(made, make), InterventionRequest("shorter-completions", found.targets))
    assert found.detail.startswith("in its Own: ")
    assert made[0].max_completion_length == 50


@pytest.mark.parametrize(
    ("name", "make", "why"),
    [
        ("fewer-generations", lambda: GRPOConfig(num_generations=2), "num_generations=2 is small"),
        (
            "fewer-generations",
            lambda: GRPOConfig(per_device_train_batch_size=1),
            "completions and batch cannot be halved together",
        ),
        ("shorter-sequences", lambda: DPOConfig(max_length=None), "has no max_length"),
        ("shorter-completions", lambda: None, "makes no configuration"),
        (
            "reference-logprobs",
            lambda: DPOConfig(precompute_ref_log_probs=True),
            "computes them before the training",
        ),
        ("reference-logprobs", lambda: DPOConfig(sync_ref_model=True), "sync_ref_model"),
    ],
)
def test_what_cannot_be_changed_is_told(name: str, make: Any, why: str) -> None:
    found = run(making([], make), survey=True).findings[name]
    assert not found.applies and why in found.reason


def test_log_probabilities_of_the_reference_are_computed_for_a_few_batches() -> None:
    trainer = Reference()
    results: list[Any] = []

    def make() -> Any:
        config = DPOConfig()
        if config.precompute_ref_log_probs:
            for rows in (*[4] * 100, 3):  # and what is left of the data set
                batch = {"chosen": [""] * rows, "input_ids": torch.zeros(rows, 7)}
                results.append(trainer.compute_ref_log_probs(None, batch))
        return config

    said, _ = changed("reference-logprobs", make)
    assert said == "in its DPOConfig: precompute_ref_log_probs=True"
    assert trainer.calls == 3 + 1
    assert [len(chosen) for chosen, _ in results] == [4] * 100 + [3]


def test_a_model_with_adapters_is_its_own_reference(trl: Any) -> None:
    def make() -> Any:
        config = DPOConfig()
        model = torch.nn.Linear(WIDTH, WIDTH)
        model.peft_config = object()
        trl(model, config)

    found = run(making([], make), survey=True).findings["reference-logprobs"]
    assert not found.applies and "no second model" in found.reason
