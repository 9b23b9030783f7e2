"""Each intervention on a small script, with the arithmetic that it must show."""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

from helpers_interventions import Run, run, tried
from trainfit.results.runs.trace import InterventionRequest
from trainfit.simgpu.interventions.attention import WeightsUsedError
from trainfit.simgpu.interventions.checkpointing import repeated_blocks
from trainfit.simgpu.interventions.inputs import shrunk, smaller
from trainfit.simgpu.interventions.optimizer_step import backbone_of
from trainfit.simgpu.interventions.script_state import models_of

WIDTH = 1024
#: Bytes of one square weight in float32: whole blocks of the allocator.
P = 4 * WIDTH * WIDTH


def training(
    make: Callable[[], nn.Module],
    optimizer: Callable[[Any], torch.optim.Optimizer] = torch.optim.Adam,
    *,
    shape: tuple[int, ...] = (2, WIDTH),
    steps: int = 2,
) -> Callable[[], None]:
    """A training function of ``steps`` steps on random inputs."""

    def train() -> None:
        model = make().cuda()
        update = optimizer(model.parameters())
        for _ in range(steps):
            update.zero_grad()
            model(torch.randn(shape, device="cuda")).sum().backward()
            update.step()

    return train


def square(layers: int = 1) -> nn.Module:
    return nn.Sequential(*(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(layers)))


# -- optimizers --------------------------------------------------------------------------------


def state_of(name: str, optimizer: Any = torch.optim.Adam) -> tuple[int, int]:
    """Bytes of optimizer state as written and under the intervention, one weight of P bytes."""
    before, after = tried(training(square, optimizer), name)
    return before.live("optimizer_state"), after.live("optimizer_state")


def test_sgd_removes_both_moments_of_adam() -> None:
    assert state_of("sgd") == (2 * P, 0)


def test_momentum_is_half_of_adams_state() -> None:
    assert state_of("momentum") == (2 * P, P)


def test_adafactor_keeps_a_row_and_a_column() -> None:
    assert state_of("adafactor") == (2 * P, 4 * (WIDTH + WIDTH))


def test_eight_bit_states_are_a_byte_an_element_and_a_scale_a_block() -> None:
    elements = WIDTH * WIDTH
    scales = 4 * elements // 256
    maps = 4 * 256
    assert state_of("optimizer-8bit") == (2 * P, 2 * (elements + scales + maps))


def test_eight_bit_momentum_is_one_state() -> None:
    def sgd(parameters: Any) -> torch.optim.Optimizer:
        return torch.optim.SGD(parameters, momentum=0.9)

    elements = WIDTH * WIDTH
    after = elements + 4 * elements // 256 + 4 * 256
    assert state_of("optimizer-8bit", sgd) == (P, after)


@pytest.mark.parametrize(("elements", "bytes_"), [(4095, 4 * 4095), (4096, 4096 + 4 * 16 + 1024)])
def test_eight_bit_states_of_small_tensors_are_float32(elements: int, bytes_: int) -> None:
    train = training(lambda: nn.Linear(elements, 1, bias=False), shape=(2, elements))
    _, after = tried(train, "optimizer-8bit")
    assert after.live("optimizer_state") == 2 * bytes_


def test_fused_adam_makes_no_temporary_of_foreach() -> None:
    # foreach holds the square root of the second moment of all parameters at once.
    before, after = tried(training(lambda: square(4)), "fused-optimizer")
    assert before.live("optimizer_state") == 2 * 4 * P
    steps = after.live("optimizer_state") - 2 * 4 * P  # they are on the device now
    assert 0 < steps <= 4 * 4
    workspace = before.live("workspace")
    # Parameters, gradients, both moments, and with foreach the root.
    assert before.peak - workspace == 5 * 4 * P
    assert 0 < after.peak - workspace - 4 * 4 * P < 1 << 16  # some activations


