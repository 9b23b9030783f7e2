"""What kernels allocate in addition to their results, in bytes, with the source of each number."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.torch_version import TorchVersion

import trainfit
from helpers_cases import some_of
from trainfit.memory.affine import AffineStream
from trainfit.results.runs.recording import Recording
from trainfit.simgpu.allocator.workspaces import MODELS, workspace_bytes
from trainfit.simgpu.operators import matmul as kernels_products
from trainfit.simgpu.session import Simulation

KiB, MiB = 1 << 10, 1 << 20
AMPERE = 2 * 4 * MiB + 8 * 16 * KiB
BLACKWELL = 32 * MiB if TorchVersion(torch.__version__) >= (2, 12) else AMPERE


def random(*shape: int, **options: Any) -> torch.Tensor:
    return torch.randn(*shape, device="cuda", **options)


def taken(sim: Simulation, model: str | None = None) -> list[tuple[str, int]]:
    """Workspaces so far that take anything: model and bytes."""
    recording = sim.recording
    found = [
        (recording.strings[name], int(recording.alloc_bytes[alloc]))
        for name, alloc in zip(
            recording.workspace_model.tolist(), recording.workspace_alloc.tolist(), strict=True
        )
    ]
    return [each for each in found if each[1] and (model is None or each[0] == model)]


# -- cuBLAS --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("capability", "env", "wanted"),
    [
        ((8, 6), {}, AMPERE),
        ((7, 5), {}, AMPERE),
        ((9, 0), {}, 32 * MiB),
        ((10, 0), {}, BLACKWELL),
        ((12, 0), {}, BLACKWELL),
        ((9, 0), {"CUBLAS_WORKSPACE_CONFIG": ":4096:8"}, 32 * MiB),
        ((8, 6), {"CUBLAS_WORKSPACE_CONFIG": ":16:8"}, 128 * KiB),
        ((8, 6), {"CUBLAS_WORKSPACE_CONFIG": "rubbish"}, AMPERE),
    ],
)
def test_cublas_workspace(capability: tuple[int, int], env: dict[str, str], wanted: int) -> None:
    """CublasHandlePool.cpp: parseChosenWorkspaceSize."""
    assert kernels_products.cublas_bytes(capability, env) == wanted


def test_cublaslt_has_a_workspace_of_its_own_where_it_is_not_shared() -> None:
    """CublasHandlePool.cpp: getCUDABlasLtWorkspaceSize."""
    alone = {"TORCH_CUBLASLT_UNIFIED_WORKSPACE": "0"}
    assert kernels_products.cublaslt_bytes(alone) == MiB
    assert kernels_products.cublaslt_bytes(alone | {"CUBLASLT_WORKSPACE_SIZE": "4096"}) == 4 * MiB
    assert kernels_products.cublaslt_bytes({"TORCH_CUBLASLT_UNIFIED_WORKSPACE": "1"}) == 0


def test_each_thread_and_stream_has_a_cublas_workspace(sim: Simulation) -> None:
    weight = random(64, 64, requires_grad=True)
    (random(8, 64) @ weight).sum()
    assert taken(sim) == [("cublas_workspace", AMPERE)]
    with torch.cuda.stream(torch.cuda.Stream()):
        random(8, 64) @ weight.detach()
    assert len(taken(sim, "cublas_workspace")) == 2
    (random(8, 64) @ weight).relu().sum().backward()  # autograd's thread
    assert len(taken(sim, "cublas_workspace")) == 3
    (random(8, 64) @ weight).relu().sum().backward()
    assert len(taken(sim, "cublas_workspace")) == 3, "kept"


@pytest.mark.parametrize(
    ("operand", "copied"),
    [
        (lambda: random(32, 16), False),
        (lambda: random(16, 32).t(), False),  # column-major
        (lambda: random(32, 64)[:, :16], False),  # rows apart
        (lambda: random(32, 1).expand(32, 16), True),
        (lambda: random(()).expand(32, 16), True),
        (lambda: random(32, 32)[:, ::2], True),
    ],
)
def test_products_copy_what_has_no_leading_dimension(
    sim: Simulation, operand: Any, copied: bool
) -> None:
    """Blas.cpp: prepare_matrix_for_cublas."""
    operand() @ random(16, 8)
    copies = [*taken(sim, "contiguous_copy"), *taken(sim, "reordered_copy")]
    assert [nbytes for _, nbytes in copies] == [32 * 16 * 4] * copied


# -- attention -----------------------------------------------------------------------------------


def attend(gpu: str, dtype: torch.dtype, shape: tuple[int, ...], **options: Any) -> Any:
    with trainfit.simulate(gpu) as sim:
        qkv = [random(*shape, dtype=dtype, requires_grad=True) for _ in range(3)]
        out = F.scaled_dot_product_attention(*qkv, **options)
        out.backward(torch.randn_like(out))
        return taken(sim)


def test_flash_attention() -> None:
    """flash_api.cpp: dq_accum (rows to 128, head to 32) and softmax_d, float32."""
    assert attend("RTX 4090", torch.bfloat16, (64, 8, 200, 40)) == [
        ("flash_backward", 64 * 8 * 256 * (64 + 1) * 4)
    ]


def test_flash_attention_splits_keys_where_the_gpu_would_idle() -> None:
    """num_splits_heuristic: 1 x 8 heads x 8 blocks on 2 x 128 multiprocessors, 2 key blocks."""
    found = attend("RTX 4090", torch.bfloat16, (1, 8, 512, 64))
    assert found[0] == ("flash_splits", 2 * 8 * 512 * (64 + 1) * 4)
    assert all(
        name != "flash_splits"
        for name, _ in attend("RTX 4090", torch.bfloat16, (1, 8, 512, 64), dropout_p=0.1)
    )


def test_memory_efficient_attention_in_float32_multiplies_first() -> None:
    """attention_backward.cu: kKernelComputesDelta is false for float32."""
    assert attend("RTX 4090", torch.float32, (2, 4, 100, 32)) == [
        ("efficient_delta", 2 * 4 * 100 * 32 * 4),
        ("efficient_backward", 2 * 4 * (100 + 2 * (64 * 64 + 4)) * 4),
    ]


def test_the_efficient_backward_of_vit_in_float32_is_what_an_h200_took() -> None:
    """12 heads of 64, 197 tokens: delta (75,648 bytes) and dQ's accumulators (6,297,600)."""
    shape = (8, 12, 197, 197, 64, 64, 0, 128)
    assert workspace_bytes("efficient_backward", shape) == 75_648 + 6_297_600


