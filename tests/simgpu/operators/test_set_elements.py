"""How many elements of a mask are set, where it was written at places that nobody knows."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

import trainfit

Mask = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]


def places(unknown: torch.Tensor, count: int) -> torch.Tensor:
    """So many places of an unknown tensor, as samplers draw them."""
    found = torch.where(unknown > 0.5)[0]
    return found[torch.randperm(found.numel(), device="cuda")[:count]]


def mask_of(unknown: torch.Tensor, count: int, dtype: torch.dtype = torch.uint8) -> torch.Tensor:
    mask = torch.zeros_like(unknown, dtype=dtype)
    mask[places(unknown, count)] = 1
    return mask


@pytest.mark.parametrize(
    ("made", "count"),
    [
        (lambda a, b: a, 20),
        (lambda a, b: a | b, 50),
        (lambda a, b: torch.logical_or(a, b), 50),
        (lambda a, b: torch.cat((a, b)), 50),
        (lambda a, b: a & b, 20),
        (lambda a, b: a * b, 20),
        (lambda a, b: (a | b).bool() & b.bool(), 30),
        (lambda a, b: a > 0, 20),
        (lambda a, b: b != 0, 30),
        (lambda a, b: a[:10], 10),
        (lambda a, b: a.clone().scatter_(0, torch.where(b)[0], 1), 50),
        (lambda a, b: a.view(2, 50).t(), 20),
        # Broadcast, what is set is repeated.
        (lambda a, b: a & torch.ones_like(b)[:3, None], 60),
        (lambda a, b: a.view(100, 1) | b.view(1, 100), 5000),
        (lambda a, b: a * 2, 20),
        # Nothing is known of these: all are taken.
        (lambda a, b: a == 0, 100),
        (lambda a, b: a.fill_(1), 100),
        (lambda a, b: a.add_(b), 100),
        (lambda a, b: a > -1, 100),
        (lambda a, b: a.expand(3, 100), 300),
        (lambda a, b: a.masked_fill_(b.bool(), 1), 100),
        (lambda a, b: a.index_put_((b.bool(),), torch.ones_like(a[0])), 100),
    ],
)  # fmt: skip
def test_what_is_set_is_counted(made: Mask, count: int) -> None:
    with trainfit.simulate("H100 SXM"):
        unknown = torch.rand(100, device="cuda")
        mask = made(mask_of(unknown, 20), mask_of(unknown, 30))
        assert torch.nonzero(mask).shape == (count, mask.dim())


def test_masks_choose_as_many_as_are_set() -> None:
    with trainfit.simulate("H100 SXM") as simulated:
        unknown = torch.rand(100, 4, device="cuda")
        mask = mask_of(unknown[:, 0], 20, torch.bool)
        assert unknown[mask].shape == (20, 4)
        assert torch.masked_select(unknown[:, 0], mask).shape == (20,)
        # Rows: each place is four elements.
        assert unknown[mask_of(unknown, 20, torch.bool)].shape == (80,)
        said = " ".join(simulated.recording.header["assumptions"])
    assert "an unknown mask was assumed to select the 20 elements that were set" in said


def test_a_known_mask_is_counted_until_it_is_written_at_unknown_places() -> None:
    with trainfit.simulate("H100 SXM"):
        mask = torch.tensor([1, 0, 0, 1, 0, 0, 0, 0], device="cuda", dtype=torch.bool)
        mask[places(torch.rand(8, device="cuda"), 3)] = True
        assert torch.where(mask)[0].shape == (5,)
        mask.zero_()
        assert torch.where(mask)[0].shape == (0,)


def test_a_detector_samples_as_many_boxes_as_it_says() -> None:
    """torchvision's sampler: 512 of 2,000 proposals, a quarter of them positive."""
    with trainfit.simulate("H100 SXM"):
        labels = torch.rand(2000, device="cuda").mul(3).long()
        masks = []
        for count in (128, 384):
            mask = torch.zeros_like(labels, dtype=torch.uint8)
            mask[places(labels, count)] = 1
            masks.append(mask)
        assert torch.where(masks[0] | masks[1])[0].shape == (512,)


@pytest.mark.parametrize("size", [(2, 8), (64, 8192)])
def test_a_mask_of_ones_is_known_whatever_it_is_made_like(size: tuple[int, int]) -> None:
    """Transformers asks whether a mask leaves anything out: without, attention has none."""
    with trainfit.simulate("H100 SXM") as simulated:
        ids = torch.randint(0, 100, size, device="cuda")
        assert (torch.ones_like(ids).to(torch.bool)).all().item() is True
        assert (ids.new_ones(size) == 1).all().item() is True
        assert torch.full_like(ids, 3).min().item() == 3
        assert ids.new_full(size, 3).max().item() == 3
        assert bool(torch.zeros_like(ids).any()) is False
        assert not simulated.recording.header["assumptions"]