@pytest.mark.parametrize(
    ("name", "optimizer", "reason"),
    [
        ("sgd", torch.optim.SGD, "SGD keeps at least as much state as SGD without momentum"),
        ("adam", torch.optim.Adam, "Adam keeps at least as much state as Adam"),
        ("optimizer-8bit", torch.optim.SGD, "no 8-bit version of SGD without momentum"),
        ("optimizer-8bit", torch.optim.NAdam, "no 8-bit version of NAdam"),
        ("fused-optimizer", torch.optim.NAdam, "NAdam is already fused, or has no fused version"),
    ],
)
def test_optimizers_that_win_nothing_do_not_apply(name: str, optimizer: Any, reason: str) -> None:
    finding = run(training(square, optimizer), survey=True).findings[name]
    assert not finding.applies
    assert reason in finding.reason


def test_adam_is_offered_for_what_keeps_more() -> None:
    def amsgrad(parameters: Any) -> torch.optim.Optimizer:
        return torch.optim.Adam(parameters, amsgrad=True)

    assert state_of("adam", amsgrad) == (3 * P, 2 * P)


def test_the_line_that_makes_the_optimizer_is_named() -> None:
    finding = run(training(square), survey=True).findings["sgd"]
    (place,) = finding.places
    assert place.startswith(__file__)


def test_a_learning_rate_scheduler_goes_on() -> None:
    def train() -> None:
        model = square().cuda()
        optimizer = torch.optim.Adam(model.parameters())
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1)
        for _ in range(2):
            optimizer.zero_grad()
            model(torch.randn(2, WIDTH, device="cuda")).sum().backward()
            optimizer.step()
            scheduler.step()

    for name in ("sgd", "fused-optimizer"):
        assert run(train, name).recording.steps == 2
    accumulated = run(train, InterventionRequest("accumulate", ("2",)))
    assert accumulated.recording.steps == 1


def test_a_step_in_the_backward_pass_frees_each_gradient() -> None:
    layers = 8
    before, after = tried(
        training(lambda: square(layers), torch.optim.SGD), "optimizer-in-backward"
    )
    small = P // 4  # inputs of 8 KiB, and the workspace of cuBLAS is the same in both
    workspace = before.live("workspace")
    assert before.peak - workspace >= 2 * layers * P
    assert (layers + 1) * P <= after.peak - workspace <= (layers + 2) * P + small
    assert after.recording.steps == before.recording.steps == 2


@pytest.mark.parametrize("what", ["clips", "scales", "accumulates"])
def test_a_step_in_the_backward_pass_does_not_go_with(what: str) -> None:
    def train() -> None:
        model = square().cuda()
        optimizer = torch.optim.SGD(model.parameters())
        scaler = torch.amp.GradScaler("cuda", enabled=what == "scales")
        for _ in range(2 if what == "accumulates" else 1):
            scaler.scale(model(torch.randn(2, WIDTH, device="cuda")).sum()).backward()
        if what == "clips":
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        scaler.step(optimizer)
        scaler.update()

    finding = run(train, survey=True).findings["optimizer-in-backward"]
    assert not finding.applies
    words = {"clips": "clip_grad_norm_ at", "scales": "unscale", "accumulates": "2 backward passes"}
    assert words[what] in finding.reason


@pytest.mark.parametrize("owner", ["optimizer", "model"])
def test_accumulation_keeps_the_gradients_between_micro_batches(owner: str) -> None:
    def train() -> None:
        model = square().cuda()
        optimizer = torch.optim.SGD(model.parameters())
        for _ in range(4):
            (optimizer if owner == "optimizer" else model).zero_grad()
            model(torch.randn(2, WIDTH, device="cuda")).sum().backward()
            optimizer.step()

    before = run(train)
    after = run(train, InterventionRequest("accumulate", ("2",)))
    assert (before.recording.steps, after.recording.steps) == (4, 2)
    # One micro-batch's gradient is there while the next one's is computed: one P more.
    assert after.peak - before.peak == P


