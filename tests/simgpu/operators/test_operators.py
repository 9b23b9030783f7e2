"""Training constructs and single operators on the simulated device."""

from __future__ import annotations

import copy
import functools
import gc
import inspect
import math
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils import checkpoint as checkpointing

import trainfit
from helpers_cases import slow_but
from trainfit.simgpu.device.errors import UnsupportedOperatorError
from trainfit.simgpu.operators.overrides import WHOLE_ON_CUDA
from trainfit.simgpu.session import Simulation


def mlp(width: int = 64) -> nn.Sequential:
    return nn.Sequential(nn.Linear(width, width), nn.ReLU(), nn.Linear(width, width)).cuda()


def random(*shape: int, **kwargs: Any) -> torch.Tensor:
    return torch.randn(*shape, device="cuda", **kwargs)


def operators(sim: Simulation) -> list[str]:
    recording = sim.recording
    return [recording.strings[name] for name in recording.op_name.tolist()]


def assumptions(sim: Simulation) -> str:
    return "\n".join(sim.recording.header["assumptions"])


# Optimizers ---------------------------------------------------------------------------------------


def optimizer_variants() -> Iterator[tuple[str, dict[str, Any]]]:
    """Every optimizer of torch.optim, with each of its implementations."""
    for name, kind in inspect.getmembers(torch.optim, inspect.isclass):
        if name in ("Optimizer", "SparseAdam", "LBFGS"):
            continue
        options = inspect.signature(kind).parameters
        yield name, {}
        for option in ("foreach", "fused", "capturable", "amsgrad", "centered"):
            if option in options:
                yield name, {option: True}
        if "foreach" in options:
            yield name, {"foreach": False}
        if "momentum" in options and name != "Muon":
            yield name, {"momentum": 0.9}


@pytest.mark.parametrize(
    ("name", "options"),
    slow_but(
        optimizer_variants(),
        *(each for each in optimizer_variants() if not each[1] or each[0] in ("Adam", "SGD")),
    ),
    ids=[f"{name}-{'-'.join(options) or 'plain'}" for name, options in optimizer_variants()],
)
def test_every_optimizer_steps(sim: Simulation, name: str, options: dict[str, Any]) -> None:
    model = mlp()
    weights = [p for p in model.parameters() if name != "Muon" or p.dim() == 2]
    optimizer = getattr(torch.optim, name)(weights, lr=0.1, **options)
    for _ in range(2):
        optimizer.zero_grad()
        model(random(8, 64)).sum().backward()
        try:
            optimizer.step()
        except RuntimeError as error:
            assert "requires all the params to be floating point" in str(error)
            pytest.skip("this PyTorch has no CUDA kernel for it")
    assert sim.steps == 2
    states = [v for state in optimizer.state.values() for v in state.values()]
    assert all(v.is_cuda for v in states if isinstance(v, torch.Tensor) and v.dim())


def test_lbfgs_steps(sim: Simulation) -> None:
    model, x = mlp(), random(8, 64)
    optimizer = torch.optim.LBFGS(model.parameters())

    def closure() -> torch.Tensor:
        optimizer.zero_grad()
        loss = model(x).sum()
        loss.backward()
        return loss

    optimizer.step(closure)
    assert sim.steps == 1


def test_adam_takes_foreach_as_on_a_gpu(sim: Simulation) -> None:
    model = mlp()
    optimizer = torch.optim.Adam(model.parameters())
    model(random(8, 64)).sum().backward()
    optimizer.step()
    assert any("_foreach_" in name for name in operators(sim))


def test_steady_state_does_not_grow(sim: Simulation) -> None:
    model, x = mlp(), random(4, 64)
    optimizer = torch.optim.Adam(model.parameters())
    held = []
    for _ in range(4):
        optimizer.zero_grad()
        model(x).sum().backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        held.append(torch.cuda.memory_allocated())
    assert held[1] == held[2] == held[3]


def test_optimizer_in_backward(sim: Simulation) -> None:
    model = mlp()
    for parameter in model.parameters():
        optimizer = torch.optim.SGD([parameter], lr=0.1)

        def step(_: torch.Tensor, optimizer: torch.optim.Optimizer = optimizer) -> None:
            optimizer.step()
            optimizer.zero_grad()

        parameter.register_post_accumulate_grad_hook(step)
    for _ in range(2):
        model(random(2, 64)).sum().backward()
    assert all(parameter.grad is None for parameter in model.parameters())


