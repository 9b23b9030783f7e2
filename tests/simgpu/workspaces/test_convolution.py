"""What a convolution uses in addition to its tensors: workspaces, layouts, algorithm trials."""

from __future__ import annotations

from typing import Any

import pytest

torch = pytest.importorskip("torch")

from torch import nn  # noqa: E402

import trainfit  # noqa: E402
from trainfit.results.runs.recording import EMPTY_CACHE, OTHER, Recording  # noqa: E402

N, C, K, SIDE = 4, 16, 32, 32
#: Bytes of input and of output of a convolution that keeps the size, float32.
X, Y = N * C * SIDE * SIDE * 4, N * K * SIDE * SIDE * 4


def workspaces(recording: Recording) -> list[tuple[str, int]]:
    """Model and bytes of cuDNN's workspaces. (A sum's gradient is expanded, hence copied.)"""
    models = [recording.strings[index] for index in recording.workspace_model.tolist()]
    sizes = recording.alloc_bytes[recording.workspace_alloc].tolist()
    return [(m, s) for m, s in zip(models, sizes, strict=True) if m.startswith("cudnn")]


def run(
    *args: Any, gpu: str = "RTX 4090", channels: int = C, layout: Any = None, **options: Any
) -> Recording:
    """One forward and backward pass of a convolution without bias on a simulated GPU."""
    with trainfit.simulate(gpu) as simulation:
        layer = nn.Conv2d(channels, *args, bias=False, **options).cuda()
        images = torch.zeros(N, channels, SIDE, SIDE).cuda().requires_grad_()
        if layout is not None:
            layer, images = layer.to(memory_format=layout), images.to(memory_format=layout)
            images = images.detach().requires_grad_()
        layer(images).sum().backward()
    return simulation.recording


def test_tf32_takes_one_copy_in_each_pass_and_two_where_it_sums() -> None:
    assert workspaces(run(K, 3, padding=1)) == [
        ("cudnn_tensor_core", X + Y),
        ("cudnn_tensor_core", X + Y),
        ("cudnn_tensor_core", 2 * (X + Y)),
    ]


def test_half_precision_needs_no_rounding() -> None:
    with trainfit.simulate("RTX 4090") as simulation:
        layer = nn.Conv2d(C, K, 3, padding=1, bias=False).cuda().bfloat16()
        images = torch.zeros(N, C, SIDE, SIDE, dtype=torch.bfloat16).cuda().requires_grad_()
        layer(images).sum().backward()
    assert [size for _, size in workspaces(simulation.recording)] == [(X + Y) // 2] * 3


@pytest.mark.parametrize(
    ("arguments", "options"),
    [
        ((K, 1), {}),  # a matrix product
        ((C, 3), {"padding": 1, "groups": C}),  # PyTorch's own kernel
        ((K, 3), {"padding": 1, "channels": 3}),  # a first layer
    ],
)
def test_these_take_none(arguments: Any, options: Any) -> None:
    assert workspaces(run(*arguments, **options)) == []


def test_a_strided_1x1_is_no_matrix_product() -> None:
    sizes = [size for _, size in workspaces(run(K, 1, stride=2))]
    assert sizes == [X + Y // 4, X + Y // 4, 2 * (X + Y // 4)]


def test_groups_take_one_for_the_weight_gradient() -> None:
    assert workspaces(run(K, 3, padding=1, groups=4)) == [("cudnn_tensor_core", X + Y)]


def test_channels_last_needs_no_other_layout() -> None:
    """Only the rounding is left."""
    found = workspaces(run(K, 3, padding=1, layout=torch.channels_last))
    assert found == [("cudnn_tensor_core", X + Y)]


def test_a_channels_last_depthwise_convolution_is_cudnns() -> None:
    with trainfit.simulate("RTX 4090") as simulation:
        torch.backends.cudnn.benchmark = True
        try:
            images = torch.zeros(N, C, SIDE, SIDE).cuda()
            layer = nn.Conv2d(C, C, 3, padding=1, groups=C).cuda()
            layer(images)
            assert emptied(simulation.recording) == 0
            layer(images.to(memory_format=torch.channels_last))
            assert emptied(simulation.recording) == 1
        finally:
            torch.backends.cudnn.benchmark = False


@pytest.mark.parametrize("gpu", ["RTX 4090", "Tesla T4"])
def test_without_tensor_cores_3x3_is_winograds(gpu: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A T4 has none for float32; on an RTX 4090 TF32 may be switched off."""
    if gpu == "RTX 4090":
        monkeypatch.setattr(torch.backends.cudnn, "allow_tf32", False)
    tiles = (SIDE // 4) ** 2
    nbytes = 36 * 4 * (N * tiles * (C + K) + C * K)
    assert workspaces(run(K, 3, padding=1, gpu=gpu)) == [("cudnn_winograd", nbytes)] * 3
    assert workspaces(run(K, 5, padding=2, gpu=gpu)) == []


def emptied(recording: Recording) -> int:
    return int((recording.events == EMPTY_CACHE * 4 + OTHER).sum())


def test_benchmark_empties_the_cache_once_for_each_shape() -> None:
    with trainfit.simulate("RTX 4090") as simulation:
        torch.backends.cudnn.benchmark = True
        try:
            layer = nn.Conv2d(C, K, 3).cuda()
            for side in (SIDE, SIDE, SIDE // 2, SIDE):
                layer(torch.zeros(N, C, side, side).cuda()).sum().backward()
        finally:
            torch.backends.cudnn.benchmark = False
    # The input needs no gradient: forward and weight gradient, each at two sizes.
    assert emptied(simulation.recording) == 4
    assert any("benchmark" in text for text in simulation.recording.header["assumptions"])
    assert emptied(run(K, 3)) == 0


def test_trials_of_other_layers_are_no_change_of_sizes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Networks that take turns, with regularisations in their own steps (StyleGAN2)."""
    monkeypatch.setattr(torch.backends.cudnn, "benchmark", True)

    def trials(*layers_and_sides: tuple[int, int]) -> int:
        with trainfit.simulate("RTX 4090") as simulation:
            layers = [nn.Conv2d(C, width, 3).cuda() for width in (8, 16, 32, 64)]
            for layer, side in layers_and_sides:
                layers[layer](torch.zeros(N, C, side, side).cuda())
                simulation.end_step()
            return max(len(s - {0}) for s in simulation.engine.steps_with_trials.values())

    assert trials((0, 32), (1, 32), (2, 32), (3, 32)) == 1
    assert trials((0, 32), (0, 33), (0, 34), (0, 32)) == 2


@pytest.mark.parametrize("layer", [nn.Conv1d, nn.Conv3d])
def test_other_dimensions_are_alike(layer: Any) -> None:
    dims = {nn.Conv1d: 1, nn.Conv3d: 3}[layer]
    with trainfit.simulate("RTX 4090") as simulation:
        images = torch.zeros(N, C, *[8] * dims).cuda().requires_grad_()
        layer(C, K, 3, padding=1).cuda()(images).sum().backward()
    sizes = [size for _, size in workspaces(simulation.recording)]
    copy = N * (C + K) * 8**dims * 4
    assert sizes == [copy, copy, 2 * copy]