@pytest.mark.parametrize("owner", ["optimizer", "model"])
def test_gradients_set_to_none_are_freed(owner: str) -> None:
    def train() -> None:
        model = square().cuda()
        optimizer = torch.optim.SGD(model.parameters())
        model(torch.randn(2, WIDTH, device="cuda")).sum().backward()
        optimizer.step()
        (optimizer if owner == "optimizer" else model).zero_grad(set_to_none=False)
        live.append(torch.cuda.memory_allocated())

    live: list[int] = []
    tried(train, "set-to-none")
    assert live[0] - live[1] == P


def test_set_to_none_is_left_alone_where_it_is_on() -> None:
    finding = run(training(square), survey=True).findings["set-to-none"]
    assert finding.reason == "zero_grad already sets gradients to None"


# -- the model ---------------------------------------------------------------------------------


def conv(*channels: int, kernel: int = 3) -> nn.Sequential:
    pairs = itertools.pairwise(channels)
    return nn.Sequential(*(nn.Conv2d(a, b, kernel, padding=kernel // 2) for a, b in pairs))


class Parts(nn.Module):
    """Named parts, called one after another."""

    def __init__(self, **parts: nn.Module) -> None:
        super().__init__()
        for name, part in parts.items():
            self.add_module(name, part)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for part in self.children():
            x = part(x)
        return x


@pytest.mark.parametrize(
    ("model", "backbone"),
    [
        (Parts(trunk=conv(3, 8, 8), neck=conv(8, 4, kernel=1), head=nn.Linear(4, 4)), ["trunk"]),
        (Parts(model=Parts(trunk=conv(3, 8), head=nn.Linear(8, 4))), ["model.trunk"]),
        (Parts(stem=conv(3, 8), stage=conv(8, 16), fc=nn.Linear(4, 4)), ["stem", "stage"]),
        (Parts(body=nn.Linear(4, 4), act=nn.ReLU(), head=nn.Linear(4, 2)), ["body"]),
        (Parts(net=Parts(a=nn.Linear(2, 2), b=nn.Linear(2, 2))), ["net.a"]),
        (nn.Linear(4, 4), []),
    ],
)
def test_the_backbone_by_rule(model: nn.Module, backbone: list[str]) -> None:
    names = {id(module): name for name, module in model.named_modules()}
    assert [names[id(part)] for part in backbone_of(model)] == backbone


def test_a_frozen_backbone_has_neither_gradients_nor_states() -> None:
    def make() -> nn.Module:
        return Parts(body=square(3), head=nn.Linear(WIDTH, WIDTH, bias=False))

    before, after = tried(training(make), "freeze-backbone")
    assert before.live("optimizer_state") == 2 * 4 * P
    assert after.live("optimizer_state") == 2 * P
    assert before.live("gradient") - after.live("gradient") == 3 * P
    # Forward 4 layers; backward 4 weights and 3 inputs, against 1 weight.
    assert before.compute is not None and after.compute is not None
    assert after.compute.flops * 11 == before.compute.flops * 5


class Block(nn.Module):
    """Two layers, each of which keeps its result for the backward pass."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.one, self.two = nn.Linear(width, width), nn.Linear(width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.sigmoid(self.two(torch.sigmoid(self.one(x))))


def test_checkpointing_keeps_one_activation_a_block() -> None:
    blocks, width, batch = 4, 64, 4096
    kept: list[int] = []

    def train() -> None:
        model = nn.Sequential(*(Block(width) for _ in range(blocks))).cuda()
        optimizer = torch.optim.SGD(model.parameters())
        result = model(torch.randn(batch, width, device="cuda"))
        kept.append(torch.cuda.memory_allocated())
        result.sum().backward()
        optimizer.step()

    before, after = tried(train, "checkpoint")
    assert kept[0] - kept[1] == blocks * 4 * batch * width
    assert after.changed == {"checkpoint": blocks}
    assert before.compute is not None and after.compute is not None
    # Forward 8 products, backward 15 (the input needs no gradient); forward once more.
    assert after.compute.flops * 23 == before.compute.flops * 31
    assert before.findings["checkpoint"].detail == "4 blocks of Block"


def test_a_long_sequential_is_cut_into_segments() -> None:
    layers = [layer for _ in range(8) for layer in (nn.Linear(64, 64), nn.Sigmoid())]
    train = training(lambda: nn.Sequential(*layers), shape=(4096, 64))
    before, after = tried(train, "checkpoint")
    assert before.findings["checkpoint"].detail == "4 segments of the model (16 layers)"
    assert after.peak < before.peak


def test_repeated_blocks_are_not_confused() -> None:
    nested = nn.Sequential(nn.Sequential(Block(2), Block(2)), nn.Sequential(Block(2), Block(2)))
    unlike = nn.Sequential(nn.Sequential(Block(2), nn.ReLU()), nn.Sequential(Block(2)))
    for model, sizes in ((nested, [2, 2]), (unlike, []), (square(4), [])):
        called = {id(module) for module in model.modules()}
        assert [len(group) for group in repeated_blocks(model, called)] == sizes
    assert repeated_blocks(nested, set()) == []


class Adapted(nn.Module):
    """A layer with an adapter beside it, as PEFT and torchtune have them."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.base, self.lora = nn.Linear(width, width), nn.Linear(width, width, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = self.base(x) + self.lora(x)
        return result


class AdaptedBlock(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.query, self.key = Adapted(width), Adapted(width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + torch.sigmoid(self.query(x)) * torch.sigmoid(self.key(x))


def test_layers_with_adapters_are_parts_of_their_block() -> None:
    model = nn.Sequential(*(AdaptedBlock(8) for _ in range(3)))
    called = {id(module) for module in model.modules()}
    assert [[type(block) for block in group] for group in repeated_blocks(model, called)] == [
        [AdaptedBlock] * 3
    ]


class OwnWay(nn.Module):
    """A model that checkpoints its blocks when it is asked to, as those of Transformers."""

    supports_gradient_checkpointing = True

    def __init__(self, width: int) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block(width) for _ in range(4))
        self.checkpoints = False

    def gradient_checkpointing_enable(self, gradient_checkpointing_kwargs: Any) -> None:
        assert gradient_checkpointing_kwargs == {"use_reentrant": False}
        self.checkpoints = True

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            again = functools.partial(torch.utils.checkpoint.checkpoint, block, use_reentrant=False)
            x = (again if self.checkpoints and self.training else block)(x)
        return x


def test_a_model_checkpoints_in_its_own_way() -> None:
    def train(by_hand: bool = False) -> None:
        model = nn.Sequential(OwnWay(64), nn.Linear(64, 64)).cuda()
        optimizer = torch.optim.SGD(model.parameters())
        if by_hand:
            model[0].gradient_checkpointing_enable({"use_reentrant": False})
        for _ in range(2):
            model(torch.randn(4096, 64, device="cuda")).sum().backward()
            optimizer.step()

    before, after = tried(train, "checkpoint")
    assert before.findings["checkpoint"].targets == ("0:0.gradient_checkpointing_enable",)
    assert before.findings["checkpoint"].detail == "model.0.gradient_checkpointing_enable()"
    assert after.peak == run(functools.partial(train, True)).peak < before.peak


def test_what_is_not_checkpointed_in_evaluation_mode_is_no_remedy() -> None:
    def train() -> None:
        model = nn.Sequential(Block(8), Block(8)).cuda().eval()
        optimizer = torch.optim.SGD(model.parameters())
        model(torch.randn(4, 8, device="cuda")).sum().backward()
        optimizer.step()

    assert "evaluation mode" in run(train, survey=True).findings["checkpoint"].reason


def test_checkpointing_is_left_alone_where_the_script_does_it() -> None:
    def train() -> None:
        model = nn.Sequential(Block(8), Block(8)).cuda()
        optimizer = torch.optim.SGD(model.parameters())
        x = torch.randn(4, 8, device="cuda")
        torch.utils.checkpoint.checkpoint(model, x, use_reentrant=False).sum().backward()
        optimizer.step()

    finding = run(train, survey=True).findings["checkpoint"]
    assert finding.reason == "the script checkpoints activations already"


class Attends(nn.Module):
    def __init__(self, *, looks: bool = False) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(64, 4, batch_first=True)
        self.looks = looks

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        result, weights = self.attention(x, x, x)
        return result + weights.mean() if self.looks else result


def test_attention_without_weights_makes_no_scores() -> None:
    batch, tokens = 2, 512
    scores = 4 * batch * 4 * tokens * tokens
    before, after = tried(training(Attends, shape=(batch, tokens, 64)), "attention-weights")
    assert scores in before.sizes()
    assert scores not in after.sizes()
    assert before.peak - after.peak > scores
    assert not before.findings["fused-attention"].applies


def test_weights_that_are_used_are_seen() -> None:
    train = training(lambda: Attends(looks=True), shape=(2, 16, 64))
    with pytest.raises(WeightsUsedError, match=r"the attention weights of .* are used at .*\.py:"):
        run(train, "attention-weights")


def test_written_attention_is_found_and_its_tensors_counted() -> None:
    batch, heads, tokens, size = 2, 4, 128, 16

    class Written(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.qkv = nn.Linear(heads * size, 3 * heads * size)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            q, k, v = (
                part.view(batch, tokens, heads, size).transpose(1, 2)
                for part in self.qkv(x).chunk(3, -1)
            )
            scores = q @ k.transpose(-2, -1) / math.sqrt(size)
            return F.dropout(scores.softmax(-1), 0.1) @ v

    survey = run(training(Written, shape=(batch, tokens, heads * size), steps=1), survey=True)
    finding = survey.findings["fused-attention"]
    assert finding.applies and finding.places[0].startswith(__file__)
    square_ = batch * heads * tokens * tokens
    sizes = sorted(survey.recording.alloc_bytes[list(finding.allocations)].tolist())
    # Product, quotient, softmax and what dropout leaves in float32; dropout's mask in bytes.
    assert sizes == [square_, *[4 * square_] * 4]


class Activated(nn.Module):
    """A layer, an activation, and what becomes of them."""

    def __init__(self, act: nn.Module, after: Callable[[Any, Any], Any]) -> None:
        super().__init__()
        self.one, self.act, self.two = nn.Linear(64, 64), act, nn.Linear(64, 64)
        self.after = after

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.one(x)
        return self.after(self.two(self.act(y)), y)


@pytest.mark.parametrize(
    ("act", "after", "good"),
    [
        (nn.ReLU, lambda result, before: result, True),
        (nn.LeakyReLU, lambda result, before: result, True),
        (nn.ReLU, lambda result, before: result + before, False),
        (nn.ReLU, lambda result, before: result * before, False),
        (nn.SiLU, lambda result, before: result, False),
    ],
    ids=["relu", "leaky", "residual", "product", "silu"],
)
def test_inplace_only_where_nobody_reads_the_input(act: Any, after: Any, good: bool) -> None:
    train = training(lambda: Activated(act(), after), shape=(4096, 64))
    before = run(train, survey=True)
    finding = before.findings["inplace"]
    assert finding.applies is good
    if good:
        changed = run(train, InterventionRequest("inplace", finding.targets))
        assert changed.changed == {"inplace": 1}
        made = 4 * 4096 * 64
        counts = [int((r.recording.alloc_bytes == made).sum()) for r in (before, changed)]
        assert counts[0] - counts[1] == 2  # one a step


def test_channels_last_changes_weights_and_batches() -> None:
    seen: list[bool] = []

    def train() -> None:
        model = conv(3, 8, 8).cuda()
        optimizer = torch.optim.SGD(model.parameters())
        for (images,) in DataLoader(TensorDataset(torch.randn(4, 3, 64, 64)), 2):
            images = images.cuda()
            weight: Any = model[1].weight
            seen.append(images.is_contiguous(memory_format=torch.channels_last))
            seen.append(weight.is_contiguous(memory_format=torch.channels_last))
            optimizer.zero_grad()
            model(images).sum().backward()
            optimizer.step()

    before, after = tried(train, "channels-last")
    assert seen == [False] * 4 + [True] * 4
    assert after.peak <= before.peak


def test_a_pooled_head_has_a_layer_of_channels_by_outputs() -> None:
    def make() -> nn.Module:
        head = nn.Sequential(nn.Linear(8 * 14 * 14, 512), nn.ReLU(), nn.Linear(512, 10))
        return Parts(trunk=conv(3, 8), pool=nn.MaxPool2d(2), flat=nn.Flatten(), head=head)

    before, after = tried(training(make, shape=(2, 3, 28, 28)), "global-pooling")
    trunk = 3 * 8 * 9 + 8
    old = trunk + 8 * 14 * 14 * 512 + 512 + 512 * 10 + 10
    assert before.live("optimizer_state") == 2 * 4 * old
    assert after.live("optimizer_state") == 2 * 4 * (trunk + 8 * 10 + 10)
    assert before.findings["global-pooling"].detail == "1568 inputs, 8 channels, 10 outputs"


def test_named_parameters_and_groups_are_exchanged_too() -> None:
    def make() -> nn.Module:
        return Parts(trunk=conv(3, 8), flat=nn.Flatten(), head=nn.Linear(8 * 28 * 28, 10))

    def train(groups: Callable[[nn.Module], Any]) -> Callable[[], None]:
        def function() -> None:
            model = make().cuda()
            optimizer = torch.optim.Adam(groups(model))
            model(torch.randn(2, 3, 28, 28, device="cuda")).sum().backward()
            optimizer.step()

        return function

    for groups in (
        lambda model: model.named_parameters(),
        lambda model: [{"params": part.parameters()} for part in (model.head, model.trunk)],
    ):
        _, after = tried(train(groups), "global-pooling")
        assert after.live("optimizer_state") == 2 * 4 * (3 * 8 * 9 + 8 + 8 * 10 + 10)


# -- data and gradient mode --------------------------------------------------------------------


@given(st.integers(64, 4096))
def test_smaller_sides_are_multiples_of_32_near_71_percent(side: int) -> None:
    assert smaller(side) % 32 == 0
    assert smaller(side) < side
    assert abs(smaller(side) - side * math.sqrt(0.5)) <= 16


@given(st.integers(64, 300), st.integers(64, 300))
def test_shrunk_images_keep_their_values(height: int, width: int) -> None:
    image = torch.arange(height * width).view(1, height, width)
    small = shrunk(image)
    assert small.shape == (1, smaller(height), smaller(width))
    assert set(small.flatten().tolist()) <= set(image.flatten().tolist())


def test_masks_shrink_with_their_images() -> None:
    shapes: list[tuple[int, ...]] = []

    def train() -> None:
        model = conv(3, 2).cuda()
        optimizer = torch.optim.SGD(model.parameters())
        data = TensorDataset(torch.randn(2, 3, 96, 128), torch.zeros(2, 96, 128), torch.zeros(2, 5))
        for images, masks, others in DataLoader(data, 2):
            shapes.extend([tuple(images.shape), tuple(masks.shape), tuple(others.shape)])
            (model(images.cuda())[:, 0] - masks.cuda()).square().sum().backward()
            optimizer.step()

    before, after = tried(train, "lower-resolution")
    assert before.findings["lower-resolution"].detail == "96×128 to 64×96"
    assert shapes[3:] == [(2, 3, 64, 96), (2, 64, 96), (2, 5)]
    assert after.peak < before.peak


def test_evaluation_without_gradients_keeps_nothing() -> None:
    kept: list[int] = []

    def train() -> None:
        model = nn.Sequential(Block(64), Block(64)).cuda()
        optimizer = torch.optim.SGD(model.parameters())
        x = torch.randn(4096, 64, device="cuda")
        model.eval()
        before = torch.cuda.memory_allocated()
        result = model(x)
        kept.append(torch.cuda.memory_allocated() - before)
        del result
        model.train()
        model(x).sum().backward()
        optimizer.step()

    tried(train, "no-grad-eval")
    activation = 4 * 4096 * 64
    workspace = kept[1] - activation  # cuBLAS takes its own at the first product
    assert kept[0] == 4 * activation + workspace


def test_gradients_on_inside_inference_mode() -> None:
    kept: list[int] = []

    def infer() -> None:
        model = nn.Sequential(Block(64), Block(64)).cuda()
        x = torch.randn(4096, 64, device="cuda")
        with torch.inference_mode():
            model(x)
            before = torch.cuda.memory_allocated()
            result = model(x)
            kept.append(torch.cuda.memory_allocated() - before)
            del result

    run(infer)
    run(infer, InterventionRequest("forward-grad", ("on",)))
    assert kept == [4 * 4096 * 64, 4 * 4 * 4096 * 64]


# -- the frame ---------------------------------------------------------------------------------


def test_a_survey_changes_nothing() -> None:
    train = training(lambda: nn.Sequential(Block(64), nn.ReLU(), Block(64)), shape=(16, 64))
    plain, survey = run(train), run(train, survey=True)
    assert plain.recording.events.tolist() == survey.recording.events.tolist()
    assert plain.recording.alloc_bytes.tolist() == survey.recording.alloc_bytes.tolist()


def test_everything_of_pytorch_is_put_back() -> None:
    def state() -> list[Any]:
        hooks = torch.nn.modules.module
        return [
            torch.optim.Optimizer.__init__,
            torch.optim.Optimizer.zero_grad,
            nn.Module.zero_grad,
            nn.MultiheadAttention.forward,
            torch.autograd.backward,
            torch.nn.utils.clip_grad_norm_,
            torch.utils.checkpoint.checkpoint,
            len(hooks._global_forward_hooks),
            len(hooks._global_forward_pre_hooks),
        ]

    before = state()
    run(training(square), survey=True)
    run(training(square), "attention-weights", "set-to-none")
    assert state() == before


def test_several_at_once() -> None:
    def make() -> nn.Module:
        return nn.Sequential(*(Block(WIDTH) for _ in range(3)))

    before = run(training(make), survey=True)
    requests = [
        InterventionRequest("checkpoint", before.findings["checkpoint"].targets),
        InterventionRequest("sgd"),
        InterventionRequest("accumulate", ("2",)),
    ]
    after: Run = run(training(make), *requests)
    assert all(after.changed.values())
    assert after.recording.steps == 1
    assert after.live("optimizer_state") == 0


def test_an_unknown_intervention_is_refused() -> None:
    with pytest.raises(ValueError, match="unknown intervention 'magic'"):
        run(training(square), "magic")


def test_a_model_is_found_by_its_body_before_its_head_is_made() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.LazyLinear(2))
    assert models_of(model[0].parameters()) == [model]


def test_work_of_a_step() -> None:
    compute = run(training(square, torch.optim.SGD, shape=(16, WIDTH))).compute
    assert compute is not None
    # The product, and the one for the weight's gradient; the input needs none.
    assert compute.flops == 2 * 2 * 16 * WIDTH * WIDTH
    assert compute.traffic_bytes >= 3 * P
