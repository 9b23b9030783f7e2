"""Sizes that an NVIDIA H200 took (torch 2.11, cuDNN 9.19): rows of bench/gpu/truth."""

from __future__ import annotations

import math
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from torch import nn  # noqa: E402
from torch.nn import functional as F  # noqa: E402

import trainfit  # noqa: E402
from trainfit.results.runs.recording import Recording  # noqa: E402
from trainfit.simgpu.allocator.cudnn_convolutions import GRU, LSTM, reserve_bytes  # noqa: E402
from trainfit.simgpu.allocator.workspaces import workspace_bytes  # noqa: E402

FORWARD, DATA, WEIGHT = range(3)
HALF, FLOAT16, FLOAT = torch.bfloat16, torch.float16, torch.float32


def convolution(
    source: tuple[int, ...],
    weight: tuple[int, ...],
    stride: int,
    dtype: Any,
    layout: Any = torch.contiguous_format,
    transposed: bool = False,
    gpu: str = "H200",
) -> list[int]:
    """Bytes of the workspaces of forward, data gradient and weight gradient; 0: none."""
    padding = 0 if transposed or stride == weight[2] else weight[2] // 2
    with trainfit.simulate(gpu, limited=False) as simulation:
        x = torch.empty(source, dtype=dtype, device="cuda").to(memory_format=layout)
        w = torch.empty(weight, dtype=dtype, device="cuda").to(memory_format=layout)
        x, w = x.requires_grad_(), w.requires_grad_()
        run = F.conv_transpose2d if transposed else F.conv2d
        out = run(x, w, stride=stride, padding=padding)
        marks = [len(simulation.recording.workspace_alloc)]
        gradient = torch.empty_like(out)
        for wanted in (x, w):
            torch.autograd.grad(out, wanted, gradient, retain_graph=True)
            marks.append(len(simulation.recording.workspace_alloc))
    sizes = workspaces(simulation.recording)
    return [sum(sizes[a:b]) for a, b in zip((0, *marks), marks, strict=False)]


def workspaces(recording: Recording) -> list[int]:
    return [int(size) for size in recording.alloc_bytes[recording.workspace_alloc]]


