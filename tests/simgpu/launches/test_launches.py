"""What operators launch on the simulated GPU: arithmetic, traffic and sizes of their kernels."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st

import trainfit
from trainfit.results.runs.recording import Recording
from trainfit.results.runs.steps import DTYPES, KINDS, MARKS
from trainfit.speed.work import COLUMNS, Work

HALF, FULL = 2, 4


def recorded(act: Callable[[], Any], gpu: str = "RTX 3090") -> Recording:
    """What ``act`` does, as the only step of a simulation."""
    with trainfit.simulate(gpu, limited=False) as simulation:
        prepared = act()
        simulation.end_step()
        prepared()
        simulation.end_step()
    return simulation.recording


def launched(act: Callable[[], Any], gpu: str = "RTX 3090") -> list[dict[str, Any]]:
    """The kernels of what ``act`` returns to be called; a row each, by the columns' names."""
    work = Work.of_step(recorded(act, gpu), 1)
    rows = [dict(zip(COLUMNS, row, strict=True)) for row in work.table.tolist()]
    return [{**row, "kind": KINDS[row["kind"]], "dtype": DTYPES[row["dtype"]]} for row in rows]


def tensor(*shape: int, dtype: torch.dtype = torch.float16) -> torch.Tensor:
    return torch.zeros(shape, device="cuda", dtype=dtype)


def moved(row: dict[str, Any]) -> tuple[int, int]:
    return row["read"], row["written"]


def kinds(rows: Sequence[dict[str, Any]]) -> list[str]:
    return [row["kind"] for row in rows]


# --- Products -----------------------------------------------------------------------------------


@settings(max_examples=20)
@given(st.integers(1, 6), st.integers(1, 70), st.integers(1, 70), st.integers(1, 70))
def test_a_product_by_its_sizes(batches: int, rows: int, columns: int, depth: int) -> None:
    def act() -> Any:
        left, right = tensor(batches, rows, depth), tensor(batches, depth, columns)
        return lambda: torch.bmm(left, right)

    (row,) = launched(act)
    assert row["kind"] == "matmul" and row["dtype"] == "float16"
    assert (row["rows"], row["columns"], row["depth"]) == (rows, columns, depth)
    assert row["batches"] == batches
    assert row["flops"] == 2 * batches * rows * columns * depth
    assert row["read"] == HALF * batches * (rows * depth + depth * columns)
    assert row["written"] == HALF * batches * rows * columns


def test_a_linear_layers_bias_is_read_too() -> None:
    def act() -> Any:
        layer, source = torch.nn.Linear(64, 32).cuda().half(), tensor(16, 64)
        return lambda: layer(source)

    (row,) = launched(act)
    assert row["read"] == HALF * (16 * 64 + 64 * 32 + 32)


def test_products_of_vectors() -> None:
    def act() -> Any:
        matrix, one, other = tensor(16, 64), tensor(64), tensor(64)
        return lambda: (matrix @ one, one.dot(other), torch.vdot(one, other))

    rows = launched(act)
    assert [(row["rows"], row["columns"], row["depth"]) for row in rows] == [
        (16, 1, 64),
        (1, 1, 64),
        (1, 1, 64),
    ]
    assert [row["flops"] for row in rows] == [2 * 16 * 64, 2 * 64, 2 * 64]


@pytest.mark.parametrize(("allowed", "dtype"), [(True, "tfloat32"), (False, "float32")])
def test_float32_products_as_the_script_allows(allowed: bool, dtype: str) -> None:
    before = torch.backends.cuda.matmul.allow_tf32

    def act() -> Any:
        torch.backends.cuda.matmul.allow_tf32 = allowed
        left, right = tensor(64, 64, dtype=torch.float32), tensor(64, 64, dtype=torch.float32)
        return lambda: left @ right

    try:
        (row,) = launched(act)
    finally:
        torch.backends.cuda.matmul.allow_tf32 = before
    assert row["dtype"] == dtype


# --- Convolutions -------------------------------------------------------------------------------


def convolution(
    groups: int = 1, size: int = 3, channels_last: bool = False, side: int = 20, **options: Any
) -> Any:
    def act() -> Any:
        layer = torch.nn.Conv2d(16, 32, size, groups=groups, bias=False, **options).cuda().half()
        source = tensor(4, 16, side, side).requires_grad_()
        if channels_last:
            layer = layer.to(memory_format=torch.channels_last)
            source = source.detach().contiguous(memory_format=torch.channels_last)
            source.requires_grad_()

        def step() -> None:
            out = layer(source)
            out.backward(torch.zeros_like(out))

        return step

    return act