def test_wide_heads_are_accumulated_in_float32() -> None:
    """kernel_backward.h: workspace_elements_gk and _gv; 128 fit the A100's registers."""
    mask = {"attn_mask": None, "is_causal": False}
    turing = dict(attend("Tesla T4", torch.float16, (50, 8, 128, 128), **mask))
    accumulated = 50 * 8 * (2 * 2 * (64 * 64 + 4) + 128 * 256) * 4
    assert turing["efficient_backward"] == 50 * 8 * 128 * 4 + accumulated


# -- sorting and indexing ------------------------------------------------------------------------


def test_sorts(sim: Simulation) -> None:
    """SortStable.cu: launch_stable_sort_kernel."""
    random(8, 4096).sort()
    assert taken(sim) == []
    random(100_000).sort()  # one row: reversed indices, second buffers
    random(4, 10_000).sort()  # few rows: pairs twice, sorted keys, second buffers
    random(200, 5_000).argsort()  # many rows
    assert [nbytes for _, nbytes in taken(sim)] == [
        100_000 * (8 + 4 + 8),
        40_000 * (16 + 4 + 4 + 8),
        1_000_000 * (8 + 4 + 8),
    ]


def test_embedding_backward(sim: Simulation) -> None:
    """EmbeddingBackwardKernel.cu: partial sums of up to n / 10 + segments rows."""
    table = nn.Embedding(1000, 64).cuda()
    table(torch.zeros(2, 1500, dtype=torch.long, device="cuda")).sum().backward()
    assert taken(sim, "embedding_backward") == [], "few indices are not sorted"
    table(torch.zeros(4, 2500, dtype=torch.long, device="cuda")).relu().sum().backward()
    partial = 10_000 // 10 + 1000
    assert taken(sim, "embedding_backward") == [("embedding_backward", partial * 64 * 4)]
    assert taken(sim, "embedding_segments")[-1][1] == (3 * 10_000 + 2000 + partial) * 8
    assert taken(sim, "embedding_sort")[-1][1] == 3 * 80_000 + 162_500 + 16_895


