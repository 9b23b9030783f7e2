"""Interventions on Hugging Face's Trainer: what it is given, and where."""

from __future__ import annotations

import functools
import sys
import types
from collections.abc import Callable
from typing import Any

import pytest
import torch

from helpers_interventions import run
from trainfit.results.runs.trace import InterventionRequest
from trainfit.simgpu.interventions import optimizers, trainers

WIDTH = 256


class PagedAdamW8bit(torch.optim.SGD):
    """A stand-in for bitsandbytes' optimizer: of its states none is in PyTorch's memory."""

    __module__ = "bitsandbytes.optim.adamw"
    is_paged = True


@pytest.fixture
def trainer(monkeypatch: pytest.MonkeyPatch) -> Any:
    """A stand-in for ``transformers.Trainer``, which steps once, and for PEFT, which freezes."""

    class Trainer:
        def __init__(
            self,
            model: Any = None,
            args: Any = None,
            optimizers: tuple[Any, Any] = (None, None),
            optimizer_cls_and_kwargs: Any = None,
        ) -> None:
            self.model, self.args = model, args
            self.kind, self.more = optimizer_cls_and_kwargs or (None, {})
            self.optimizer = optimizers[0] or self.create_optimizer()

        def create_optimizer(self) -> torch.optim.Optimizer:
            trained = [each for each in self.model.parameters() if each.requires_grad]
            kinds = {"adafactor": torch.optim.Adafactor, "paged_adamw_8bit": PagedAdamW8bit}
            named = kinds.get(getattr(self.args, "optim", ""), torch.optim.AdamW)
            made: torch.optim.Optimizer = (self.kind or named)(trained, **self.more)
            return made

        def train(self) -> None:
            for _ in range(2):
                self.model(torch.randn(2, WIDTH, device="cuda")).sum().backward()
                self.optimizer.step()
                self.optimizer.zero_grad()

    def get_peft_model(model: Any, config: Any) -> Any:
        model.requires_grad_(False)
        model.peft_config = config
        adapter = torch.nn.Sequential(
            torch.nn.Linear(WIDTH, config.r, bias=False),
            torch.nn.Linear(config.r, WIDTH, bias=False),
        )
        return torch.nn.Sequential(model, adapter.cuda())

    module: Any = types.ModuleType("transformers.trainer")
    module.Trainer = Trainer
    peft: Any = types.ModuleType("peft")
    peft.LoraConfig = lambda **named: types.SimpleNamespace(**named)
    peft.get_peft_model = get_peft_model
    peft.__spec__ = types.SimpleNamespace(name="peft")
    monkeypatch.setitem(sys.modules, "transformers.trainer", module)
    monkeypatch.setitem(sys.modules, "peft", peft)
    return module


@pytest.fixture
def loading(trainer: Any, monkeypatch: pytest.MonkeyPatch) -> Any:
    """A stand-in for a class of models that Transformers loads, in 4 bits where it is told to."""

    class PreTrainedModel(torch.nn.Linear):
        @classmethod
        def from_pretrained(cls, name: str, quantization_config: Any = None) -> Any:
            model = cls(WIDTH, WIDTH, bias=False).cuda()
            if quantization_config is not None:
                assert quantization_config.load_in_4bit
                model.hf_quantizer = quantization_config
                model.requires_grad_(False)
            return (model, {}) if name == "trained" else model  # output_loading_info=True

    for name, parts in {
        "transformers": {"BitsAndBytesConfig": lambda **named: types.SimpleNamespace(**named)},
        "transformers.modeling_utils": {"PreTrainedModel": PreTrainedModel},
        "bitsandbytes": {"optim": types.SimpleNamespace(PagedAdamW8bit=PagedAdamW8bit)},
    }.items():
        module: Any = types.ModuleType(name)
        module.__spec__ = types.SimpleNamespace(name=name)
        vars(module).update(parts)
        monkeypatch.setitem(sys.modules, name, module)
    return PreTrainedModel