def test_a_convolution_is_three_products() -> None:
    rows = {row["kind"]: row for row in launched(convolution(padding=1, channels_last=True))}
    places, flops = 4 * 20 * 20, 2 * 4 * 20 * 20 * 32 * 16 * 9
    sizes = {
        "convolution": (places, 32, 16 * 9),
        "convolution_input_gradient": (places, 16, 32 * 9),
        "convolution_weight_gradient": (32, 16 * 9, places),
    }
    weight, source, result = 32 * 16 * 9, places * 16, places * 32
    traffic = {
        "convolution": (source + weight, result),
        "convolution_input_gradient": (result + weight, source),
        "convolution_weight_gradient": (source + result, weight),
    }
    for kind, wanted in sizes.items():
        row = rows[kind]
        assert (row["rows"], row["columns"], row["depth"]) == wanted
        assert row["flops"] == flops == 2 * math.prod(wanted)
        assert moved(row) == tuple(HALF * each for each in traffic[kind])


def test_rows_that_are_next_to_each_other_are_columns() -> None:
    """The gradient of a weight of 1,001 classes: its alignment is that of the classes."""

    def act() -> Any:
        gradient, source = tensor(64, 1001), tensor(64, 16)
        return lambda: torch.mm(gradient.t(), source)

    (row,) = launched(act)
    assert (row["rows"], row["columns"], row["depth"]) == (16, 1001, 64)


def test_kernels_that_wait_say_for_what() -> None:
    """Elements of a channel, rows and their length, results of a window, tiles of 32 channels."""

    def act() -> Any:
        images = tensor(4, 48, 8, 8)
        norm, layer = torch.nn.BatchNorm2d(48).cuda(), torch.nn.LayerNorm(8).cuda().half()
        last = images.contiguous(memory_format=torch.channels_last)

        def step() -> None:
            norm(images)
            norm(last)
            layer(images)
            torch.nn.functional.max_pool2d(images, 2)
            torch.cat([images.transpose(1, 2), images.transpose(1, 2)])
            torch.cat([images, images])

        return step

    with torch.no_grad():
        found = {row["kind"]: row for row in launched(act) if row["kind"] != "concatenation"}
        joined = [row["rows"] for row in launched(act) if row["kind"] == "concatenation"]
    assert found["batch_norm"]["rows"] == 4 * 8 * 8
    assert found["batch_norm_nhwc"]["rows"] == 0
    assert found["pooling"]["rows"] == 4 * 48 * 4 * 4
    row = found["normalization"]
    assert (row["batches"], row["columns"]) == (4 * 48 * 8, 8)
    assert joined == [2 * 4 * 48 * 8 * 8, 0]
    layouts = [row for row in launched(convolution()) if row["kind"] == "layout"]
    assert {row["rows"] for row in layouts} == {4 * 20 * 20 * 32, 4 * 18 * 18 * 32}


def test_tensor_cores_want_nhwc() -> None:
    """Both tensors of each of the three passes are copied, but for channels-last ones, most
    1x1 convolutions and kernels without tensor cores."""
    assert kinds(launched(convolution())).count("layout") == 6
    assert "layout" not in kinds(launched(convolution(channels_last=True)))
    assert "layout" not in kinds(launched(convolution(size=1)))
    assert "layout" not in kinds(launched(convolution(groups=16)))


@pytest.mark.parametrize(
    ("side", "copied"),
    [
        (20, {}),
        (7, {"convolution_1x1": 2, "convolution_1x1_input_gradient": 2}),
        (2, {"convolution_1x1_weight_gradient": 2}),
    ],
)
def test_a_1x1_convolution_is_a_product_of_what_lies_aligned(
    side: int, copied: dict[str, int]
) -> None:
    """Copies come before a pass: of a map of 49 places, and for a weight's gradient that would be
    larger for each sample than the sample."""
    found: dict[str, int] = {}
    copies = 0
    for kind in kinds(launched(convolution(size=1, side=side))):
        if kind == "layout":
            copies += 1
        elif kind.startswith("convolution"):
            found[kind], copies = copies, 0
    assert {kind: count for kind, count in found.items() if count} == copied


def test_a_1x1_convolution_of_neighbouring_channels_is_a_matmul() -> None:
    rows = {row["kind"]: row for row in launched(convolution(size=1, channels_last=True))}
    wide, narrow = "convolution_1x1", "convolution_1x1_weight_gradient"
    assert {wide, "convolution_1x1_input_gradient", narrow} <= set(rows)
    places = rows[wide]["rows"]
    assert (rows[wide]["columns"], rows[wide]["depth"]) == (32, 16)
    sides = rows[narrow]["rows"], rows[narrow]["columns"], rows[narrow]["depth"]
    assert sides == (32, 16, places)


def test_a_softmax_says_how_long_its_rows_are() -> None:
    def act() -> Any:
        scores = tensor(6, 4, 8).requires_grad_()
        return lambda: scores.softmax(-1).backward(torch.zeros_like(scores))

    rows = [row for row in launched(act) if row["kind"] == "softmax"]
    assert [(row["batches"], row["columns"]) for row in rows] == [(24, 8), (24, 8)]


def test_filters_of_one_channel_are_depthwise() -> None:
    native, cudnn = launched(convolution(groups=16)), launched(convolution(16, channels_last=True))
    assert {"depthwise", "depthwise_input_gradient", "depthwise_weight_gradient"} <= set(
        kinds(native)
    )
    assert "depthwise_nhwc_weight_gradient" in kinds(cudnn)
    forward = next(row for row in native if row["kind"] == "depthwise")
    assert forward["flops"] == 2 * 4 * 18 * 18 * 32 * 9
    assert (forward["columns"], forward["depth"], forward["batches"]) == (2, 9, 16)