# Autograd -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("reentrant", [True, False])
def test_activation_checkpointing(sim: Simulation, reentrant: bool) -> None:
    """What is called again in the backward pass may name the device, too."""

    def block(x: torch.Tensor) -> torch.Tensor:
        return model(x) * torch.ones(1, device="cuda") + torch.zeros(64).cuda()

    model, x = mlp(), random(8, 64, requires_grad=True)
    checkpointing.checkpoint(block, x, use_reentrant=reentrant).sum().backward()
    assert model[0].weight.grad.is_cuda
    assert operators(sim).count("aten.addmm.default") == 4, "two layers, forward twice"
    checkpointing.checkpoint_sequential(model, 2, x, use_reentrant=reentrant).sum().backward()


def test_checkpointing_saves_memory() -> None:
    def peak(checkpointed: bool) -> int:
        with trainfit.simulate("RTX 4090"):
            blocks = nn.ModuleList(mlp() for _ in range(8))
            # Far more than the libraries' workspaces, which older versions of PyTorch share less.
            x = random(1 << 16, 64)
            for block in blocks:
                x = (
                    checkpointing.checkpoint(block, x, use_reentrant=False)
                    if checkpointed
                    else block(x)
                )
            x.sum().backward()
            return torch.cuda.max_memory_allocated()

    assert peak(True) < 0.7 * peak(False)


def test_selective_checkpointing(sim: Simulation) -> None:
    def policy(_: Any, op: Any, *args: Any, **kwargs: Any) -> Any:
        kinds = checkpointing.CheckpointPolicy
        keep = op is torch.ops.aten.addmm.default
        return kinds.MUST_SAVE if keep else kinds.PREFER_RECOMPUTE

    contexts = functools.partial(checkpointing.create_selective_checkpoint_contexts, policy)
    model = mlp()
    out = checkpointing.checkpoint(model, random(8, 64), use_reentrant=False, context_fn=contexts)
    out.sum().backward()
    assert operators(sim).count("aten.addmm.default") == 2


def test_gradients_accumulate_in_place(sim: Simulation) -> None:
    model, x = mlp(), random(8, 64)
    model(x).mean().backward()
    gradients = [parameter.grad for parameter in model.parameters()]
    before = torch.cuda.memory_allocated()
    model(x).mean().backward()
    assert all(p.grad is g for p, g in zip(model.parameters(), gradients, strict=True))
    assert torch.cuda.memory_allocated() == before


def test_custom_functions_and_hooks(sim: Simulation) -> None:
    class Scale(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
            ctx.save_for_backward(x)
            return x.sigmoid()

        @staticmethod
        def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
            (x,) = ctx.saved_tensors
            assert x.is_cuda
            assert grad.is_cuda
            return grad * x * torch.ones(1, device="cuda")

    model, seen = mlp(), []
    model[0].register_forward_hook(lambda *args: seen.append("forward"))
    model[0].register_full_backward_hook(lambda *args: seen.append("backward"))
    model[0].weight.register_hook(lambda grad: grad * 2)
    Scale.apply(model(random(2, 64))).sum().backward()
    assert seen == ["forward", "backward"]


def test_double_backward(sim: Simulation) -> None:
    for model, x in (
        (nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 1)), random(3, 4)),
        (nn.Conv2d(3, 1, 3), random(1, 3, 5, 5)),
    ):
        model.cuda()
        x.requires_grad_()
        (grad,) = torch.autograd.grad(model(x).sum(), x, create_graph=True)
        (grad.norm() - 1).pow(2).backward()
        assert next(model.parameters()).grad.is_cuda


def test_function_transforms(sim: Simulation) -> None:
    model = mlp()
    parameters = {name: p.detach() for name, p in model.named_parameters()}

    def loss(parameters: Any, x: torch.Tensor) -> torch.Tensor:
        return torch.func.functional_call(model, parameters, (x[None],)).sum()

    grads = torch.func.vmap(torch.func.grad(loss), (None, 0))(parameters, random(5, 64))
    assert grads["0.weight"].shape == (5, 64, 64)


@pytest.mark.parametrize("pinned", [False, True])
def test_saved_tensors_on_the_host(sim: Simulation, pinned: bool) -> None:
    model = mlp()
    with torch.autograd.graph.save_on_cpu(pin_memory=pinned):
        loss = model(random(2, 64)).sum()
    loss.backward()
    assert model[0].weight.grad.is_cuda