def test_backward_of_indexing_sorts(sim: Simulation) -> None:
    """Indexing.cu: index_put_with_sort_kernel."""
    source = random(100, 8, requires_grad=True)
    places = torch.zeros(5000, dtype=torch.long, device="cuda")
    source[places].relu().sum().backward()
    assert taken(sim, "index_put") == [("index_put", 5000 * (4 * 8 + 2 * 8))]


def test_masks_become_indices(sim: Simulation) -> None:
    source, mask = random(30, 40), torch.ones(30, 40, dtype=torch.bool, device="cuda")
    source.masked_select(mask)
    assert taken(sim, "index_tensors") == [("index_tensors", 30 * 40 * 2 * 8)]
    source[mask] = 0.0
    assert len(taken(sim, "index_tensors")) == 1, "one value: masked_fill"


# -- normalisation, reductions, transforms -------------------------------------------------------


def test_kernels_that_want_contiguous_operands(sim: Simulation) -> None:
    x = random(4, 16, 10)
    nbytes = 4 * 16 * 10 * 4
    F.layer_norm(x.transpose(1, 2), (16,))
    x.transpose(1, 2).softmax(-1)
    assert taken(sim) == [("reordered_copy", nbytes)] * 2
    F.layer_norm(x, (10,))
    assert len(taken(sim)) == 2


def test_layer_norm_of_many_short_rows(sim: Simulation) -> None:
    """layer_norm_kernel.cu: blocks of 32 rows when M > 64 * 1024 and N is small."""
    x = random(80_000, 96, requires_grad=True)
    weight, bias = (torch.ones(96, device="cuda", requires_grad=True) for _ in range(2))
    F.layer_norm(x, (96,), weight, bias).relu().sum().backward()
    assert taken(sim, "layer_norm_backward") == [("layer_norm_backward", 2 * 2500 * 96 * 4)]


def test_gradient_norms_of_many_tensors(sim: Simulation) -> None:
    """ForeachReduceOp.cu: a partial norm for each chunk of 65,536 elements of the longest."""
    parameters = [random(200_000), random(10)]
    for parameter in parameters:
        parameter.grad = torch.ones_like(parameter)
    nn.utils.clip_grad_norm_(parameters, 1.0)
    assert taken(sim, "foreach_norm") == [("foreach_norm", 2 * 4 * 4)]


def test_fourier_transforms(sim: Simulation) -> None:
    x = random(4, 64)
    spectrum = torch.fft.rfft(x)
    assert taken(sim) == [("cufft", 4 * 33 * 8)]
    torch.fft.irfft(spectrum)
    assert taken(sim)[1:] == [("contiguous_copy", 4 * 33 * 8), ("cufft", 4 * 33 * 8)]


# -- recurrent networks --------------------------------------------------------------------------


def operators(sim: Simulation) -> set[str]:
    recording = sim.recording
    return {recording.strings[name] for name in recording.op_name.tolist()}