def training(trainer: Any, **args: Any) -> Callable[[], None]:
    def train() -> None:
        model = torch.nn.Linear(WIDTH, WIDTH, bias=False).cuda()
        trainer.Trainer(model, types.SimpleNamespace(**args)).train()

    return train


def test_adapters_leave_the_weights_without_optimizer_states(trainer: Any) -> None:
    before = run(training(trainer), survey=True)
    found = before.findings["lora"]
    assert found.applies and "get_peft_model" in found.detail and found.places
    after = run(training(trainer), InterventionRequest("lora"))
    assert after.changed["lora"] == 1
    states = 2 * 2 * WIDTH * 16 * 4  # two of each adapter's matrices
    assert before.live("optimizer_state") >= 2 * WIDTH * WIDTH * 4
    assert states <= after.live("optimizer_state") < states + 4096


def test_a_trainer_of_trl_is_given_adapters_by_its_own_argument(
    trainer: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    made: list[Any] = []

    class SFTTrainer(trainer.Trainer):  # type: ignore[misc]
        def __init__(self, model: Any, args: Any = None, peft_config: Any = None) -> None:
            made.append(peft_config)
            if peft_config is not None:
                model = sys.modules["peft"].get_peft_model(model, peft_config)
                model.peft_config = peft_config
            super().__init__(model, args)

    module: Any = types.ModuleType("trl.trainer.sft_trainer")
    module.SFTTrainer = SFTTrainer
    monkeypatch.setitem(sys.modules, "trl.trainer.sft_trainer", module)

    def train(config: Any = None) -> None:
        model = torch.nn.Linear(WIDTH, WIDTH, bias=False).cuda()
        module.SFTTrainer(model, None, config).train()

    after = run(train, InterventionRequest("lora"))
    assert after.changed == {"lora": 1}
    assert made[0].target_modules == "all-linear"
    assert after.live("optimizer_state") < 2 * 2 * WIDTH * 16 * 4 + 4096
    own = types.SimpleNamespace(r=4)
    assert run(functools.partial(train, own), InterventionRequest("lora")).changed == {"lora": 0}
    assert made[1] is own


def test_weights_of_four_bits_where_the_trained_model_is_loaded(trainer: Any, loading: Any) -> None:
    def train() -> None:
        loading.from_pretrained("another")
        model, _ = loading.from_pretrained("trained")
        trainer.Trainer(model, types.SimpleNamespace(optim="adamw_torch")).train()

    found = run(train, survey=True).findings["qlora"]
    assert found.applies and "load_in_4bit=True" in found.detail
    (line,) = found.targets
    with open(__file__) as source:
        assert '"trained"' in source.readlines()[int(line.rpartition(":")[2]) - 1]
    requests = InterventionRequest("qlora", found.targets), InterventionRequest("lora")
    after = run(train, *requests)
    assert after.changed == {"qlora": 1, "lora": 1}
    assert not run(training(trainer), survey=True).findings["qlora"].applies


def test_weights_of_four_bits_in_a_loop_of_the_scripts_own(loading: Any) -> None:
    def train(adapters: bool) -> None:
        model, _ = loading.from_pretrained("trained")
        adapter = torch.nn.Linear(WIDTH, WIDTH).cuda()
        net = torch.nn.Sequential(model, adapter)
        if adapters:
            net.peft_config = object()
        optimizer = torch.optim.AdamW(adapter.parameters())
        net(torch.randn(2, WIDTH, device="cuda")).sum().backward()
        optimizer.step()

    found = run(functools.partial(train, True), survey=True).findings["qlora"]
    assert found.applies and "load_in_4bit=True" in found.detail
    request = InterventionRequest("qlora", found.targets)
    assert run(functools.partial(train, True), request).changed == {"qlora": 1}
    without = run(functools.partial(train, False), survey=True).findings["qlora"]
    assert not without.applies and "no adapters" in without.reason


def test_the_trainers_own_switch_for_a_paged_optimizer(trainer: Any, loading: Any) -> None:
    args = types.SimpleNamespace(optim="adamw_torch")

    def train() -> None:
        trainer.Trainer(torch.nn.Linear(WIDTH, WIDTH).cuda(), args).train()

    found = run(train, survey=True).findings["paged-optimizer"]
    assert found.applies and 'optim="paged_adamw_8bit"' in found.detail
    assert run(train, "paged-optimizer").changed["paged-optimizer"] == 1
    assert args.optim == "paged_adamw_8bit"
    other = run(training(trainer, optim="adafactor"), survey=True).findings["paged-optimizer"]
    assert other.reason == "there is no paged version of Adafactor"


def test_a_trainer_that_chooses_its_optimizer_is_told_of_others(trainer: Any) -> None:
    class Older(trainer.Trainer):  # type: ignore[misc]
        def __init__(self, model: Any, args: Any, optimizers: Any = (None, None)) -> None:
            super().__init__(model, args, optimizers)

    def told(kind: Any, **named: Any) -> dict[str, tuple[str, ...]]:
        def train() -> None:
            model = torch.nn.Linear(WIDTH, WIDTH).cuda()
            kind(model, types.SimpleNamespace(optim="adamw_torch"), **named).train()

        found = run(train, survey=True).findings
        return {name: each.targets for name, each in found.items()}

    adamw = told(trainer.Trainer)
    assert adamw["sgd"] == ('in the trainer\'s arguments: optim="sgd"',)
    assert adamw["fused-optimizer"][0].endswith('optim="adamw_torch_fused"')
    assert adamw["optimizer-8bit"][0].endswith('optim="adamw_8bit" (pip install bitsandbytes)')
    momentum = "optimizer_cls_and_kwargs=(torch.optim.SGD, dict(lr=…, momentum=0.9))"
    assert adamw["momentum"] == (f"where the trainer is made: {momentum}",)
    older = "optimizers=(torch.optim.SGD(model.parameters(), lr=…, momentum=0.9), None)"
    assert told(Older)["momentum"] == (f"where the trainer is made: {older}",)
    sgd = told(trainer.Trainer, optimizer_cls_and_kwargs=(torch.optim.SGD, {"lr": 1.0}))
    assert sgd["fused-optimizer"][0].endswith("=(torch.optim.SGD, dict(lr=…, fused=True))")


def test_a_trainer_that_is_given_its_optimizer_has_no_argument_for_another(
    trainer: Any, loading: Any
) -> None:
    class Own(trainer.Trainer):  # type: ignore[misc]
        def create_optimizer(self) -> torch.optim.Optimizer:
            return torch.optim.AdamW(self.model.parameters())

    def by_class() -> None:
        model = torch.nn.Linear(WIDTH, WIDTH).cuda()
        Own(model, types.SimpleNamespace(optim="adamw_torch")).train()

    def by_argument() -> None:
        model = torch.nn.Linear(WIDTH, WIDTH).cuda()
        made = torch.optim.AdamW(model.parameters()), None
        trainer.Trainer(model, types.SimpleNamespace(optim="adamw_torch"), made).train()

    for train in (by_class, by_argument):
        found = run(train, survey=True).findings
        assert found["sgd"].applies and found["fused-optimizer"].applies
        assert not any(found[name].targets for name in ("sgd", "momentum", "fused-optimizer"))
        assert "there, bitsandbytes.optim.PagedAdamW8bit(…)" in found["paged-optimizer"].detail
        with open(__file__) as source:
            (place,) = found["sgd"].places
            assert "AdamW(" in source.readlines()[int(place.rpartition(":")[2]) - 1]


class Words(torch.nn.Module):
    """Only an embedding, as large as its states are to be told."""

    def __init__(self) -> None:
        super().__init__()
        self.words = torch.nn.Embedding(4 * WIDTH, WIDTH)

    def forward(self, samples: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = self.words(samples.long())
        return result


def test_a_trainer_has_bitsandbytes_keep_the_states_of_embeddings_in_32_bits(
    trainer: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(optimizers, "_library", lambda: None)

    def by_trainer() -> None:
        trainer.Trainer(Words().cuda(), types.SimpleNamespace(optim="adamw_torch")).train()

    def by_loop() -> None:
        model = Words().cuda()
        made = torch.optim.AdamW(model.parameters()), None
        trainer.Trainer(model, types.SimpleNamespace(optim="adamw_torch"), made).train()

    elements = 4 * WIDTH * WIDTH
    wide = run(by_trainer, "optimizer-8bit").live("optimizer_state")
    narrow = run(by_loop, "optimizer-8bit").live("optimizer_state")
    assert 8 * elements <= wide < 8 * elements + 8192
    assert 2 * elements <= narrow < 2.1 * elements


def test_a_trainer_accumulates_by_its_own_argument(trainer: Any) -> None:
    args = types.SimpleNamespace(optim="adamw_torch", gradient_accumulation_steps=3)

    def train() -> None:
        trainer.Trainer(torch.nn.Linear(WIDTH, WIDTH).cuda(), args).train()

    after = run(train, InterventionRequest("accumulate", ("4",)))
    assert after.changed["accumulate"] == 1
    assert args.gradient_accumulation_steps == 12
    assert after.recording.steps == 2  # each step of its optimizer is one


def test_a_trainer_that_takes_adapters_is_given_them() -> None:
    class Sft:
        def __init__(self, model: Any, peft_config: Any = None) -> None: ...

    words = trainers.Adapters()._words(Sft(None))
    assert words.startswith('Sft(…, peft_config=LoraConfig(target_modules="all-linear"))')


@pytest.mark.parametrize(
    ("args", "said"),
    [({}, "not installed"), ({"use_liger_kernel": True}, "or it is on")],
)
def test_liger_is_refused_by_name(
    trainer: Any, monkeypatch: pytest.MonkeyPatch, args: dict[str, Any], said: str
) -> None:
    if args:
        liger: Any = types.ModuleType("liger_kernel")
        liger.__spec__ = types.SimpleNamespace(name="liger_kernel")
        monkeypatch.setitem(sys.modules, "liger_kernel", liger)
    found = run(training(trainer, **args), survey=True).findings["chunked-loss"]
    assert not found.applies and said in found.reason


class Head(torch.nn.Module):
    """A language model as Transformers has them: its parts have these names."""

    def __init__(self) -> None:
        super().__init__()
        self.config = types.SimpleNamespace(model_type="llama")
        self.model = torch.nn.Linear(WIDTH, WIDTH, bias=False)
        self.lm_head = torch.nn.Linear(WIDTH, 64 * WIDTH, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.lm_head(self.model(x)).float().logsumexp(-1)


def test_liger_patches_the_model_of_a_loop_that_is_the_scripts_own(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def apply_liger_kernel_to_llama(model: Any) -> None:
        model.forward = lambda x: model.model(x).sum()

    names = ("liger_kernel", "liger_kernel.transformers", "liger_kernel.transformers.monkey_patch")
    for name in names:
        liger: Any = types.ModuleType(name)
        liger.__spec__ = types.SimpleNamespace(name=name)
        monkeypatch.setitem(sys.modules, name, liger)
    liger.MODEL_TYPE_TO_APPLY_LIGER_FN = {"llama": apply_liger_kernel_to_llama}

    def train() -> None:
        model = torch.nn.ModuleDict({"inner": Head()}).cuda()
        optimizer = torch.optim.SGD(model.parameters())
        for _ in range(2):
            model["inner"](torch.randn(64, WIDTH, device="cuda")).sum().backward()
            optimizer.step()

    before = run(train, survey=True)
    found = before.findings["chunked-loss"]
    assert found.applies and "apply_liger_kernel_to_llama()" in found.detail
    after = run(train, "chunked-loss")
    assert after.changed == {"chunked-loss": 1}
    assert before.peak - after.peak >= 64 * 64 * WIDTH * 4  # the logits