@pytest.mark.parametrize("number", [0, 1])
def test_a_large_mask_that_leaves_nothing_out_is_known(number: int) -> None:
    with trainfit.simulate("H100 SXM") as simulated:
        mask = torch.full((16, 1 << 15), number).to("cuda")
        assert bool(mask.to(torch.bool).all()) is bool(number)
        assert not simulated.recording.header["assumptions"]
        padded = torch.ones(16, 1 << 15, dtype=torch.int64)
        padded[3, -5:] = 0
        assert bool(padded.to("cuda").to(torch.bool).all()) is False
        assert simulated.recording.header["assumptions"]


def _denoising_mask() -> torch.Tensor:
    """Of 4 images with 5, 5, 3 and 8 boxes: the first half of each group of twice the most boxes,
    without its padding, as detectors with denoising queries make it."""
    counts, most, groups = (5, 5, 3, 8), 8, 12
    is_box = torch.zeros(4, most, dtype=torch.bool, device="cuda")
    for i, count in enumerate(counts):
        is_box[i, :count] = 1
    negative = torch.zeros(4, most * 2, 1, device="cuda")
    negative[:, most:] = 1
    negative = negative.tile([1, groups, 1])
    return (1 - negative).squeeze(-1) * is_box.tile([1, 2 * groups])


def _rows_at(like: torch.Tensor) -> torch.Tensor:
    made = torch.zeros_like(like)
    made[torch.arange(7, device="cuda")] = 1.0
    return made


@pytest.mark.parametrize(
    ("made", "count"),
    [
        (lambda like: _denoising_mask(), 21 * 12),
        (lambda like: torch.ones(500, device="cuda", dtype=torch.float16), 500),
        (lambda like: torch.full((20, 20), -torch.inf, device="cuda").triu(1), 190),
        (lambda like: torch.empty(300, device="cuda").fill_(0), 0),
        (_rows_at, 700),
        (lambda like: like.new_zeros(300), 0),
        (lambda like: torch.cat((like.new_zeros(300), like.new_ones(30))), 30),
        (lambda like: torch.where(torch.arange(300, device="cuda") < 40, 1.0, 0.0), 40),
        (lambda like: like.new_zeros(300).masked_fill(_rows_at(like)[:, 0].repeat(3) > 0, 1), 21),
        (lambda like: (torch.arange(300, device="cuda") < 40).float() - 1, 260),
    ],
)  # fmt: skip
def test_floats_made_of_constants_are_known(
    made: Callable[[torch.Tensor], torch.Tensor], count: int
) -> None:
    with trainfit.simulate("H100 SXM"):
        mask = made(torch.rand(100, 100, device="cuda"))
        assert mask.numel() > 64
        assert len(torch.nonzero(mask)) == count
        assert int((mask != 0).sum()) == count


@pytest.mark.parametrize(
    "made",
    [
        lambda like: torch.zeros_like(like).add_(like),
        lambda like: torch.zeros_like(like) + like,
        lambda like: torch.zeros_like(like).index_put_((like > 0.5,), like[0, 0]),
        lambda like: torch.zeros_like(like).copy_(like),
        lambda like: torch.empty_like(like),
        lambda like: torch.zeros_like(like).normal_(),
    ],
)
def test_floats_that_data_was_written_to_are_not(
    made: Callable[[torch.Tensor], torch.Tensor],
) -> None:
    with trainfit.simulate("H100 SXM"):
        mask = made(torch.rand(100, 100, device="cuda"))
        assert len(torch.nonzero(mask)) == mask.numel()


def test_a_state_that_a_fused_optimizer_writes_is_not_known() -> None:
    with trainfit.simulate("H100 SXM"):
        layer = torch.nn.Linear(8, 8, device="cuda")
        optimizer = torch.optim.AdamW(layer.parameters(), fused=True)
        layer(torch.rand(10, 8, device="cuda")).sum().backward()
        optimizer.step()
        state = optimizer.state[layer.weight]["exp_avg"]
        assert len(torch.nonzero(state)) == state.numel()


def test_a_part_that_is_filled_says_nothing_of_the_rest() -> None:
    with trainfit.simulate("H100 SXM"):
        labels = torch.randint(0, 5, (40, 10), device="cuda")
        labels[:, :1] = 0
        assert len(torch.nonzero(labels)) == 400
        large = torch.zeros_like(torch.rand(1000, 1000, device="cuda"), dtype=torch.int64)
        assert not large.any()
        large[0, :10] = 1
        large[0, 20:] = 0
        assert large.sum().item() != 0
        large.fill_(3)
        assert large.max().item() == 3


# --- Masks of floating point that the host made --------------------------------------------------