def blocks(nbytes: int) -> int:
    """512-byte blocks; up to 512 bytes of counters are not modelled."""
    return 0 if nbytes <= 512 else -(-nbytes // 512)


@pytest.mark.parametrize(
    ("shapes", "dtype", "which", "measured"),
    [
        # Halves: input, output and weight in NHWC, whatever the map's size.
        (((32, 64, 56, 56), (64, 64, 3, 3), 1), HALF, FORWARD, 25_763_987),
        (((32, 64, 56, 56), (64, 64, 3, 3), 1), HALF, DATA, 25_763_987),
        (((32, 512, 7, 7), (512, 512, 3, 3), 1), HALF, FORWARD, 7_929_872),
        (((8, 128, 60, 80), (256, 128, 3, 3), 2), HALF, DATA, 15_335_571),
        (((32, 512, 14, 14), (512, 512, 3, 3), 2), HALF, WEIGHT, 12_746_899),
        # TF32: no copies in addition to those.
        (((32, 64, 224, 224), (64, 64, 3, 3), 1), FLOAT, FORWARD, 822_231_187),
        (((32, 256, 14, 14), (256, 256, 3, 3), 1), FLOAT, DATA, 15_204_368),
        (((32, 64, 112, 112), (128, 64, 3, 3), 1), FLOAT, FORWARD, 103_055_376),
        # 1x1 with a stride is copied, without its weight.
        (((32, 256, 56, 56), (512, 256, 1, 1), 2), HALF, FORWARD, 77_070_483),
        (((32, 1024, 14, 14), (2048, 1024, 1, 1), 2), FLOAT, DATA, 38_535_315),
        (((32, 64, 56, 56), (128, 64, 1, 1), 2), FLOAT, DATA, 0),
        # 1x1 is a matmul where a map has a multiple of four places.
        (((32, 512, 7, 7), (2048, 512, 1, 1), 1), HALF, FORWARD, 8_028_176),
        (((32, 1024, 14, 14), (256, 1024, 1, 1), 1), HALF, FORWARD, 0),
        (((32, 64, 56, 56), (64, 64, 1, 1), 1), FLOAT, DATA, 400),
        # Its weight gradient is made for each sample, or of copies where those take less.
        (((32, 256, 56, 56), (64, 256, 1, 1), 1), HALF, WEIGHT, 2_097_152),
        (((32, 512, 28, 28), (128, 512, 1, 1), 1), FLOAT, WEIGHT, 8_388_608),
        (((32, 256, 14, 14), (1024, 256, 1, 1), 1), HALF, WEIGHT, 16_056_336),
        # The first layer: eight channels in bfloat16, four in float16, three in TF32.
        (((32, 3, 224, 224), (64, 3, 7, 7), 2), HALF, FORWARD, 77_120_528),
        (((32, 3, 224, 224), (64, 3, 7, 7), 2), FLOAT16, FORWARD, 64_250_384),
        (((32, 3, 224, 224), (64, 3, 7, 7), 2), FLOAT, FORWARD, 122_065_680),
        (((32, 3, 224, 224), (64, 3, 3, 3), 1), FLOAT, WEIGHT, 0),
        (((32, 3, 224, 224), (768, 3, 16, 16), 16), HALF, FORWARD, 38_469_648),
    ],
)
def test_convolutions_of_nchw(shapes: Any, dtype: Any, which: int, measured: int) -> None:
    """To the block of 512 bytes."""
    found = convolution(*shapes, dtype)[which]
    assert abs(blocks(found) - blocks(measured)) <= 1


@pytest.mark.parametrize(
    ("shapes", "dtype", "layout", "measured"),
    [
        (((32, 64, 56, 56), (64, 64, 3, 3), 1), HALF, "nchw", 27_681_447),
        (((32, 64, 56, 56), (64, 64, 3, 3), 1), HALF, "nhwc", 1_917_591),
        (((32, 64, 56, 56), (64, 64, 3, 3), 1), FLOAT, "nhwc", 2_065_047),
        (((32, 256, 14, 14), (256, 256, 3, 3), 1), FLOAT, "nchw", 22_282_847),
        (((32, 256, 28, 28), (256, 256, 3, 3), 2), FLOAT, "nhwc", 7_078_479),
        (((32, 256, 56, 56), (512, 256, 1, 1), 2), FLOAT, "nchw", 162_529_935),
        (((32, 3, 224, 224), (64, 3, 7, 7), 2), FLOAT, "nchw", 134_522_000),
        (((32, 3, 224, 224), (64, 3, 7, 7), 2), HALF, "nhwc", 31_761_552),
    ],
)
def test_partial_sums_of_weight_gradients(
    shapes: Any, dtype: Any, layout: str, measured: int
) -> None:
    """Within an eighth of what was measured, mostly much less."""
    memory_format = torch.channels_last if layout == "nhwc" else torch.contiguous_format
    found = convolution(*shapes, dtype, memory_format)[WEIGHT]
    assert found == pytest.approx(measured, rel=1 / 8)


def test_channels_last_takes_nothing_but_partial_sums() -> None:
    for dtype in (HALF, FLOAT):
        found = convolution((32, 128, 28, 28), (128, 128, 3, 3), 1, dtype, torch.channels_last)
        assert found[:2] == [0, 0] < found[2:]


def test_transposed_convolutions_are_copied_likewise() -> None:
    """U-Net: 128 channels to 64 at twice the size."""
    found = convolution((8, 128, 128, 128), (128, 64, 2, 2), 2, HALF, transposed=True)
    assert [blocks(each) for each in found[:2]] == [blocks(100_728_979)] * 2


@pytest.mark.parametrize(
    ("source", "outputs", "measured"),
    [((32, 64, 224, 224), 64, 1_850_277_888), ((32, 512, 7, 7), 512, 56_623_104)],
)
def test_winograd_without_tf32(
    source: Any, outputs: int, measured: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.backends.cudnn, "allow_tf32", False)
    found = convolution(source, (outputs, source[1], 3, 3), 1, FLOAT)
    assert found[WEIGHT] == measured


def test_before_hopper_it_is_what_published_figures_fit() -> None:
    before = convolution((8, 64, 56, 56), (64, 64, 3, 3), 1, HALF, gpu="A100 80GB")
    assert before == [2 * 8 * 64 * 56 * 56 * 2] * 3


# -- recurrent networks --------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("mode", "samples", "itemsize", "weights", "workspace", "reserve"),
    [
        (LSTM, 32, 4, 37_814_272, 196_084_224, 185_598_208),
        (LSTM, 128, 4, 37_814_272, 570_426_624, 742_392_064),
        (LSTM, 128, 2, 18_907_136, 301_991_168, 373_293_312),
        (GRU, 64, 4, 28_360_704, 283_640_576, 438_305_024),
    ],
)
def test_recurrent_networks(
    mode: int, samples: int, itemsize: int, weights: int, workspace: int, reserve: int
) -> None:
    """Two layers of 512 in both directions, 128 steps, dropout."""
    rows = 128 * samples
    found = workspace_bytes("cudnn_rnn_workspace", (mode, rows, 512, 2, itemsize, weights))
    assert found == pytest.approx(workspace, rel=0.05)
    assert reserve_bytes(mode, rows, 512, 2, 2, itemsize, True) == reserve


def test_dropout_state() -> None:
    assert workspace_bytes("cudnn_dropout_state", (132,)) == 6_488_064