@pytest.mark.parametrize("kind", some_of([nn.LSTM, nn.GRU, nn.RNN], 1))
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"batch_first": True},
        {"num_layers": 3, "bidirectional": True, "dropout": 0.1},
        {"bias": False, "bidirectional": True, "batch_first": True},
    ],
)
@pytest.mark.parametrize("autocast", [False, True])
def test_recurrent_networks_train_on_cudnn(
    sim: Simulation, kind: Any, options: dict[str, Any], autocast: bool
) -> None:
    model = kind(32, 48, **options).cuda()
    update = torch.optim.Adam(model.parameters())
    directions = 1 + options.get("bidirectional", False)
    shape = (7, 5) if not options.get("batch_first") else (5, 7)
    with torch.autocast("cuda", torch.bfloat16, enabled=autocast):
        out, state = model(random(*shape, 32))
        assert out.shape == (*shape, 48 * directions)
        # Autocast's wrapper of cuDNN's networks knows float16 only (AutocastRNN.cpp).
        assert out.dtype is (torch.float16 if autocast else torch.float32)
        hidden = state[0] if kind is nn.LSTM else state
        assert hidden.shape == (options.get("num_layers", 1) * directions, 5, 48)
        loss = out.float().pow(2).mean()
    loss.backward()
    for parameter in model.parameters():
        assert parameter.grad is not None
        assert parameter.grad.shape == parameter.shape
        assert parameter.grad.dtype is torch.float32
    update.step()
    assert "aten._cudnn_rnn.default" in operators(sim)
    assert "aten._cudnn_rnn_backward.default" in operators(sim)
    assert len(taken(sim, "cudnn_rnn_workspace")) == 3, "forward, data, weights"
    assert len(taken(sim, "cudnn_dropout_state")) == int("dropout" in options)
    (assumption,) = sim.recording.header["assumptions"]
    assert "cuDNN's buffers" in assumption and "estimated" in assumption