def test_groups_are_products_of_their_own() -> None:
    rows = {row["kind"]: row for row in launched(convolution(groups=4, channels_last=True))}
    forward = rows["grouped_nhwc"]
    assert (forward["columns"], forward["depth"], forward["batches"]) == (8, 4 * 9, 4)
    assert "grouped_weight_gradient" in kinds(launched(convolution(groups=4)))
    sizes = forward["rows"] * forward["columns"] * forward["depth"] * forward["batches"]
    assert forward["flops"] == 2 * sizes


def test_a_transposed_convolution_is_anothers_input_gradient() -> None:
    def act() -> Any:
        layer = torch.nn.ConvTranspose2d(16, 8, 2, stride=2, bias=False).cuda().half()
        source = tensor(2, 16, 10, 10)
        return lambda: layer(source)

    row = next(row for row in launched(act) if row["kind"] == "convolution")
    assert row["flops"] == 2 * 2 * 10 * 10 * 16 * 8 * 4
    assert (row["rows"], row["columns"]) == (2 * 20 * 20, 8)


# --- Everything else ----------------------------------------------------------------------------


def test_elementwise_operators_read_and_write_each_operand_once() -> None:
    def act() -> Any:
        one, other = tensor(8, 16, 10), tensor(1, 16, 1)
        return lambda: (one + other, one.mul_(2), one.view(-1), one.zero_())

    added, scaled, filled = launched(act)
    size = HALF * 8 * 16 * 10
    assert kinds([added, scaled, filled]) == ["pointwise", "pointwise", "fill"]
    assert moved(added) == (size + HALF * 16, size)
    assert moved(scaled) == (size, size)
    assert moved(filled) == (0, size)


def test_a_tensor_that_repeats_elements_is_read_as_often_as_it_has_them() -> None:
    def act() -> Any:
        small = tensor(16, 1).expand(16, 100)
        return lambda: small.contiguous()

    (row,) = launched(act)
    assert moved(row) == (HALF * 16, HALF * 16 * 100)


@pytest.mark.parametrize(
    ("operator", "single"),
    [
        (lambda x: x + x, 0),
        (lambda x: x.t() + x.t(), 0),  # one order, without gaps
        (lambda x: x + 1.0, 0),
        (lambda x: x.float(), 0),  # copies have kernels for two dtypes
        (lambda x: x + x.t(), 64 * 64),
        (lambda x: x[:, ::2] * x[:, ::2], 64 * 32),
        (lambda x: x * x[:1], 64 * 64),  # repeated
        (lambda x: x * x.new_ones(64, 64, dtype=torch.float32), 64 * 64),
    ],
)
def test_elements_are_taken_one_by_one_where_vectors_cannot_be(operator: Any, single: int) -> None:
    def act() -> Any:
        source = tensor(64, 64)
        return lambda: operator(source)

    assert launched(act)[-1]["rows"] == single