@pytest.mark.parametrize(("indices", "measured"), [(4096, 83_455), (8192, 150_015)])
def test_sorting_the_indices_of_an_embedding(indices: int, measured: int) -> None:
    """Of which three times the indices are tensors of PyTorch's own."""
    assert workspace_bytes("embedding_sort", (indices, 8)) == 3 * 8 * indices + measured


# -- reductions ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("size", "dims", "dtype", "measured"),
    [
        ((1576, 768), [0], FLOAT, [9_830_400, 24]),  # ViT's biases, batch 8
        ((1576, 3072), [0], FLOAT, [39_321_600, 96]),
        ((4096, 768), [0], HALF, [25_165_824, 24]),  # GPT-2's, batch 4
        ((4096, 3072), [0], HALF, [100_663_296, 96]),
        ((8, 64, 256, 256), [0, 2, 3], HALF, [2_304, 256]),  # of a convolution
        ((64, 1000), [0], FLOAT, []),
    ],
)
def test_blocks_that_share_a_sum(size: Any, dims: Any, dtype: Any, measured: list[int]) -> None:
    with trainfit.simulate("H200") as simulation:
        torch.empty(size, dtype=dtype, device="cuda").sum(dims)
    assert [size for size in workspaces(simulation.recording) if size] == measured


def test_sums_of_nothing_take_nothing() -> None:
    with trainfit.simulate("H200") as simulation:
        for size in ((0, 3), (3, 1)):
            torch.empty(size, device="cuda").sum(1)
        torch.tensor(1.0, device="cuda").sum()
    assert not any(workspaces(simulation.recording))


# -- gradients and softmax -----------------------------------------------------------------------


def allocated(recording: Recording, operator: str) -> list[int]:
    names = [recording.strings[index] for index in recording.op_name.tolist()]
    sizes = zip(recording.alloc_op.tolist(), recording.alloc_bytes.tolist(), strict=True)
    return [size for index, size in sizes if names[index].startswith(operator) and size]


def test_later_gradients_are_added_into_the_first() -> None:
    """InputBuffer::accumulate, seen at every residual connection of the truth."""
    with trainfit.simulate("H200") as simulation:
        value = torch.ones(256, device="cuda", requires_grad=True) * 2
        torch.autograd.backward([value.sin(), value.cos(), value.exp()], [value.detach()] * 3)
    assert allocated(simulation.recording, "aten.add.Tensor") == []


@pytest.mark.parametrize("shared", [True, False])
def test_a_gradient_that_others_hold_is_not_changed(shared: bool) -> None:
    """``value + value`` gives the same gradient twice; a view shares its storage."""
    with trainfit.simulate("H200") as simulation:
        value = torch.ones(16, 16, device="cuda", requires_grad=True) * 2
        pair = (value, value) if shared else (value.t(), value.t())
        (pair[0] + pair[1] if shared else pair[0].sin() + pair[1].cos()).sin().sum().backward()
    forward, *sums = allocated(simulation.recording, "aten.add.Tensor")
    assert sums == [forward]


def test_with_a_graph_of_the_backward_pass_nothing_is_in_place() -> None:
    with trainfit.simulate("H200") as simulation:
        source = torch.ones(256, device="cuda", requires_grad=True)
        value = source * 2
        out = (value.sin() + value.cos()).sum()
        torch.autograd.grad(out, source, create_graph=True)
    assert len(allocated(simulation.recording, "aten.add.Tensor")) == 2


def test_softmax_multiplies_first() -> None:
    with trainfit.simulate("H200") as simulation:
        scores = torch.ones(4, 2000, device="cuda", requires_grad=True)
        scores.softmax(-1).sin().sum().backward()
    nbytes = math.prod((4, 2000)) * 4
    assert allocated(simulation.recording, "aten._softmax_backward_data") == [nbytes] * 2


# -- the order of allocations --------------------------------------------------------------------


def test_autocast_casts_the_last_argument_first() -> None:
    with trainfit.simulate("H200") as simulation:
        layer, source = nn.Linear(32, 64).cuda(), torch.ones(8, 32, device="cuda")
        before = len(simulation.recording.alloc_bytes)
        with torch.autocast("cuda", torch.bfloat16):
            layer(source)
    made = simulation.recording.alloc_bytes[before:].tolist()
    assert made[:3] == [64 * 2, 32 * 64 * 2, 8 * 32 * 2]


def test_a_convolutions_gradients_are_made_one_after_the_other() -> None:
    with trainfit.simulate("H200") as simulation:
        source = torch.ones(8, 64, 32, 32, device="cuda").requires_grad_()
        layer = nn.Conv2d(64, 96, 3, padding=1).cuda()
        layer(source).backward(torch.ones(8, 96, 32, 32, device="cuda"))
    made = allocated(simulation.recording, "aten.convolution_backward")
    data, weight, bias = (each.numel() * 4 for each in (source, layer.weight, layer.bias))
    assert [made.index(each) for each in (data, weight, bias)] == [0, 2, 4]