@pytest.mark.parametrize(
    ("made", "is_known"),
    [
        (lambda: torch.log(torch.tril(torch.ones(35, 35))), True),
        (lambda: torch.nn.Transformer.generate_square_subsequent_mask(35), True),
        (lambda: torch.eye(100), True),
        (lambda: torch.zeros(2, 1, 40, 40), True),
        (lambda: torch.rand(35, 35), False),
        (lambda: torch.tril(torch.ones(35, 35)) * 0.5, False),
        (lambda: torch.zeros(35, 36), False),
        (lambda: torch.eye(600), False),  # more than is followed of whole numbers
    ],
)
def test_a_mask_of_the_host_is_known_on_the_gpu(
    made: Callable[[], torch.Tensor], is_known: bool
) -> None:
    with trainfit.simulate("H100 SXM") as simulation:
        content = simulation.engine.values.read(made().cuda())
        assert (content is not None) is is_known


def test_pytorchs_encoder_sees_that_a_mask_of_the_host_is_causal() -> None:
    """As the word language model of pytorch/examples makes it: it was computed with a mask."""
    with trainfit.simulate("RTX 4090") as simulation:
        layer = torch.nn.TransformerEncoderLayer(64, 2, 64).cuda()
        encoder = torch.nn.TransformerEncoder(layer, 1, enable_nested_tensor=False)
        encoder(torch.rand(35, 4, 64).cuda(), torch.log(torch.tril(torch.ones(35, 35))).cuda())
        assert not simulation._assumptions()


def test_pairs_of_views_are_chosen_by_the_hosts_mask() -> None:
    """SimCLR's loss: of 2 views of 8 samples one positive for each, 14 negatives."""
    with trainfit.simulate("RTX 4090"):
        numbers = torch.cat([torch.arange(8)] * 2)
        pairs = (numbers[:, None] == numbers).float().cuda()
        off = ~torch.eye(16, dtype=torch.bool).cuda()
        pairs = pairs[off].view(16, -1)
        alike = torch.rand(16, 16, device="cuda")[off].view(16, -1)
        assert alike[pairs.bool()].view(16, -1).shape == (16, 1)
        assert alike[~pairs.bool()].view(16, -1).shape == (16, 14)


# --- Rows of labels that the host made -----------------------------------------------------------


def _boxes() -> torch.Tensor:
    """Of 8 pictures, 30 boxes: picture, class, and where it is."""
    torch.manual_seed(0)
    return torch.cat((torch.arange(30.0).remainder(8)[:, None], torch.rand(30, 5)), 1)


def test_a_pictures_boxes_are_as_many_as_it_has() -> None:
    """YOLOv7's loss matches each picture's boxes to its anchors: with those of all pictures in
    each it asked for 4.85 GiB, and was said not to fit on an RTX 4090."""
    boxes = _boxes()
    with trainfit.simulate("RTX 4090"):
        on_gpu = boxes.cuda()
        for picture in range(8):
            mine = on_gpu[on_gpu[:, 0] == picture]
            assert mine.shape == (4 if picture < 6 else 3, 6)


def test_anchors_that_match_by_their_shape_are_chosen_as_on_the_gpu() -> None:
    """YOLOv5's build_targets, on the host and on the simulated GPU."""

    def matched(targets: torch.Tensor, anchors: torch.Tensor) -> tuple[int, ...]:
        device = targets.device
        gain = torch.ones(7, device=device)
        which = torch.arange(3, device=device).float().view(3, 1).repeat(1, len(targets))
        t = torch.cat((targets.repeat(3, 1, 1), which[:, :, None]), 2) * gain
        ratio = t[:, :, 4:6] / anchors[:, None]
        t = t[torch.max(ratio, 1.0 / ratio).max(2)[0] < 4.0]
        gxy = 20 * t[:, 2:4]
        j, k = ((gxy % 1.0 < 0.5) & (gxy > 1.0)).T
        return len(t), len(t.repeat((3, 1, 1))[torch.stack((torch.ones_like(j), j, k))])

    boxes, anchors = _boxes(), torch.tensor([[0.1, 0.2], [0.4, 0.3], [0.9, 0.9]])
    told = matched(boxes, anchors)
    assert 0 < told[0] < 90 and told[0] < told[1] < 3 * told[0]
    with trainfit.simulate("RTX 4090"):
        assert matched(boxes.cuda(), anchors.cuda()) == told


def test_padded_rows_are_counted() -> None:
    """YOLOX: rows of zeros fill each picture's labels up."""
    labels = torch.zeros(4, 120, 5)
    for picture in range(4):
        labels[picture, : 5 + picture] = 1
    with trainfit.simulate("RTX 4090"):
        count = (labels.cuda().sum(dim=2) > 0).sum(dim=1)
        assert [int(each) for each in count] == [5, 6, 7, 8]


@pytest.mark.parametrize("shape", [(8, 3, 16, 16), (8, 100), (400, 400, 2)])
def test_inputs_are_not_followed(shape: tuple[int, ...]) -> None:
    with trainfit.simulate("RTX 4090") as simulation:
        assert simulation.engine.values.read(torch.rand(shape).cuda()) is None
