"""torchvision's compiled operators on the simulated device, next to whichever build is
installed."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import trainfit
from trainfit.results.runs.steps import KINDS
from trainfit.simgpu.operators import torchvision_operators

pytest.importorskip("PIL")


@pytest.fixture(autouse=True)
def simulation() -> Iterator[trainfit.Simulation]:
    with trainfit.simulate("RTX 4090") as sim:
        # cuBLAS's workspace and the like, once and for all.
        torch.ones(8, 8, device="cuda") @ torch.ones(8, 8, device="cuda")
        yield sim


def taken(function: Callable[[], Any]) -> tuple[Any, int, int]:
    """Result, and the bytes that a call takes at its peak and keeps."""
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    result = function()
    return (
        result,
        torch.cuda.max_memory_allocated() - before,
        torch.cuda.memory_allocated() - before,
    )


def boxes(count: int) -> torch.Tensor:
    return torch.rand(count, 4, device="cuda")


@pytest.mark.parametrize("name", ["roi_align", "roi_pool", "ps_roi_align", "ps_roi_pool"])
@pytest.mark.parametrize("last", [False, True])
def test_regions_are_pooled(name: str, last: bool) -> None:
    from torchvision import ops

    x = torch.rand(2, 64, 32, 32, device="cuda", requires_grad=True)
    source = x.contiguous(memory_format=torch.channels_last) if last else x
    rois = torch.cat([torch.zeros(20, 1, device="cuda"), boxes(20)], 1)
    size = 2 if name.startswith("ps") else 8
    out, peak, kept = taken(lambda: getattr(ops, name)(source, rois, size))
    channels = 16 if name.startswith("ps") else 64
    assert out.shape == (20, channels, size, size)
    # The index of each element's maximum, or its channel, is kept for the backward pass.
    nbytes = 4 * out.numel() * (1 if name == "roi_align" else 2)
    assert kept == nbytes
    assert peak == nbytes + (source.numel() * 4 if last else 0)
    out.sum().backward()
    assert x.grad is not None and x.grad.shape == x.shape and x.grad.is_contiguous()
    with torch.autocast("cuda"):
        assert getattr(ops, name)(source.half(), rois, size).dtype is torch.float16


@pytest.mark.parametrize(("batch", "at_once"), [(2, 2), (34, 17), (37, 1)])
def test_a_deformable_convolution_holds_its_columns(batch: int, at_once: int) -> None:
    from torchvision import ops

    layer = ops.DeformConv2d(8, 16, 3, padding=1, groups=2).cuda()
    x = torch.rand(batch, 8, 16, 16, device="cuda", requires_grad=True)
    offset = torch.rand(batch, 18, 16, 16, device="cuda", requires_grad=True)
    mask = torch.rand(batch, 9, 16, 16, device="cuda", requires_grad=True)
    out, peak, kept = taken(lambda: layer(x, offset, mask))
    result, columns = 4 * batch * 16 * 256, 4 * 8 * 9 * at_once * 256
    assert out.shape == (batch, 16, 16, 16) and kept == result
    assert peak == 3 * result + columns
    out.sum().backward()
    for each in (x, offset, mask, layer.weight, layer.bias):
        assert each is not None and each.grad is not None and each.grad.shape == each.shape


def test_its_products_are_counted(simulation: trainfit.Simulation) -> None:
    from torchvision import ops

    before = simulation.recording.kernel_flops.sum()
    x, weight = torch.rand(4, 8, 16, 16, device="cuda"), torch.rand(16, 8, 3, 3, device="cuda")
    ops.deform_conv2d(x, torch.rand(4, 18, 16, 16, device="cuda"), weight, padding=1)
    flops = simulation.recording.kernel_flops.sum() - before
    assert flops == pytest.approx(2 * 4 * 16 * 8 * 9 * 256, rel=0.01)


def test_suppression_downloads_the_overlaps(simulation: trainfit.Simulation) -> None:
    from torchvision import ops

    several, scores = boxes(1000), torch.rand(1000, device="cuda")
    kept, peak, left = taken(lambda: ops.nms(several, scores, 0.5))
    assert kept.shape == (1000,) and kept.dtype is torch.int64 and left == 8192
    assert peak >= 8192 + 16384 + 8 * 1000 * 16  # order, boxes in order, overlaps
    recording = simulation.recording
    downloads = recording.kernel_kind == KINDS.index("download")
    assert 8 * 1000 * 16 in recording.kernel_written[downloads]
    assert [text for text in recording.header["assumptions"] if "keep all 1000 boxes" in text]
    assert ops.nms(boxes(0), scores[:0], 0.5).shape == (0,)


@pytest.mark.parametrize(
    ("dets", "scores", "words"),
    [((5, 3), (5,), "4 elements"), ((5, 4), (4,), "same number"), ((5, 4), (5, 1), "1d tensor")],
)
def test_wrong_boxes_are_refused_in_torchvisions_words(dets: Any, scores: Any, words: str) -> None:
    from torchvision import ops

    with pytest.raises(RuntimeError, match=words):
        ops.nms(torch.rand(dets, device="cuda"), torch.rand(scores, device="cuda"), 0.5)


def detector(name: str) -> tuple[torch.nn.Module, dict[str, torch.Tensor]]:
    from torchvision.models import detection
    from torchvision.models.detection.mask_rcnn import MaskRCNN
    from torchvision.ops import MultiScaleRoIAlign

    target = {"boxes": torch.tensor([[4.0, 4, 40, 40]]), "labels": torch.tensor([1])}
    options: dict[str, Any] = {"weights": None, "weights_backbone": None, "num_classes": 2}
    if name == "mask_rcnn":
        backbone = detection.backbone_utils.mobilenet_backbone("mobilenet_v3_small", None, True)
        pool = MultiScaleRoIAlign(["0", "1"], 14, 2)
        model = MaskRCNN(
            backbone,
            2,
            min_size=64,
            max_size=64,
            mask_roi_pool=pool,
            rpn_anchor_generator=detection.anchor_utils.AnchorGenerator(
                ((32,), (64,), (128,)), ((1.0,),) * 3
            ),
        )
        return model, target | {"masks": torch.ones(1, 64, 64, dtype=torch.uint8)}
    make = getattr(detection, name)
    return make(**options, min_size=64, max_size=64), target


@pytest.mark.parametrize(
    "name",
    [
        "mask_rcnn",
        pytest.param("fasterrcnn_resnet50_fpn", marks=pytest.mark.slow),
        pytest.param("maskrcnn_resnet50_fpn", marks=pytest.mark.slow),
        pytest.param("retinanet_resnet50_fpn", marks=pytest.mark.slow),
        pytest.param("fcos_resnet50_fpn", marks=pytest.mark.slow),
    ],
)
def test_detectors_train_and_detect(name: str) -> None:
    model, target = detector(name)
    if name.startswith("maskrcnn"):
        target = target | {"masks": torch.ones(1, 64, 64, dtype=torch.uint8)}
    model.cuda()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    images = [torch.rand(3, 64, 64, device="cuda") for _ in range(2)]
    targets = [{key: value.cuda() for key, value in target.items()} for _ in images]
    for _ in range(2):
        losses = model(images, targets)
        optimizer.zero_grad()
        sum(losses.values()).backward()
        optimizer.step()
    trained = [each for each in model.parameters() if each.requires_grad]
    assert all(each.grad is not None for each in trained)
    model.eval()
    with torch.no_grad():
        assert len(model(images)) == 2


def test_tv_tensors_keep_their_kind_and_metadata() -> None:
    from torchvision import tv_tensors
    from torchvision.transforms import v2

    image = tv_tensors.Image(torch.zeros(3, 8, 8)).to("cuda")
    assert isinstance(image, tv_tensors.Image) and image.is_cuda
    assert not isinstance(image + 1, tv_tensors.Image)
    assert isinstance(v2.functional.horizontal_flip(image), tv_tensors.Image)
    found = tv_tensors.BoundingBoxes([[1, 2, 3, 4]], format="XYXY", canvas_size=(8, 8)).to(0)  # type: ignore[call-overload]
    assert isinstance(found, tv_tensors.BoundingBoxes) and found.is_cuda
    assert found.canvas_size == (8, 8)
    flipped = v2.RandomHorizontalFlip(p=1)({"image": image, "boxes": found})
    assert flipped["boxes"].is_cuda and flipped["boxes"].canvas_size == (8, 8)
    with tv_tensors.set_return_type("TVTensor"):
        assert isinstance(image + 1, tv_tensors.Image)


def test_a_build_that_does_not_load_is_named(
    simulation: trainfit.Simulation, tmp_path: Path
) -> None:
    loaded: list[Any] = []
    load = torchvision_operators._skipping(loaded.append, tmp_path)
    load(tmp_path / "other" / "_C.so")
    assert not simulation.recording.header["assumptions"]
    load(tmp_path / "_C.so")
    assert loaded == [tmp_path / "other" / "_C.so"]
    (said,) = simulation.recording.header["assumptions"]
    assert "doctor --only torchvision" in said


def test_masks_are_computed_of_the_positive_boxes_alone() -> None:
    """A quarter of the sampled ones at most, as the sampler is told."""
    from torchvision.models.detection.roi_heads import RoIHeads

    heads = RoIHeads(
        None, None, None,  # these only pool
        fg_iou_thresh=0.5, bg_iou_thresh=0.5, batch_size_per_image=64, positive_fraction=0.25,
        bbox_reg_weights=None, score_thresh=0.05, nms_thresh=0.5, detections_per_img=100,
    ).train()  # fmt: skip
    target = {"boxes": boxes(3), "labels": torch.ones(3, dtype=torch.int64, device="cuda")}
    chosen, _, labels, _ = heads.select_training_samples([boxes(500)], [target])
    assert chosen[0].shape == (64, 4)
    assert torch.where(labels[0] > 0)[0].shape == (16,)
    assert torch.where(torch.cat([labels[0], labels[0]]) > 0)[0].shape == (32,)