@pytest.mark.parametrize(
    ("rows", "length", "of_element", "kernels"),
    [
        (256, 1024, 2 * 3 * 12, 1),  # in a block's shared memory
        (256, 8192, 2 * 6 * 12, 7),  # a block a row, by six bits
        # Together: places written, keys counted, four passes of pairs, rows' numbers counted and
        # one pass of them, results put in order.
        (64, 8192, 8 + (4 + 2 * 4 * 12) + (8 + 2 * 8) + 2 * 12, 11),
        (1, 8192, 4 + 2 * 4 * 12, 7),
    ],
)
def test_a_sort_passes_keys_and_places(
    rows: int, length: int, of_element: int, kernels: int
) -> None:
    def act() -> Any:
        source = tensor(rows, length, dtype=torch.float32)
        return lambda: source.sort(-1)

    (row,) = launched(act)
    assert moved(row) == (rows * length * of_element // 2,) * 2
    assert (row["launches"], row["batches"]) == (1, kernels)


def test_gelu_says_how_many_instructions_it_takes() -> None:
    def act() -> Any:
        source = tensor(64, 32).requires_grad_()
        return lambda: F.gelu(source).backward(torch.zeros_like(source))

    forward, _, gradient = launched(act)
    assert kinds([forward, gradient]) == ["pointwise"] * 2
    assert forward["columns"] == gradient["columns"] == 64 * 32
    assert 0 < forward["depth"] < gradient["depth"]
    assert moved(gradient) == (2 * HALF * 64 * 32, HALF * 64 * 32)


def test_what_asks_for_a_shape_reads_nothing() -> None:
    def act() -> Any:
        source = tensor(64, 32)
        return lambda: torch.ones_like(source)

    (ones,) = launched(act)
    assert moved(ones) == (0, HALF * 64 * 32)


def test_a_transposition_takes_a_piece_of_the_cache_for_each_element() -> None:
    def passed(*shape: int) -> int:
        def act() -> Any:
            source = tensor(*shape)
            return lambda: source.t().contiguous()

        (row,) = launched(act)
        assert row["kind"] == "pointwise_reordered"
        return int(row["columns"])

    # Each element a piece of 32 bytes, and what is written in order.
    assert passed(1024, 512) == 1024 * 512 * (32 + HALF)
    # A block makes 512 results: of 16 places of each of 32 rows, a piece together.
    assert passed(32, 1024) == 32 * 1024 * (HALF + HALF)


def test_a_layer_norms_gradient_says_how_long_its_rows_are() -> None:
    def act() -> Any:
        layer, source = torch.nn.LayerNorm(48).cuda().half(), tensor(6, 4, 48).requires_grad_()
        return lambda: layer(source).backward(torch.zeros_like(source))

    (row,) = (each for each in launched(act) if each["kind"] == "normalization_gradient")
    assert (row["batches"], row["columns"]) == (24, 48)


@pytest.mark.parametrize(
    ("size", "dtype", "layers", "calls"),
    [
        (512, torch.bfloat16, 1, 10),  # a matmul for each of ten time steps
        (512, torch.bfloat16, 2, 20),
        (512, torch.float16, 1, 1),  # kernels that stay: in float16, of one layer
        (512, torch.float16, 2, 20),
        (128, torch.bfloat16, 2, 2),  # small
    ],
)
def test_the_cpu_launches_recurrent_matmuls_one_by_one(
    size: int, dtype: torch.dtype, layers: int, calls: int
) -> None:
    def act() -> Any:
        layer = torch.nn.LSTM(256, size, layers, device="cuda", dtype=dtype)
        source = tensor(10, 8, 256, dtype=dtype)
        return lambda: layer(source)

    (row,) = (each for each in launched(act, "A100 80GB SXM") if each["kind"] == "recurrent")
    assert (row["batches"], row["launches"]) == (calls, 2 * 10 * layers)


def test_group_normalization_goes_over_elements_one_by_one() -> None:
    def act() -> Any:
        layer, source = torch.nn.GroupNorm(4, 16).cuda(), tensor(8, 16, 32, dtype=torch.float32)
        return lambda: layer(source)

    (row,) = launched(act)
    assert row["kind"] == "normalization" and row["rows"] == 3 * 8 * 16 * 32


def test_another_order_in_memory_is_another_kind() -> None:
    def act() -> Any:
        images = tensor(2, 8, 10, 10)
        return lambda: (images.clone(), images.contiguous(memory_format=torch.channels_last))

    assert kinds(launched(act)) == ["pointwise", "pointwise_reordered"]


def test_a_slices_gradient_is_zeros_and_a_copy_into_them() -> None:
    def act() -> Any:
        gradient = tensor(4, 8, 10, 10).contiguous(memory_format=torch.channels_last)
        sizes = [[4, 32, 10, 10], 1, 0, 8, 1]
        return lambda: torch.ops.aten.slice_backward(gradient, *sizes)

    zeros, copy = launched(act)
    assert kinds([zeros, copy]) == ["fill", "pointwise_reordered"]  # zeros are not channels-last
    part = HALF * 4 * 8 * 10 * 10
    assert moved(zeros) == (0, 4 * part) and moved(copy) == (part, part)


def test_concatenations_are_a_kind_of_their_own() -> None:
    def act() -> Any:
        one = tensor(4, 8)
        return lambda: torch.cat([one, one])

    assert kinds(launched(act)) == ["concatenation"]


@pytest.mark.parametrize("last", [False, True])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_cudnn_normalizes_dense_images(dtype: torch.dtype, last: bool) -> None:
    layout = torch.channels_last if last else torch.contiguous_format

    def act() -> Any:
        norm = torch.nn.BatchNorm2d(16).cuda()
        images = tensor(4, 32, 8, 8, dtype=dtype).contiguous(memory_format=layout)
        norm(images[:, :16])  # counts its calls, too
        return lambda: norm(images[:, :16])

    with torch.no_grad():
        found = kinds(launched(act))
    copied = ["pointwise"] if dtype is torch.float16 else []
    assert found == ["pointwise", *copied, "batch_norm_nhwc" if last else "batch_norm"]


@pytest.mark.parametrize(("train", "copied"), [(True, ["pointwise"]), (False, [])])
def test_cudnn_takes_the_dense_gradient_of_a_normalization(train: bool, copied: list[str]) -> None:
    def act() -> Any:
        images, gradient = tensor(4, 16, 8, 8), tensor(4, 32, 8, 8)[:, 16:]
        each = [tensor(16, dtype=torch.float32) for _ in range(5)]
        backward = torch.ops.aten.native_batch_norm_backward
        return lambda: backward(gradient, images, *each, train, 1e-5, [True, True, True])

    with torch.no_grad():
        assert kinds(launched(act)) == [*copied, "batch_norm_gradient"]


@pytest.mark.parametrize(
    ("mode", "last", "turns"),
    [("bilinear", False, (64, 24)), ("bilinear", True, (0, 0)), ("bicubic", True, (64, 24))],
)
def test_resampling_goes_through_images_and_channels_one_after_the_other(
    mode: str, last: bool, turns: tuple[int, int]
) -> None:
    """A thread for each of 8 x 8 places; 2 images of 12 channels."""

    def act() -> Any:
        images = tensor(2, 12, 4, 4)
        if last:
            images = images.contiguous(memory_format=torch.channels_last)
        return lambda: F.interpolate(images, scale_factor=2, mode=mode)

    row = next(each for each in launched(act) if each["kind"] == "resampling")
    assert (row["rows"], row["depth"]) == turns
    assert moved(row) == (HALF * 2 * 12 * 16, HALF * 2 * 12 * 64)


def test_statistics_are_a_pass_of_their_own_in_training() -> None:
    def act(train: bool) -> Any:
        def prepared() -> Any:
            norm, images = torch.nn.BatchNorm2d(8).cuda().train(train), tensor(4, 8, 10, 10)
            return lambda: norm(images)

        return prepared

    size = HALF * 4 * 8 * 10 * 10
    train, evaluate = launched(act(True)), launched(act(False))
    trained = next(row for row in train if row["kind"] == "batch_norm")
    evaluated = next(row for row in evaluate if row["kind"] == "batch_norm_eval")
    assert 2 * size <= trained["read"] < 2.5 * size and trained["launches"] == 2
    assert size <= evaluated["read"] < 1.5 * size and evaluated["launches"] == 1


def test_of_a_table_only_the_rows_that_are_asked_for_are_read() -> None:
    def act() -> Any:
        table = torch.nn.Embedding(1 << 16, 64).cuda()
        places = torch.zeros(32, dtype=torch.long, device="cuda")
        return lambda: table(places)

    (row,) = launched(act)
    assert row["kind"] == "indexing" and row["read"] <= FULL * 32 * 64 + 8 * 32


def test_fused_attention_keeps_its_scores() -> None:
    def act() -> Any:
        query, key, value = (tensor(2, 4, 128, 64) for _ in range(3))
        return lambda: F.scaled_dot_product_attention(query, key, value)

    row = next(row for row in launched(act) if row["kind"] == "attention")
    assert row["flops"] == 2 * 2 * 4 * 128 * 128 * (64 + 64)
    assert row["read"] == 3 * HALF * 2 * 4 * 128 * 64
    assert (row["rows"], row["columns"], row["depth"], row["batches"]) == (128, 128, 64, 8)


def test_between_host_and_device() -> None:
    def act() -> Any:
        host, pinned, here = torch.zeros(1000), torch.zeros(1000).pin_memory(), tensor(10)
        return lambda: (
            host.to("cuda"),
            pinned.to("cuda", non_blocking=True),
            here.cpu(),
            here.sum().item(),
            torch.cuda.synchronize(),
        )

    rows = [row for row in launched(act) if row["kind"] != "reduction"]
    moves = [row for row in rows if row["kind"] not in MARKS]
    assert kinds(moves) == ["upload", "upload_pinned", "download", "download"]
    assert [row["read"] for row in moves] == [4000, 4000, 20, 2]
    # Copies to and from pageable memory are waited for, the last is torch.cuda.synchronize().
    waits = [row["kind"] for row in rows if row["kind"] in MARKS]
    assert waits == ["stream_wait", "stream_wait", "wait"]
    assert rows[-1]["kind"] == "wait"


def test_pinned_memory_is_what_a_tensor_lies_in() -> None:
    """Shards that FSDP offloads are views of pinned memory: they counted as pageable, three times
    as slow, and the host waited for gradients that go there."""

    def act() -> Any:
        host, here = torch.zeros(10, 100).pin_memory(), tensor(1000)
        room = torch.empty(1000, pin_memory=True)
        return lambda: (
            host.view(-1)[:500].to("cuda", non_blocking=True),
            here.to("cpu", non_blocking=True).to("cuda", non_blocking=True),
            room.copy_(here, non_blocking=True),
            torch.empty(1000).copy_(here, non_blocking=True),
        )

    rows = [row["kind"] for row in launched(act)]
    moves = [kind for kind in rows if kind not in MARKS]
    assert moves == [
        *("upload_pinned", "download_pinned", "upload_pinned"),
        *("download_pinned", "download"),
    ]


def test_filters_for_winograds_algorithm_are_told_apart() -> None:
    found = kinds(launched(convolution(padding=1)))
    passes = [kind for kind in found if kind.startswith("convolution")]
    assert passes == [
        "convolution_3x3", "convolution_3x3_input_gradient", "convolution_weight_gradient",
    ]  # fmt: skip
    others = ({"size": 1}, {"size": 5}, {"stride": 2}, {"dilation": 2}, {"channels_last": True})
    for options in (*others, {"groups": 4}):
        assert not any("3x3" in kind for kind in kinds(launched(convolution(**options))))  # type: ignore[arg-type]


def test_an_optimizer_over_lists_launches_as_multi_tensor_apply_does() -> None:
    def act() -> Any:
        weights = [torch.zeros(100, device="cuda", requires_grad=True) for _ in range(300)]
        for each in weights:
            each.grad = torch.zeros_like(each)
        optimizer = torch.optim.SGD(weights, lr=0.1, foreach=True)
        return lambda: optimizer.step()

    rows = [row for row in launched(act) if row["kind"] == "optimizer"]
    assert [row["launches"] for row in rows] == [5]  # two lists, 64 tensors a launch
    assert moved(rows[0]) == (2 * 300 * 400, 300 * 400)


def test_views_and_empty_tensors_launch_nothing() -> None:
    def act() -> Any:
        one = tensor(4, 4)
        return lambda: (one.t(), one[0], one[:0] + 1, torch.empty(5, device="cuda"))

    assert launched(act) == []


def test_equal_operators_have_equal_kernels_and_their_operators_number() -> None:
    def act() -> Any:
        one = tensor(4, 4)
        return lambda: (one + 1, one.t(), one + 1)

    recording = recorded(act)
    work = Work.of_step(recording, 1)
    assert (work.table[0] == work.table[1]).all()
    names = [recording.strings[recording.op_name[i]] for i in recording.kernel_op[-2:]]
    assert names == ["aten.add.Tensor"] * 2
    assert work.op.tolist() == [0, 2] and len(work.op_phase) == 3


def test_recordings_keep_their_kernels(tmp_path: Any) -> None:
    def act() -> Any:
        layer, source = torch.nn.Linear(8, 8).cuda(), tensor(4, 8, dtype=torch.float32)
        return lambda: layer(source)

    recording = recorded(act)
    recording.save(tmp_path / "r.zip")
    again = Recording.load(tmp_path / "r.zip")
    assert (Work.of_step(again, 1).table == Work.of_step(recording, 1).table).all()
    first = again.first_steps(1)
    assert len(first.kernel_op) < len(again.kernel_op)
    first.check()


# --- Copies that kernels ask for ----------------------------------------------------------------


@pytest.mark.parametrize("runs", [1, 3])
def test_an_operand_that_lies_otherwise_is_copied_first(runs: int) -> None:
    """Tokens from an image's places: their channels are apart in memory."""

    def act() -> Any:
        norm = torch.nn.LayerNorm(32).cuda()
        tokens = tensor(2, 32, 8, 8, dtype=torch.float32).flatten(2).transpose(1, 2)
        return lambda: [norm(tokens) for _ in range(runs)]

    with torch.no_grad():
        rows = launched(act)
    assert kinds(rows) == ["pointwise_reordered", "normalization"] * runs
    size = 2 * 32 * 64 * FULL
    assert moved(rows[0]) == (size, size)


def test_a_slice_of_channels_is_copied_for_a_channels_last_convolution() -> None:
    def act(channels: int) -> Any:
        last = torch.channels_last
        conv = torch.nn.Conv2d(16, 16, 3, bias=False).cuda().half().to(memory_format=last)
        images = tensor(2, channels, 8, 8).contiguous(memory_format=last)
        return lambda: conv(images[:, :16])

    with torch.no_grad():
        whole, part = launched(lambda: act(16)), launched(lambda: act(32))
    assert kinds(whole) == ["convolution"] and kinds(part) == ["pointwise", "convolution"]
    assert moved(part[0]) == (2 * 16 * 64 * HALF, 2 * 16 * 64 * HALF)


def test_both_gradients_of_a_convolution_read_the_same_copy() -> None:
    def act() -> Any:
        last = torch.channels_last
        images = tensor(2, 32, 8, 8).contiguous(memory_format=last)
        weight = tensor(16, 16, 3, 3).contiguous(memory_format=last)
        gradient = tensor(2, 16, 6, 6).contiguous(memory_format=last)
        places = ([1, 1], [0, 0], [1, 1], False, [0, 0], 1, [True, True, False])
        backward = torch.ops.aten.convolution_backward
        return lambda: backward(gradient, images[:, :16], weight, None, *places)

    with torch.no_grad():
        rows = launched(act)
    of_convolution = [f"convolution_{name}_gradient" for name in ("input", "weight")]
    assert kinds(rows) == ["pointwise", *of_convolution]


def test_a_copy_that_did_not_fit_is_not_the_next_operators() -> None:
    with trainfit.simulate("custom:1GiB") as simulation:
        norm = torch.nn.LayerNorm(512).cuda()
        tokens = torch.zeros(1, 512, 80_000, device="cuda").transpose(1, 2)
        filler = torch.zeros(1, device="cuda")
        simulation.end_step()
        with torch.no_grad(), pytest.raises(torch.OutOfMemoryError):
            for _ in range(20):
                filler = [filler, norm(tokens)]
        filler = None
        simulation.end_step()
        torch.zeros(8, device="cuda").add_(1)
        simulation.end_step()
    work = Work.of_step(simulation.recording, simulation.recording.steps - 1)
    assert not work.is_kind("pointwise_reordered").any()


# --- Operators that are not PyTorch's -----------------------------------------------------------


def library(name: str, *operators: tuple[str, Any]) -> Any:
    """Operators with shape functions only, as a package's kernels have them."""
    found = torch.library.Library(name, "FRAGMENT")
    for definition, fake in operators:
        found.define(definition)
        torch.library.register_fake(f"{name}::{definition.partition('(')[0]}", fake, lib=found)
    return found


def test_an_operator_without_a_flop_rule_is_told_apart() -> None:
    keep = library("trainfit_test_kernels", ("mixed(Tensor x) -> Tensor", torch.empty_like))

    def act() -> Any:
        source = tensor(64, 64)
        return lambda: torch.ops.trainfit_test_kernels.mixed(source)

    (row,) = launched(act)
    assert row["kind"] == "unknown" and moved(row) == (2 * 64 * 64, 2 * 64 * 64)
    del keep


def test_weights_of_four_bits_are_looked_up_before_or_within_their_product() -> None:
    """bitsandbytes' operators: a matrix of 4-bit weights becomes dense, or meets a few rows."""
    keep = library(
        "bitsandbytes",
        (
            "dequantize_4bit(Tensor A, Tensor absmax, int blocksize, str quant_type, "
            "int[] shape, ScalarType dtype) -> Tensor",
            lambda A, absmax, blocksize, kind, shape, dtype: A.new_empty(shape, dtype=dtype),
        ),
        (
            "gemv_4bit(Tensor A, Tensor B, int[] shapeB, Tensor absmax, Tensor code, "
            "int blocksize) -> Tensor",
            lambda A, B, shape, absmax, code, blocksize: A.new_empty(*A.shape[:-1], shape[0]),
        ),
    )

    def act() -> Any:
        packed, scales = tensor(128 * 64 // 2, dtype=torch.uint8), tensor(128, dtype=torch.float32)
        code, x = tensor(16, dtype=torch.float32), tensor(1, 1, 64)

        def run() -> None:
            bnb = torch.ops.bitsandbytes
            bnb.dequantize_4bit(packed, scales, 64, "nf4", [128, 64], torch.float16)
            bnb.gemv_4bit(x, packed, [128, 64], scales, code, 64)

        return run

    dense, product = launched(act)
    assert dense["kind"] == "pointwise" and dense["rows"] == 128 * 64
    assert dense["written"] == HALF * 128 * 64
    assert product["kind"] == "matmul" and product["flops"] == 2 * 128 * 64
    assert (product["rows"], product["columns"], product["depth"]) == (1, 128, 64)
    del keep


def test_numbers_that_are_quantized_are_bound_by_memory() -> None:
    """They have no FLOPs, and were told as operators of which no rule is known: 1,120 in a step of
    QLoRA on Llama-3.1-8B."""
    keep = library(
        "bitsandbytes",
        (
            "dequantize_blockwise(Tensor A, Tensor absmax, Tensor code, int blocksize, "
            "ScalarType dtype) -> Tensor",
            lambda A, absmax, code, blocksize, dtype: torch.empty_like(A, dtype=dtype),
        ),
    )

    def act() -> Any:
        scales, code = tensor(4, dtype=torch.float32), tensor(256, dtype=torch.float32)
        packed = tensor(1024, dtype=torch.uint8)

        def run() -> None:
            torch.ops.bitsandbytes.dequantize_blockwise(packed, scales, code, 256, torch.float32)

        return run

    (row,) = launched(act)
    assert (row["kind"], row["rows"]) == ("pointwise", 1024)
    assert (row["read"], row["written"]) == (1024 + 16 + 1024, 4096)
    del keep


def _four_bits() -> list[Any]:
    """bitsandbytes' operators with a layer of 4-bit weights, without its library."""
    return library(
        "bitsandbytes",
        (
            "dequantize_4bit(Tensor A, Tensor absmax, int blocksize, str quant_type, "
            "int[] shape, ScalarType dtype) -> Tensor",
            lambda A, absmax, blocksize, kind, shape, dtype: A.new_empty(shape, dtype=dtype),
        ),
        (
            "gemm_4bit(Tensor A, Tensor B, int[] shapeB, Tensor absmax, int blocksize, "
            "str quant_type, Tensor? bias=None, Tensor? absmax_8bit=None, "
            "Tensor? absmax_code=None, Tensor? absmax_offset=None) -> Tensor",
            lambda A, B, shape, *rest, **more: A.new_empty(*A.shape[:-1], shape[0]),
        ),
    )


@pytest.mark.parametrize("rows", [4, 4096])
def test_a_layer_of_four_bits_costs_its_flops(rows: int) -> None:
    """A few rows meet the packed weight; for many it becomes dense first, which takes longer."""
    keep = _four_bits()

    def act() -> Any:
        packed, scales = tensor(128 * 64 // 2, dtype=torch.uint8), tensor(128, dtype=torch.float32)
        x = tensor(rows, 64)

        def run() -> None:
            torch.ops.bitsandbytes.gemm_4bit(x, packed, [128, 64], scales, 64, "nf4")

        return run

    found = launched(act)
    assert [row["kind"] for row in found] == ["matmul"] if rows == 4 else ["pointwise", "matmul"]
    assert found[-1]["flops"] == 2 * rows * 128 * 64
    if rows > 4:
        assert found[0]["written"] == HALF * 128 * 64
    del keep


def _eight_bits() -> list[Any]:
    """The operators of LLM.int8, without bitsandbytes' library."""
    return library(
        "bitsandbytes",
        (
            "int8_mixed_scaled_mm(Tensor A, Tensor CA, Tensor CB, Tensor SCA, Tensor SCB, "
            "Tensor? outlier_cols=None, Tensor? bias=None) -> (Tensor, Tensor?)",
            lambda A, CA, CB, *rest, **more: (A.new_empty(len(A), len(CB)), A.new_empty(0)),
        ),
        (
            "int8_scaled_mm(Tensor A, Tensor B, Tensor row_stats, Tensor col_stats, "
            "Tensor? bias=None, ScalarType? dtype=None) -> Tensor",
            lambda A, B, *rest, dtype=None, **more: A.new_empty(len(A), len(B), dtype=dtype),
        ),
        (
            "int8_linear_matmul(Tensor A, Tensor B) -> Tensor",
            lambda A, B: A.new_empty(len(A), len(B), dtype=torch.int32),
        ),
        (
            "int8_mm_dequant(Tensor A, Tensor row_stats, Tensor col_stats, ScalarType? dtype=None, "
            "Tensor? bias=None) -> Tensor",
            lambda A, rows, columns, dtype=None, bias=None: torch.empty_like(A, dtype=dtype),
        ),
    )


@pytest.mark.parametrize(
    ("dtype", "bias", "bytes_of_result"),
    [(torch.float16, None, 2), (torch.bfloat16, None, 2 + 2), (torch.float16, torch.float32, 2)],
)
def test_a_matmul_of_eight_bits_sums_in_thirty_two(
    dtype: torch.dtype, bias: torch.dtype | None, bytes_of_result: int
) -> None:
    """At its peak there are sums of 32 bits, the kernel's result in float16, and a cast of that."""
    keep = _eight_bits()
    rows, depth, columns = 1024, 256, 512
    with trainfit.simulate("RTX 4090"):
        given = torch.zeros(rows, depth, dtype=dtype, device="cuda")
        left = torch.zeros(rows, depth, dtype=torch.int8, device="cuda")
        right = torch.zeros(columns, depth, dtype=torch.int8, device="cuda")
        scales = torch.zeros(rows, device="cuda"), torch.zeros(columns, device="cuda")
        added = None if bias is None else torch.zeros(columns, dtype=bias, device="cuda")
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        result, _ = torch.ops.bitsandbytes.int8_mixed_scaled_mm(
            given, left, right, *scales, None, added
        )
        assert result.dtype is dtype
        most = torch.cuda.max_memory_allocated() - before
        assert most == (4 + bytes_of_result) * rows * columns
        assert torch.cuda.memory_allocated() - before == 2 * rows * columns
    del keep


def test_a_matmul_of_eight_bits_launches_two_kernels() -> None:
    """The matmul, and what makes float16 of its sums."""
    keep = _eight_bits()

    def act() -> Any:
        left, right = tensor(64, 256, dtype=torch.int8), tensor(512, 256, dtype=torch.int8)
        scales = tensor(64, dtype=torch.float32), tensor(512, dtype=torch.float32)
        scaled = torch.ops.bitsandbytes.int8_scaled_mm
        return lambda: scaled(left, right, *scales, dtype=torch.float16)

    product, dequantized = launched(act)
    assert (product["kind"], product["flops"]) == ("matmul", 2 * 64 * 256 * 512)
    assert product["written"] == FULL * 64 * 512
    assert dequantized["kind"] == "pointwise" and dequantized["written"] == HALF * 64 * 512
    del keep


@pytest.mark.parametrize(
    ("act", "count"),
    [
        (lambda x, mask: x[mask], 1),
        (lambda x, mask: x[mask, 0], 1),
        (lambda x, mask: x.__setitem__(mask, x[0]), 1),
        (lambda x, mask: x.__setitem__(mask, 0.5), 0),  # masked_fill
        (lambda x, mask: x.masked_fill(mask[:, None], 0.0), 0),
        (lambda x, mask: x[x[:, 0].long()], 0),
        (lambda x, mask: torch.where(mask[:, None], x, 0.0), 0),
        (lambda x, mask: x.unique(), 1),
        (lambda x, mask: torch.bincount(x[:, 0].long()), 1),
        (lambda x, mask: x.repeat_interleave(x[:, 0].long(), 0), 1),
        (lambda x, mask: x.repeat_interleave(x[:, 0].long() + 1, 0, output_size=8), 0),
    ],
)
def test_sizes_that_depend_on_data_are_waited_for(
    act: Callable[[torch.Tensor, torch.Tensor], Any], count: int
) -> None:
    def prepared() -> Callable[[], Any]:
        x = tensor(8, 4, dtype=torch.float32)
        return lambda: act(x, x[:, 0] > 0)

    assert kinds(launched(prepared)).count("stream_wait") == count