def test_reserve_of_an_lstm(sim: Simulation) -> None:
    """Five vectors a step and cell, and the lower layer's outputs: kept until backward."""
    model = nn.LSTM(16, 32, num_layers=2, bidirectional=True).cuda()
    x = random(10, 4, 16)
    before = torch.cuda.memory_allocated()
    with torch.no_grad():
        out, _ = model(x)
    del out, _
    assert torch.cuda.memory_allocated() == before
    model.eval()
    evaluated, _ = model(x)
    in_evaluation = torch.cuda.memory_allocated()
    del evaluated, _
    model.train()
    trained = model(x)
    reserve = 40 * (2 * 2 * 5 * 32 + 2 * 32) * 4 + 256
    assert torch.cuda.memory_allocated() - in_evaluation == -(-reserve // 512) * 512
    del trained


def test_packed_sequences_and_projections(sim: Simulation) -> None:
    model = nn.LSTM(16, 32, num_layers=2, bidirectional=True, proj_size=8).cuda()
    lengths = torch.tensor([6, 4, 1])
    packed = nn.utils.rnn.pack_padded_sequence(random(6, 3, 16), lengths)
    out, (hidden, cell) = model(packed)
    assert out.data.shape == (11, 16)
    assert hidden.shape == (4, 3, 8)
    assert cell.shape == (4, 3, 32)
    out.data.sum().backward()
    assert model.weight_hr_l0.grad.shape == model.weight_hr_l0.shape
    assert taken(sim, "cudnn_rnn_workspace")[0][1] >= 11 * 2 * 4 * 32 * 4


def test_weights_that_are_not_flat_are_copied_in_every_call(sim: Simulation) -> None:
    model = nn.GRU(16, 32).cuda()
    x = random(3, 2, 16)
    flat = torch.cuda.memory_allocated()
    kept = model(x)
    with_flat = torch.cuda.memory_allocated() - flat
    del kept
    model.weight_hh_l0.data = model.weight_hh_l0.data.clone()
    flat = torch.cuda.memory_allocated()
    with pytest.warns(UserWarning, match="not part of single contiguous chunk"):
        kept = model(x)
    weights = sum(parameter.nbytes for parameter in model.parameters())
    assert torch.cuda.memory_allocated() - flat == with_flat + -(-weights // 512) * 512
    del kept
    model.flatten_parameters()
    flat = torch.cuda.memory_allocated()
    kept = model(x)
    assert torch.cuda.memory_allocated() - flat == with_flat
    del kept


def test_a_disabled_cudnn_is_not_used(sim: Simulation) -> None:
    model = nn.LSTM(8, 8).cuda()
    with torch.backends.cudnn.flags(enabled=False):
        model(random(3, 2, 8))[0].sum().backward()
    assert "aten._cudnn_rnn.default" not in operators(sim)


# -- other batch sizes ---------------------------------------------------------------------------


class Tagger(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(5000, 48)
        self.lstm = nn.LSTM(48, 32, 2, batch_first=True, bidirectional=True, dropout=0.2)
        self.tags = nn.Linear(64, 9)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden, _ = self.lstm(self.words(x))
        attended = F.scaled_dot_product_attention(
            *(hidden.unflatten(2, (2, 32)).transpose(1, 2),) * 3
        )
        return self.tags(attended.transpose(1, 2).flatten(2).softmax(-1).sort(-1)[0])


def tag(batch: int, autocast: bool) -> Recording:
    with trainfit.simulate("RTX 4090") as sim:
        model = Tagger().cuda()
        update = torch.optim.AdamW(model.parameters())
        for _ in range(2):
            x = torch.randint(0, 5000, (batch, 700)).cuda()
            y = torch.randint(0, 9, (batch, 700)).cuda()
            with torch.autocast("cuda", torch.float16, enabled=autocast):
                loss = F.cross_entropy(model(x).transpose(1, 2), y)
            loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            update.step()
            update.zero_grad()
    return sim.recording


@pytest.mark.parametrize("autocast", [False, True])
def test_two_recordings_give_the_third(autocast: bool) -> None:
    """Every size of a recurrent network's step is known at a batch that was never run."""
    law = AffineStream.between(tag(8, autocast), 8, tag(12, autocast), 12)
    third = tag(32, autocast)
    assert law.at(32).alloc_bytes.tolist() == third.alloc_bytes.tolist()


# -- all models ----------------------------------------------------------------------------------


def test_models_never_ask_for_less_at_a_larger_batch() -> None:
    """Arguments that may depend on the batch grow; a model's bytes do not fall with them."""
    grows = {
        "flash_backward": lambda n: (n, 8, 200, 64),
        "efficient_backward": lambda n: (n, 8, 200, 200, 64, 64, 1, 64),
        "efficient_delta": lambda n: (n, 8, 200, 64, 1),
        "embedding_backward": lambda n: (n * 512, 30_000, 768, 8, 4),
        "index_put": lambda n: (n * 512,),
        "unique": lambda n: (n * 512, 4, 1),
        "cudnn_rnn_workspace": lambda n: (2, n * 100, 512, 2, 4, 1 << 20),
        "cudnn_attention_backward": lambda n: (n, 8, 200, 64),
        "sort": lambda n: (n * 5000, 5000, 4),
    }
    for name, arguments in grows.items():
        sizes = [workspace_bytes(name, arguments(n)) for n in (1, 2, 7, 64, 127)]
        for smaller, larger in itertools.pairwise(sizes):
            assert 0 <= smaller <= larger, name
    assert MODELS.keys() > grows.keys()


# -- streams -------------------------------------------------------------------------------------


def test_a_prefetchers_batches_wait_for_the_stream_that_uses_them(sim: Simulation) -> None:
    """record_stream: without a synchronisation the next batch cannot take the last one's place."""
    side, main = torch.cuda.Stream(), torch.cuda.current_stream()
    places = []
    for _ in range(4):
        with torch.cuda.stream(side):
            batch = torch.empty(4, MiB).pin_memory().to("cuda", non_blocking=True)
        main.wait_stream(side)
        batch.record_stream(main)
        places.append(batch.data_ptr())
        (batch * 2).sum()
        del batch
    assert len(set(places)) == 4
    assert torch.cuda.memory_stats()["active_bytes.all.current"] >= 4 * 16 * MiB
    assert torch.cuda.memory_allocated() < 16 * MiB
    torch.cuda.synchronize()
    with torch.cuda.stream(side):
        again = torch.empty(4, MiB).pin_memory().to("cuda", non_blocking=True)
    assert again.data_ptr() in places


def test_reading_a_loss_lets_the_prefetcher_reuse_its_memory(sim: Simulation) -> None:
    side, main = torch.cuda.Stream(), torch.cuda.current_stream()
    places = set()
    for _ in range(6):
        with torch.cuda.stream(side):
            batch = torch.empty(4, MiB).pin_memory().to("cuda", non_blocking=True)
        main.wait_stream(side)
        batch.record_stream(main)
        places.add(batch.data_ptr())
        loss = (batch * 2).sum()
        del batch
        loss.item()
    assert len(places) == 1


def test_the_host_is_never_far_ahead_of_the_device(sim: Simulation) -> None:
    """CUDA's launch queue holds 1,024 kernels; what was freed before that is done."""
    side, main = torch.cuda.Stream(), torch.cuda.current_stream()
    with torch.cuda.stream(side):
        batch = random(4, MiB)
    batch.record_stream(main)
    place = batch.data_ptr()
    del batch
    small = random(4)
    for _ in range(1100):
        small.add_(1)
    with torch.cuda.stream(side):
        assert random(4, MiB).data_ptr() == place


def test_waits_are_replayed(sim: Simulation) -> None:
    from trainfit.memory.replay import Stream, replay

    side, main = torch.cuda.Stream(), torch.cuda.current_stream()
    for step in range(6):
        with torch.cuda.stream(side):
            batch = random(4, MiB)
        batch.record_stream(main)
        if step == 3:
            torch.cuda.synchronize()
        (batch * 2).sum()
        del batch
    outcome = replay(Stream.of(sim.recording))
    assert outcome.peak_reserved == torch.cuda.max_memory_reserved()
    assert outcome.peak_allocated == torch.cuda.max_memory_allocated()


def test_settings_and_fraction_can_change_in_a_script(sim: Simulation) -> None:
    torch._C._accelerator_setAllocatorSettings("expandable_segments:True")
    random(6 * MiB)
    assert torch.cuda.memory_stats()["segment.all.current"] == 0, "pages are mapped instead"
    torch.cuda.set_per_process_memory_fraction(0.5)
    assert sim.allocator.allowed_bytes == sim.gpu.memory_bytes // 2


@pytest.mark.parametrize("dense", [True, False])
@pytest.mark.parametrize("train", [True, False])
def test_batch_normalization_keeps_a_dense_copy_of_a_slice(
    sim: Simulation, dense: bool, train: bool
) -> None:
    """_batch_norm_impl_index hands cuDNN a contiguous input, which autograd saves."""
    norm = nn.BatchNorm2d(64).cuda().train(train)
    images = random(4, 128, 32, 32)
    part = images[:, :64].contiguous() if dense else images[:, :64]
    before = torch.cuda.memory_allocated()
    result = norm(part)
    size, statistics = 4 * 4 * 64 * 32 * 32, 2 * 512
    more = torch.cuda.memory_allocated() - before - size
    assert more in range(size * (not dense), size * (not dense) + statistics + 1)
    gradient = random(4, 128, 32, 32)[:, 64:]
    result.backward(gradient)
    copies = [("contiguous_copy", size)] if train else []
    assert taken(sim, "contiguous_copy") == copies


@pytest.mark.parametrize("vector", [-3, 0, 1, 4, 769])
def test_a_sum_at_a_batch_size_beyond_those_that_ran(vector: int) -> None:
    """Values that a thread reads at once go by a law of two batch sizes (4 of 256 rows, 1 of 257),
    which gives any number at others."""
    for within in (0, 1):
        arguments = 1000, 4096, within, vector, 4, 128, 1536
        at_most = workspace_bytes("reduction_partials", (1000, 4096, within, 4, 4, 128, 1536))
        assert 0 <= workspace_bytes("reduction_partials", arguments) <= 4 * max(1, at_most)