def test_anomaly_detection(sim: Simulation) -> None:
    model = mlp()
    with torch.autograd.set_detect_anomaly(True):
        model(random(2, 64)).sum().backward()
    assert all(parameter.grad is not None for parameter in model.parameters())


def test_inference_mode_takes_the_memory_of_no_grad() -> None:
    """Composite operators arrive whole there; their parts are what a GPU runs."""

    def peaks(context: Any) -> list[int]:
        with trainfit.simulate("RTX 4090"):
            convolutions = nn.Sequential(
                nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten()
            )
            model = nn.Sequential(
                convolutions, nn.Linear(1800, 32), nn.LayerNorm(32), nn.Dropout()
            ).cuda()
            x = random(2, 3, 32, 32)
            labels = torch.zeros(2, dtype=torch.long, device="cuda")
            taken = []
            for training in (True, False):
                model.train(training)
                with context():
                    y = model(x)
                    F.cross_entropy(F.gelu(y), labels)
                    y.transpose(0, 1).reshape(-1)
                    torch.einsum("ij,kj->ik", y, y)
                    F.scaled_dot_product_attention(*[random(2, 4, 8, 16)] * 3)
                    y.half()
                    del y
                    gc.collect()
                taken += [torch.cuda.max_memory_allocated(), torch.cuda.memory_allocated()]
            return taken

    assert peaks(torch.inference_mode) == peaks(torch.no_grad)


# Modules ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", [nn.LSTM, nn.GRU, nn.RNN])
@pytest.mark.parametrize("options", [{}, {"num_layers": 2, "bidirectional": True, "dropout": 0.1}])
def test_recurrent_networks(sim: Simulation, kind: type, options: dict[str, Any]) -> None:
    model = kind(8, 16, **options).cuda()
    out, _ = model(random(5, 3, 8))
    assert out.shape == (5, 3, 16 * (1 + options.get("bidirectional", False)))
    out.sum().backward()
    assert model.weight_ih_l0.grad.shape == model.weight_ih_l0.shape
    torch.optim.Adam(model.parameters()).step()
    weights = sum(p.nbytes for p in model.parameters())
    first = min(p.data_ptr() for p in model.parameters())
    last = max(p.data_ptr() + p.nbytes for p in model.parameters())
    assert last - first == weights, "cuDNN wants the weights in one buffer"


def test_packed_sequences(sim: Simulation) -> None:
    model = nn.LSTM(8, 16).cuda()
    lengths = torch.tensor([2, 5, 3])
    packed = nn.utils.rnn.pack_padded_sequence(random(5, 3, 8), lengths, enforce_sorted=False)
    out, sizes = nn.utils.rnn.pad_packed_sequence(model(packed)[0])
    assert out.shape == (5, 3, 16)
    assert sizes.tolist() == [2, 5, 3]
    out.sum().backward()


def test_transformers_in_training_and_evaluation(sim: Simulation) -> None:
    x = random(2, 5, 32)
    mask = torch.tensor([[False] * 5, [False] * 3 + [True] * 2]).cuda()
    model = nn.Transformer(32, 4, 2, 2, 64, batch_first=True).cuda()
    causal = nn.Transformer.generate_square_subsequent_mask(5, device="cuda")
    model(x, x, tgt_mask=causal).sum().backward()
    layer = nn.TransformerEncoderLayer(32, 4, 64, batch_first=True)
    encoder = nn.TransformerEncoder(layer, 2).cuda()
    encoder(x, src_key_padding_mask=mask).sum().backward()
    for module in (model, encoder):
        module.eval()
    for context in (torch.no_grad, torch.inference_mode):
        with context():
            assert model(x, x).shape == x.shape
            assert encoder(x, src_key_padding_mask=mask).shape == x.shape


def test_embeddings(sim: Simulation) -> None:
    tokens = torch.randint(0, 10, (3, 4), device="cuda")
    nn.Embedding(10, 4, padding_idx=0, max_norm=1.0).cuda()(tokens).sum().backward()
    for mode in ("sum", "mean", "max"):
        nn.EmbeddingBag(10, 4, mode=mode).cuda()(tokens).sum().backward()
    bag = nn.EmbeddingBag(10, 4).cuda()
    starts = torch.tensor([0, 3], device="cuda")
    assert bag(torch.arange(6, device="cuda"), starts).shape == (2, 4)


def test_channels_last(sim: Simulation) -> None:
    """As with cuDNN, input or weight in that format is enough for the results to have it."""
    for weights, inputs in ((True, True), (True, False), (False, True)):
        model = nn.Conv2d(4, 8, 3).cuda()
        x = random(2, 4, 16, 16, requires_grad=True)
        if weights:
            model.to(memory_format=torch.channels_last)
        x = x.contiguous(memory_format=torch.channels_last) if inputs else x
        y = model(x)
        assert y.is_contiguous(memory_format=torch.channels_last)
        y.sum().backward()
        wanted = torch.channels_last if weights else torch.contiguous_format
        assert model.weight.grad.is_contiguous(memory_format=wanted)


def test_parametrizations_move_with_their_module(sim: Simulation) -> None:
    kinds = nn.utils.parametrizations
    legacy: list[Callable[[nn.Module], nn.Module]] = [
        nn.utils.weight_norm,
        nn.utils.spectral_norm,
    ]
    for wrap in (kinds.weight_norm, kinds.spectral_norm, kinds.orthogonal, *legacy):
        for model in (wrap(nn.Linear(8, 8)).cuda(), wrap(nn.Linear(8, 8).cuda())):
            optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
            model(random(2, 8)).sum().backward()
            optimizer.step()
            assert all(p.is_cuda and p.grad is not None for p in model.parameters())


def test_data_parallel_on_one_gpu(sim: Simulation) -> None:
    model = nn.DataParallel(mlp())
    for x in (random(4, 64), torch.randn(4, 64)):
        assert model(x).is_cuda
    model(random(4, 64)).sum().backward()


def test_torch_compile_is_left_out_and_said(sim: Simulation) -> None:
    model = torch.compile(mlp(), mode="max-autotune")

    @torch.compile
    def double(x: torch.Tensor) -> torch.Tensor:
        return x * 2

    double(model(random(2, 64))).sum().backward()
    assert "torch.compile was skipped" in assumptions(sim)


def test_a_compiled_model_is_what_scripts_know_of_it(sim: Simulation) -> None:
    plain = mlp()
    plain.note = "mine"
    model = torch.compile(plain)
    assert model._orig_mod is plain and model.note == "mine" and model is torch.compile(model)
    assert [*model.state_dict()] == [f"_orig_mod.{name}" for name in plain.state_dict()]
    assert isinstance(model, torch._dynamo.OptimizedModule) and not isinstance(model, nn.Sequential)
    with pytest.raises(RuntimeError, match=r"_orig_mod\."):
        mlp().load_state_dict(model.state_dict())
    model.eval()
    assert not plain.training and not model.training
    model.note = "theirs"
    assert plain.note == "theirs"
    copied = copy.deepcopy(model)
    assert copied._orig_mod is not plain and copied(random(2, 64)).is_cuda
    calls: list[int] = []
    model.register_forward_hook(lambda *_: calls.append(1))
    wrapped = nn.Sequential(model)
    wrapped(random(2, 64)).sum().backward()
    assert calls == [1]
    assert not any("_orig_mod" in each for each in sim.recording.strings)


def test_many_layers_run_forward_and_backward(sim: Simulation) -> None:
    x = random(2, 8, 16, 16, requires_grad=True)
    layers = (
        nn.ConvTranspose2d(8, 4, 2, 2), nn.Conv2d(8, 8, 3, groups=8), nn.GroupNorm(2, 8),
        nn.InstanceNorm2d(8, affine=True, track_running_stats=True), nn.BatchNorm2d(8),
        nn.AvgPool2d(2), nn.AdaptiveAvgPool2d(3), nn.AdaptiveMaxPool2d(2), nn.PixelShuffle(2),
        nn.Upsample(scale_factor=2, mode="bilinear"), nn.Upsample(scale_factor=2, mode="bicubic"),
        nn.ReflectionPad2d(1), nn.Dropout2d(), nn.GELU(), nn.SiLU(), nn.Mish(), nn.Hardswish(),
        nn.PReLU(), nn.Softmax(1), nn.GLU(1), nn.RMSNorm(16), nn.LocalResponseNorm(2),
        nn.Unfold(3), nn.FractionalMaxPool2d(2, output_size=4), nn.LPPool2d(2, 2),
    )  # fmt: skip
    for layer in layers:
        layer.cuda()
        layer(x).sum().backward()
        with torch.autocast("cuda", dtype=torch.bfloat16):
            layer(x).float().sum().backward()
        with torch.inference_mode():
            layer.eval()(x)
    assert x.grad.shape == x.shape


def test_complex_numbers_and_spectra(sim: Simulation) -> None:
    x = random(4, 16, requires_grad=True)
    spectrum = torch.fft.rfft(x)
    assert spectrum.dtype is torch.complex64
    (spectrum.abs().sum() + torch.view_as_real(spectrum.conj() * spectrum).sum()).backward()
    window = torch.hann_window(64, device="cuda")
    waves = torch.stft(random(2, 400), 64, window=window, return_complex=True)
    assert torch.istft(waves, 64, window=window).shape == (2, 400)


def test_losses(sim: Simulation) -> None:
    x, y = random(4, 10, requires_grad=True), torch.randint(0, 10, (4,), device="cuda")
    F.cross_entropy(x, y, label_smoothing=0.1, weight=torch.ones(10, device="cuda")).backward()
    F.multi_margin_loss(x, y).backward()
    F.binary_cross_entropy_with_logits(x, torch.rand(4, 10, device="cuda")).backward()
    scores = random(50, 4, 20).log_softmax(2).requires_grad_()
    labels = torch.randint(1, 20, (4, 10), device="cuda")
    for lengths in (torch.full((4,), 50), torch.full((4,), 50).cuda()):
        F.ctc_loss(scores, labels, lengths, lengths // 5).backward()
    assert x.grad is not None and x.grad.shape == x.shape
    assert scores.grad is not None and scores.grad.shape == scores.shape


def test_distributions_take_their_arguments_as_good(sim: Simulation) -> None:
    mean = random(3, 4)
    normal = torch.distributions.Normal(mean, mean.exp())
    normal.log_prob(normal.rsample())
    torch.distributions.Categorical(logits=mean).sample()
    torch.distributions.Dirichlet(torch.ones(3, device="cuda")).rsample()
    assert not sim.recording.header["assumptions"]


def test_results_are_written_to_out(sim: Simulation) -> None:
    a, empty = random(3, 3), torch.empty(0, device="cuda")
    torch.mm(a, a, out=torch.empty(3, 3, device="cuda"))
    torch.cat([a, a], out=empty)
    assert empty.shape == (6, 3)
    assert empty.untyped_storage().nbytes() == 72


def test_methods_that_change_geometry(sim: Simulation) -> None:
    a = random(4, 3)
    a.t_()
    a.unsqueeze_(0)
    assert a.shape == (1, 3, 4)
    a.resize_(2, 2)
    a.set_(random(5))
    assert a.shape == (5,)
    assert a.new_tensor([1, 2]).is_cuda
    assert a.new(3).shape == (3,)


# Values -------------------------------------------------------------------------------------------


def test_small_integers_from_the_host_keep_their_values(sim: Simulation) -> None:
    lengths = torch.tensor([3, 7, 2]).cuda()
    assert lengths.max().item() == 7
    assert int(lengths.sum()) == 12
    assert lengths.float().mean().item() == 4
    assert lengths.sort(descending=True)[0].tolist() == [7, 3, 2]
    assert lengths.argmax().item() == 1
    assert [x.item() for x in lengths] == [3, 7, 2]
    assert lengths[1:].tolist() == [7, 2]
    assert lengths.view(3, 1).expand(3, 2).tolist() == [[3, 3], [7, 7], [2, 2]]
    assert torch.equal(lengths, lengths.clone())
    assert not bool((lengths > 2).all())
    assert torch.arange(int(lengths.max()), device="cuda").shape == (7,)
    assert not sim.recording.header["assumptions"]


def test_values_follow_writes(sim: Simulation) -> None:
    a = torch.tensor([3, 7, 2]).cuda()
    a[0] = 9
    a += 1
    assert a.tolist() == [10, 8, 3]
    a.fill_(4)
    assert a.tolist() == [4, 4, 4]
    b = torch.zeros(3, dtype=torch.long, device="cuda")
    b[torch.tensor([True, False, True]).cuda()] = 5
    b.scatter_(0, torch.tensor([1]).cuda(), 7)
    assert b.tolist() == [5, 7, 5]
    assert torch.cat([a, b]).tolist() == [4, 4, 4, 5, 7, 5]
    b.copy_(torch.randint(0, 9, (3,), device="cuda"))
    sim.engine.values.read(b) is None or pytest.fail("random numbers are unknown")


def test_shapes_that_depend_on_known_data_are_exact(sim: Simulation) -> None:
    mask, lengths = torch.tensor([True, False, True]).cuda(), torch.tensor([3, 7, 2]).cuda()
    x = random(3, 4)
    assert mask.nonzero().shape == (2, 1)
    assert x[mask].shape == (2, 4)
    assert torch.masked_select(x[:, 0], mask).shape == (2,)
    assert torch.unique(torch.tensor([1, 1, 2]).cuda()).tolist() == [1, 2]
    valid = torch.arange(7, device="cuda")[None] < lengths[:, None]
    assert random(3, 7)[valid].shape == (12,)
    assert torch.where(valid)[0].shape == (12,)
    assert torch.repeat_interleave(lengths).shape == (12,)
    assert x.repeat_interleave(lengths, 0).shape == (12, 4)
    assert torch.bincount(lengths).shape == (8,)
    assert F.one_hot(lengths).shape == (3, 8)
    assert not sim.recording.header["assumptions"]


def test_of_places_no_more_differ_than_there_are(sim: Simulation) -> None:
    """torchmetrics refuses predictions of more classes than it was told of."""
    scores = random(64, 5)
    for predicted in (
        scores.argmax(1),
        scores.max(1).indices.view(8, 8).clone(),
        torch.cat([scores.argmax(-1), scores.argmin(1)]).to(torch.int32).flatten()[4:],
    ):
        assert torch.unique(predicted, dim=None).numel() == 5
    assert torch.unique(scores > 0).numel() == 2
    assert torch.unique(scores.argmax()).numel() == 1
    assert torch.unique(scores[:, 0]).numel() == 64
    places = scores.argmax(1)
    places += random(64).long()
    assert torch.unique(places).numel() == 64


@pytest.mark.parametrize(
    ("decide", "answer"),
    [
        (lambda known, unknown: known | unknown, True),
        (lambda known, unknown: unknown | known, True),
        (lambda known, unknown: torch.logical_or(known, unknown), True),
        (lambda known, unknown: ~known & unknown, False),
        (lambda known, unknown: torch.logical_and(unknown, ~known), False),
        (lambda known, unknown: unknown.long() * (1 - known.long()), False),
    ],
)
def test_one_known_operand_decides(decide: Any, answer: bool) -> None:
    """Generation that has reached its length is over, whichever tokens were drawn."""
    with trainfit.simulate("RTX 3090") as sim:
        known = torch.full((4,), True, device="cuda")
        decided = decide(known, torch.randn(4, device="cuda") > 0)
        assert decided.bool().any().item() is answer
        assert decided.bool().all().item() is answer
    assert not sim.recording.header["assumptions"]


def test_one_operand_of_two_does_not_decide_for_floats_or_the_other_way() -> None:
    with trainfit.simulate("RTX 3090") as sim:
        unknown = torch.randn(4, device="cuda")
        bool((unknown * torch.zeros(4, device="cuda")).any())  # infinity times nought
        bool(((unknown > 0) & torch.full((4,), True, device="cuda")).any())
    assert len(sim.recording.header["assumptions"]) > 0


def test_a_write_by_an_unknown_mask_keeps_what_is_known() -> None:
    """Answers without an end-of-sequence token are as long as they can be (trl's GRPO)."""
    with trainfit.simulate("RTX 3090") as sim:
        is_end = torch.randint(100, (4, 12), device="cuda") == 5
        end = torch.full((4,), 12, device="cuda")
        end[is_end.any(dim=1)] = is_end.int().argmax(dim=1)[is_end.any(dim=1)]
        mask = torch.arange(12, device="cuda").expand(4, -1) <= end.unsqueeze(1)
        assert mask.cpu().sum().item() == 4 * 12
        end[torch.full((4,), True, device="cuda")] = is_end.sum(1)  # all of it, by what is unknown
        assert end.cpu().tolist() == [0] * 4  # unknown data read on the host
    assert any("writing by an unknown mask" in each for each in sim.recording.header["assumptions"])


def test_generation_ends_at_its_length() -> None:
    """As Transformers does it: a flag for each sequence, read on the host after each token."""
    with trainfit.simulate("RTX 3090"):
        unfinished = torch.ones(4, dtype=torch.long, device="cuda")
        length, over = 0, False
        while not over and length < 50:
            length += 1
            is_done = torch.full((4,), length >= 12, device="cuda")
            token = torch.randint(100, (4,), device="cuda")
            is_done = is_done | torch.isin(token, torch.tensor([5], device="cuda"))
            unfinished = unfinished & ~is_done
            over = bool(unfinished.max() == 0)
    assert length == 12


@pytest.mark.parametrize(
    ("use", "text"),
    [
        (lambda x: x[x > 0], "indexing by an unknown mask was assumed to select all 20"),
        (lambda x: (x > 0).nonzero(), "nonzero() of unknown data"),
        (lambda x: torch.masked_select(x, x > 0), "masked_select() by an unknown mask"),
        (lambda x: torch.unique(x), "unique() of unknown data"),
        (lambda x: bool((x > 0).any()), "a condition on GPU data was assumed to be False"),
        (lambda x: x.argmax().item(), "an integer read from GPU data was assumed to be 1"),
        (lambda x: torch.bincount(x.argmax(1)), "bincount() of unknown data"),
        (lambda x: torch.equal(x, x + 1), "two GPU tensors were assumed to be equal"),
        (lambda x: torch.allclose(x, x + 1), "two GPU tensors were assumed to be close"),
    ],
)
def test_what_depends_on_unknown_data_states_its_assumption(
    sim: Simulation, use: Callable[[torch.Tensor], Any], text: str
) -> None:
    use(random(5, 4))
    assert text in assumptions(sim)
    assert Path(__file__).name in assumptions(sim), "with the place in the user's code"


def test_numbers_are_taken_as_healthy(sim: Simulation) -> None:
    """Scripts stop, or skip a step, when the loss is not finite."""
    loss = random(3).sum()
    assert not torch.isnan(loss)
    assert torch.isfinite(loss)
    assert not (torch.isnan(loss) | torch.isinf(loss)).any()
    assert torch.isfinite(torch.stack([loss, loss])).all().item()
    assert not (loss != loss)  # noqa: SIM202
    assert torch.isnan(random(9)).sum().item() == 0
    assert math.isfinite(loss.item())
    nn.utils.clip_grad_norm_([nn.Parameter(random(3))], 1.0, error_if_nonfinite=True)
    assert not sim.recording.header["assumptions"]


# What cannot be simulated -------------------------------------------------------------------------


def test_an_operator_without_a_shape_function_is_named(sim: Simulation) -> None:
    library = torch.library.Library("trainfit_tests", "FRAGMENT")
    library.define("unknown(Tensor x) -> Tensor")
    unknown = torch.ops.trainfit_tests.unknown
    with pytest.raises(UnsupportedOperatorError) as caught:
        unknown(random(3))
    message = str(caught.value)
    assert "trainfit_tests.unknown" in message
    assert 'register_fake("trainfit_tests::unknown")' in message
    line = inspect.currentframe().f_lineno  # type: ignore[union-attr]
    assert caught.value.location == f"{__file__}:{line - 4}"


def test_an_operator_written_in_python_is_run(sim: Simulation) -> None:
    @torch.library.custom_op("trainfit_tests::spread", mutates_args=("out",))
    def spread(x: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
        wide = torch.zeros(x.shape[0], 1024, device="cuda") + x[:, None]
        out.copy_(wide.sum(1))
        return wide[:, :2].clone()

    x, out = random(512), random(512)
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    y = spread(x, out)
    assert y.shape == (512, 2) and y.is_cuda
    assert torch.cuda.memory_allocated() == before + 4096
    # The zeros, and the sum with them.
    assert torch.cuda.max_memory_allocated() == before + 2 * 512 * 1024 * 4


def test_a_registered_fake_kernel_is_enough(sim: Simulation) -> None:
    @torch.library.custom_op("trainfit_tests::half_as_many", mutates_args=())
    def half_as_many(x: torch.Tensor) -> torch.Tensor:
        return x[::2].clone()

    @half_as_many.register_fake
    def _(x: torch.Tensor) -> torch.Tensor:
        return x.new_empty(x.shape[0] // 2)

    half_as_many.register_autograd(lambda ctx, grad: grad.repeat_interleave(2))
    x = random(512, requires_grad=True)
    before = torch.cuda.memory_allocated()
    y = torch.ops.trainfit_tests.half_as_many(x)
    assert y.is_cuda
    assert torch.cuda.memory_allocated() == before + 1024
    y.sum().backward()
    assert x.grad.shape == (512,)


# Kernels that only CUDA has -----------------------------------------------------------------------


def test_operators_with_a_kernel_of_their_own_on_cuda() -> None:
    """The dispatcher of a CPU build takes these apart; the simulation registers them whole."""
    yaml = pytest.importorskip("yaml")
    torchgen = pytest.importorskip("torchgen")
    source = Path(torchgen.__file__).parent / "packaged/ATen/native/native_functions.yaml"
    loader = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
    functions = yaml.load(source.read_text(), loader)
    delegates = {entry["func"].partition("(")[0]: entry for entry in functions}
    found = set()
    for entry in functions:
        delegate = delegates.get(entry.get("structured_delegate", ""), {})
        own, delegated = (
            {key.strip() for keys in each.get("dispatch", {}) for key in keys.split(",")}
            for each in (entry, delegate)
        )
        if "CompositeImplicitAutograd" in own and "CUDA" in own | delegated:
            found.add(entry["func"].partition("(")[0].partition(".")[0])
    installed = {name for name in WHOLE_ON_CUDA if hasattr(torch.ops.aten, name)}
    assert installed == {name for name in found if hasattr(torch.ops.aten, name)}


@pytest.mark.parametrize("layer", [nn.SiLU, nn.Mish])
def test_backward_kernels_arrive_whole(sim: Simulation, layer: type[nn.Module]) -> None:
    x = random(1000, requires_grad=True)
    y = layer()(x).sum()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    y.backward()
    name = f"aten.{layer.__name__.lower()}_backward.default"
    assert name in operators(sim)
    assert torch.cuda.max_memory_allocated() <= before + 4096 + 512


def test_compiled_callables_that_nobody_calls_are_no_news(sim: Simulation) -> None:
    torch.compile(mlp())
    unused = torch.compile(mlp().cpu())

    @torch.compile(dynamic=True)
    def of_a_library(x: torch.Tensor) -> torch.Tensor:
        return x + 1

    of_a_library(torch.zeros(2))
    unused(torch.zeros(2, 64))
    mlp()(random(2, 64)).sum().backward()
    assert "torch.compile" not in assumptions(sim)


def test_random_integers_go_when_they_are_let_go(sim: Simulation) -> None:
    """As the time steps of a diffusion model, drawn for each batch."""
    before = torch.cuda.memory_allocated()
    drawn = torch.randint(0, 1000, (32,), device="cuda")
    assert torch.cuda.memory_allocated() > before
    del drawn
    assert torch.cuda.memory_allocated() == before


def test_healthy_matrices_are_factored(sim: Simulation) -> None:
    """gpytorch asks whether it worked, and adds to the diagonal until it does or gives up."""

    def safe(matrix: torch.Tensor, make: Any) -> Any:
        *found, failed = make(matrix)
        if not torch.any(failed):  # a branch that leaves early
            return found
        raise ValueError("not positive definite")

    spread = torch.randn(3, 8, 8, device="cuda")
    matrix = spread @ spread.mT + torch.eye(8, device="cuda")
    linalg = torch.linalg
    for make in (linalg.cholesky_ex, linalg.inv_ex, linalg.lu_factor_ex, linalg.ldl_factor_ex):
        assert safe(matrix, make)[0].shape == (3, 8, 8)


def test_both_ends_of_a_piece_that_begins_at_a_drawn_number(sim: Simulation) -> None:
    """Noise is cut so that its length is the speech's; the range may be the GPU's own, too."""
    noise = torch.randn(4, 5000, device="cuda")
    most = torch.tensor([900, 1200]).cuda().min()
    at = torch.randint(high=most, size=(1,), device="cuda")
    piece = noise[:, at : at + 100]
    assert piece.shape == (4, 100) and int(at) == 899
    assert (torch.arange(10, device="cuda") < at.clamp(max=3)).tolist() == [True] * 3 + [False] * 7


def test_compiled_callables_are_named_once_with_the_line_that_calls_them(sim: Simulation) -> None:
    model = mlp()
    model(random(2, 64))
    assert not sim.is_eager
    model.compile()

    @torch.compile
    def double(x: torch.Tensor) -> torch.Tensor:
        return x * 2

    for _ in range(3):
        double(model(random(2, 64)))
    assert sim.is_eager
    notes = sim.recording.header["assumptions"]
    assert list(notes.values()) == [1, 1]
    first, second = notes
    assert first.startswith("torch.compile was skipped: a Sequential ran in eager mode (at ")
    assert second.startswith("torch.compile was skipped: double() ran in eager mode (at ")
    assert f"({'at '}{__file__}:" in second and double.__name__ == "double"
