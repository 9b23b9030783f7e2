"""What the tensors of a failed call say of the cause: the line that made them, the layer's name."""

from __future__ import annotations

import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import TensorDataset

import trainfit
from helpers_learning import observing
from trainfit.findings.facts import FailureContext
from trainfit.findings.failure import of_exception
from trainfit.results.findings import Finding
from trainfit.results.runs.operands import NO_CALL, FailedCall
from trainfit.simgpu.session import Simulation

HERE = Path(__file__)
CLASSES = torch.zeros(8, dtype=torch.long)


@pytest.fixture(scope="module")
def simulation() -> Iterator[Simulation]:
    with trainfit.simulate("T4") as simulated:
        yield simulated


Explained = Callable[[Callable[[], Any]], Finding]


@pytest.fixture
def explained(simulation: Simulation) -> Explained:
    def of(fails: Callable[[], Any]) -> Finding:
        with observing(simulation, counts_in_place=False) as observer:
            try:
                fails()
            except Exception as error:
                call = observer.misuse.origins.of_failure(error)
                text = "".join(traceback.format_exception(error))
        found = of_exception(text, seen=FailureContext(call=call))
        assert found is not None
        # Neither what runs without a device, nor a run that told nothing, loses its explanation.
        assert of_exception(text, seen=FailureContext()).kind == found.kind  # type: ignore[union-attr]
        return found

    return of


def line_of(text: str) -> int:
    """The only line of this file with these words that is not this function's caller."""
    lines = HERE.read_text().splitlines()
    return next(number for number, each in enumerate(lines, 1) if each.strip().startswith(text))


class Convolutions(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(1, 4, 3)
        self.fc = nn.Linear(100, 3)

    def forward(self, x: torch.Tensor) -> Any:
        x = self.conv(x).relu()
        x = x.view(-1, 100)
        return self.fc(x)


def test_a_view_that_breaks_samples_apart_is_named_with_its_line(explained: Explained) -> None:
    model = Convolutions().cuda()
    x = torch.zeros(8, 1, 12, 12, device="cuda")
    found = explained(lambda: F.cross_entropy(model(x), CLASSES.cuda()))
    assert "view at" in found.title and "makes (32, 100) of (8, 4, 10, 10)" in found.title
    assert found.place is not None and found.place.line == line_of("x = x.view(-1, 100)")
    assert "in_features=400" in found.fix.action


def test_the_last_sample_in_place_of_the_last_step(explained: Explained) -> None:
    rnn = nn.LSTM(4, 3, batch_first=True).cuda()

    def fails() -> Any:
        output, _ = rnn(torch.zeros(8, 5, 4, device="cuda"))
        return F.cross_entropy(output[-1], CLASSES.cuda())

    found = explained(fails)
    assert "gives (5, 3) of (8, 5, 3)" in found.title and "x[:, -1]" in found.fix.action


def test_outputs_and_targets_of_two_masks(explained: Explained) -> None:
    tokens = torch.ones(4, 6, dtype=torch.long, device="cuda")
    keep = torch.arange(24, device="cuda").view(4, 6) % 3 == 0
    logits = torch.zeros(4, 6, 9, device="cuda")

    def fails() -> Any:
        return F.cross_entropy(logits[keep], tokens[:, 1:][keep[:, 1:]])

    found = explained(fails)
    assert "by one mask" in found.fix.action, found.title


def test_what_ends_a_graph_is_named(explained: Explained) -> None:
    layer = nn.Linear(4, 3).cuda()

    def fails() -> Any:
        chosen = layer(torch.zeros(8, 4, device="cuda")).argmax(1).float()
        F.mse_loss(chosen, CLASSES.cuda().float()).backward()

    found = explained(fails)
    assert "argmax at" in found.title and "derivative" in found.fix.action
    assert found.place is not None and found.place.line == line_of("chosen = layer(")


def test_a_loss_without_any_parameter_names_no_line(explained: Explained) -> None:
    def fails() -> Any:
        F.mse_loss(torch.zeros(3, device="cuda"), torch.ones(3, device="cuda")).backward()

    assert " ends it" not in explained(fails).title


def test_a_term_that_is_computed_once_is_named(explained: Explained) -> None:
    layer = nn.Linear(4, 3).cuda()
    optimizer = torch.optim.SGD(layer.parameters(), 0.1)
    x = torch.zeros(8, 4, device="cuda")

    def fails() -> Any:
        penalty = layer.weight.pow(2).sum()
        for _ in range(3):
            (F.cross_entropy(layer(x), CLASSES.cuda()) + penalty).backward()
            optimizer.step()

    found = explained(fails)
    assert found.place is not None and found.place.line == line_of("penalty = layer")
    assert "in each step" in found.fix.action


def test_a_transposed_convolution_that_rounds_down(explained: Explained) -> None:
    up = nn.ConvTranspose2d(2, 1, 3, 2, 1).cuda()

    def fails() -> Any:
        image = torch.zeros(2, 1, 14, 14, device="cuda")
        return F.mse_loss(up(torch.zeros(2, 2, 7, 7, device="cuda")).sigmoid(), image)

    found = explained(fails)
    assert "conv_transpose2d" in found.title and "output_padding=1" in found.fix.action


class Listed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = [nn.Linear(4, 4)]
        self.mask = torch.ones(4)

    def forward(self, x: torch.Tensor) -> Any:
        return self.blocks[0](x)


class Masked(Listed):
    def forward(self, x: torch.Tensor) -> Any:
        return x * self.mask


def test_layers_in_a_plain_list_are_named(explained: Explained) -> None:
    model = Listed().cuda()
    found = explained(lambda: model(torch.zeros(2, 4, device="cuda")))
    assert "self.blocks[0] (Linear) is in self.blocks" in found.title
    assert "nn.ModuleList" in found.fix.action


def test_what_is_on_the_host_is_named(explained: Explained) -> None:
    model = Masked().cuda()
    found = explained(lambda: model(torch.zeros(2, 4, device="cuda")))
    assert "self.mask (4) is on the CPU" in found.title
    assert 'register_buffer("mask"' in found.fix.action


class Widths(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(4))
        self.fc = nn.Linear(10, 2)


@pytest.mark.parametrize(
    ("of", "shape", "said", "fix"),
    [
        (lambda it: it.fc, (8, 20), "self.fc (Linear) gets (8, 20)", "nn.Linear(20, 2)"),
        (lambda it: it.fc, (8, 5, 2), "self.fc (Linear) gets (8, 5, 2)", "x.flatten(1)"),
        (lambda it: it.body, (2, 3, 9, 9), "self.body[1] (BatchNorm2d)", "nn.BatchNorm2d(8)"),
        (lambda it: it.body, (2, 9, 9, 3), "self.body[0] (Conv2d)", "x.permute(0, 3, 1, 2)"),
        (lambda it: it.body, (2, 1, 9, 9), "self.body[0] (Conv2d)", 'convert("RGB")'),
        (lambda it: it.body, (2, 5, 9, 9), "self.body[0] (Conv2d)", "in_channels=5"),
    ],
)
def test_the_layer_and_the_size_that_it_needs(
    explained: Explained, of: Callable[[Widths], nn.Module], shape: Any, said: str, fix: str
) -> None:
    self = Widths().cuda()  # as a method of the script's calls it
    found = explained(lambda: of(self)(torch.zeros(shape, device="cuda")))
    assert said in found.title and fix in found.fix.action


@pytest.mark.parametrize(
    ("target", "fix"),
    [
        (torch.zeros(8, 1, dtype=torch.long), "y.squeeze(1)"),
        (torch.zeros(8, 3, dtype=torch.long), "y.argmax(1)"),
        (torch.zeros(8, dtype=torch.int32), "y.long()"),
    ],
)
def test_targets_are_told_with_shape_and_type(
    explained: Explained, target: torch.Tensor, fix: str
) -> None:
    output = torch.zeros(8, 3, device="cuda")
    found = explained(lambda: F.cross_entropy(output, target.cuda()))
    assert "output (8, 3) float32, target (8" in found.title and fix in found.fix.action


def test_nothing_comes_of_what_cannot_be_looked_at(simulation: Simulation) -> None:
    class Odd(Exception):
        @property
        def __traceback__(self) -> Any:  # type: ignore[override]
            raise ValueError

    with observing(simulation, counts_in_place=False) as observer:
        assert observer.misuse.origins.of_failure(Odd()) == FailedCall() == NO_CALL


def test_what_is_joined_has_the_name_of_its_operator(explained: Explained) -> None:
    up = nn.ConvTranspose2d(4, 4, 2, 2).cuda()

    def fails() -> Any:
        skip = torch.zeros(2, 4, 25, 25, device="cuda").relu()
        small = F.max_pool2d(skip, 2)
        return torch.cat([up(small), skip], 1)

    found = explained(fails)
    assert (
        "conv_transpose2d(…) (2, 4, 24, 24)" in found.title and "skip (2, 4, 25, 25)" in found.title
    )
    assert "small" not in found.title and "size=[25, 25]" in found.fix.action


@pytest.mark.parametrize(
    ("made", "fix"),
    [
        (lambda: nn.Conv2d(4, 8, 3, padding=1), "nn.Conv2d(4, 8, 1)"),
        (lambda: nn.Conv2d(4, 8, 3, 2, 1), "nn.Conv2d(4, 8, 1, stride=2)"),
        (lambda: nn.Conv2d(4, 4, 3, 2, 1), "nn.Conv2d(4, 4, 1, stride=2)"),
    ],
)
def test_a_shortcut_of_another_shape(explained: Explained, made: Any, fix: str) -> None:
    layer = made().cuda()

    def fails() -> Any:
        x = torch.zeros(2, 4, 8, 8, device="cuda")
        out = layer(x)
        return out + x

    assert fix in explained(fails).fix.action


def test_a_mask_of_a_layer_that_wants_positions_first(explained: Explained) -> None:
    layer = nn.MultiheadAttention(8, 2).cuda()
    x = torch.zeros(4, 6, 8, device="cuda")

    def fails(length: int) -> Any:
        mask = torch.zeros(length, length, dtype=torch.bool, device="cuda")
        return layer(x, x, x, attn_mask=mask)

    assert "batch_first=True" in explained(lambda: fails(6)).fix.action
    assert "batch_first=True of" not in explained(lambda: fails(5)).fix.action


def test_what_changes_a_tensor_in_place_is_named(explained: Explained) -> None:
    layer = nn.Linear(4, 3).cuda()

    def fails() -> Any:
        gate = layer(torch.zeros(8, 4, device="cuda")).sigmoid()
        gate += 1
        gate.sum().backward()

    found = explained(fails)
    assert "changes what sigmoid gave" in found.title
    assert found.place is not None and found.place.line == line_of("gate += 1")


def test_an_assignment_to_a_part_is_a_change_in_place(explained: Explained) -> None:
    layer = nn.Linear(4, 3).cuda()

    def fails() -> Any:
        rates = layer(torch.zeros(8, 4, device="cuda")).exp()
        rates[:, 0] = 1
        rates.sum().backward()

    found = explained(fails)
    assert found.place is not None and found.place.line == line_of("rates[:, 0] = 1")


def test_a_recurrent_layer_and_the_size_of_its_input(explained: Explained) -> None:
    self = nn.ModuleDict({"rnn": nn.GRU(10, 4, batch_first=True)}).cuda()
    x = torch.zeros(2, 5, 8, device="cuda")
    found = explained(lambda: self["rnn"](x))
    assert "self.rnn (GRU) gets (2, 5, 8)" in found.title and "nn.GRU(8, …)" in found.fix.action


def test_images_next_to_their_pixels(explained: Explained) -> None:
    pixels, images = (torch.zeros(shape, device="cuda") for shape in ((4, 9), (4, 1, 3, 3)))
    found = explained(lambda: F.binary_cross_entropy(pixels, images))
    assert "y.flatten(1)" in found.fix.action
    column = torch.zeros(4, 1, device="cuda")
    found = explained(lambda: F.binary_cross_entropy(column, torch.zeros(4, device="cuda")))
    assert "squeeze(1)" in found.fix.action


def test_an_embedding_that_renormalizes_its_weight(explained: Explained) -> None:
    layer = nn.Embedding(9, 4, max_norm=1.0).cuda()
    tokens = torch.zeros(3, dtype=torch.long, device="cuda")

    def fails() -> Any:
        scores = layer.weight @ layer.weight.t()
        (layer(tokens).sum() + scores.square().sum()).backward()

    found = explained(fails)
    assert "max_norm" in found.title
    assert found.place is not None and found.place.line == line_of("(layer(tokens).sum()")


def test_a_graph_that_ends_in_numpy(explained: Explained) -> None:
    layer = nn.Linear(4, 3).cuda()

    def fails() -> Any:
        output = layer(torch.zeros(8, 4, device="cuda")).detach()
        torch.tensor(output.cpu().numpy().mean()).backward()

    found = explained(fails)
    assert found.place is not None and found.place.line == line_of("output = layer(")


def test_samples_and_labels_of_a_split(explained: Explained) -> None:
    samples, labels = np.zeros((8, 3)), np.zeros(2)
    found = explained(lambda: TensorDataset(torch.from_numpy(samples), torch.from_numpy(labels)))
    assert found.kind == "sizes_of_data" and "train_test_split" in found.fix.action


# --- Without operands -------------------------------------------------------------------------


def _of(fails: Callable[[], Any]) -> Finding | None:
    try:
        fails()
    except Exception:
        return of_exception(traceback.format_exc())
    raise AssertionError("it does not fail")


def test_whole_numbers_that_are_averaged_in_place() -> None:
    counter = torch.zeros((), dtype=torch.long)
    found = _of(lambda: counter.mul_(0.999))
    assert found is not None and found.kind == "whole_in_place"
    loss = _of(lambda: F.binary_cross_entropy_with_logits(torch.zeros(2), torch.ones(2).long()))
    assert loss is not None and loss.kind == "target_type"


def test_whole_numbers_as_weights_of_classes() -> None:
    weight = torch.tensor([1, 2, 3])
    found = _of(lambda: F.cross_entropy(torch.zeros(8, 3), CLASSES, weight=weight))
    assert found is not None and found.kind == "class_weights"


def test_a_class_in_place_of_its_object() -> None:
    found = _of(lambda: Widths.parameters())  # type: ignore[call-arg]
    assert found is not None and found.kind == "class_called"


def test_a_model_with_a_lambda_is_saved_whole(tmp_path: Path) -> None:
    model = nn.Linear(1, 1)
    model.act = lambda x: x  # type: ignore[assignment]
    found = _of(lambda: torch.save(model, tmp_path / "model.pt"))
    assert found is not None and found.kind == "saved_whole"
    torch.save(model.state_dict(), tmp_path / "model.pt")


@pytest.mark.parametrize(
    "change", [lambda x: x.mul_(0.5), lambda x: x.add_(torch.ones((), device="cuda"))]
)
def test_the_device_refuses_what_its_tensor_cannot_hold(
    simulation: Simulation, change: Callable[[torch.Tensor], Any]
) -> None:
    with pytest.raises(RuntimeError, match="result type Float can't be cast to the desired output"):
        change(torch.zeros((), dtype=torch.long, device="cuda"))
    for dtype in (torch.float16, torch.bfloat16, torch.float64):
        change(torch.zeros((), dtype=dtype, device="cuda"))
    torch.zeros(3, dtype=torch.long, device="cuda").add_(1).mul_(2)


def test_the_device_refuses_whole_numbers_as_weights(simulation: Simulation) -> None:
    output, target = torch.zeros(8, 3, device="cuda"), CLASSES.cuda()
    with pytest.raises(RuntimeError, match="expected scalar type Float but found Long"):
        F.cross_entropy(output, target, weight=torch.tensor([1, 2, 3], device="cuda"))
    F.cross_entropy(output, target, weight=torch.ones(3, device="cuda"))


def test_labels_of_text() -> None:
    found = _of(lambda: F.cross_entropy(torch.zeros(2, 3), ("cat", "dog")))  # type: ignore[arg-type]
    assert found is not None and found.kind == "targets_as_list"


def test_an_iterator_at_its_end() -> None:
    def fails() -> Any:
        batches = iter([1])
        while True:
            next(batches)

    found = _of(fails)
    assert found is not None and found.kind == "iterator_at_end"


def test_what_is_changed_in_place_and_what_needs_it(explained: Explained) -> None:
    def fails() -> None:
        gate = torch.sigmoid(torch.ones(4, 4, requires_grad=True, device="cuda"))
        scaled = 2 * gate
        gate += 1.0  # after the sigmoid
        scaled.sum().backward()

    found = explained(fails)
    assert found.place is not None and found.place.line == line_of("gate += 1.0  # after")
    needs = line_of("gate = torch.sigmoid(torch.ones(4, 4")
    assert f"the derivative of sigmoid at {HERE.name}:{needs}" in found.title.replace(
        f"{HERE.parent}/", ""
    ).replace("tests/findings/", "")


def test_an_optimizer_that_steps_before_a_backward_pass(explained: Explained) -> None:
    def fails() -> None:
        net = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 1)).cuda()
        optimizer = torch.optim.SGD(net.parameters(), 0.1)
        loss, other = (net(torch.ones(2, 4, device="cuda", requires_grad=True)) for _ in range(2))
        loss.sum().backward()
        optimizer.step()  # before the other
        other.sum().backward()

    found = explained(fails)
    assert "optimizer.step() at" in found.title
    assert found.place is not None
    assert found.place.line == line_of("optimizer.step()  # before the other")


def test_channels_that_are_another_dimension(explained: Explained) -> None:
    net = nn.Sequential(nn.Conv3d(3, 4, 3)).cuda()
    found = explained(lambda: net(torch.rand(2, 16, 3, 8, 8, device="cuda")))
    assert found.fixes[0].action.startswith("x.permute(0, 2, 1, 3, 4)")


def test_samples_that_a_view_makes_channels(explained: Explained) -> None:
    net = nn.Sequential(nn.Conv2d(3, 4, 3)).cuda()

    def fails() -> None:
        images = torch.rand(6, 3, 8, 8).cuda()
        net(images.reshape(1, -1, 8, 8))

    assert "6 samples" in explained(fails).fixes[0].action


def test_an_index_without_a_row(explained: Explained) -> None:
    net = nn.Sequential(nn.Embedding(5, 4)).cuda()
    found = explained(lambda: net(torch.tensor([0, -1, 2]).cuda()))
    assert "-1, and net[0] has 5 rows" in found.title and "codes + 1" in found.fixes[0].action
    found = explained(lambda: net(torch.tensor([0, 7]).cuda()))
    assert "nn.Embedding(8" in found.fixes[0].action


def test_a_tensor_of_an_object_that_is_no_module(explained: Explained) -> None:
    class Schedule:
        def __init__(self) -> None:
            self.alphas = torch.rand(10)

        def of(self, steps: torch.Tensor) -> torch.Tensor:
            return self.alphas[steps]

    found = explained(lambda: Schedule().of(torch.tensor([1, 2]).cuda()))
    assert "self.alphas (10) is on the CPU" in found.title


def test_a_loss_that_is_a_number(explained: Explained) -> None:
    def fails() -> None:
        loss: object = torch.rand(3, device="cuda", requires_grad=True).sum().item()
        loss.backward()  # type: ignore[attr-defined]

    assert explained(fails).kind == "loss_is_number"


def test_positions_of_a_model_for_other_images(explained: Explained) -> None:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.positions = nn.Parameter(torch.zeros(1, 5, 8))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x + self.positions

    net = Net().cuda()
    found = explained(lambda: net(torch.rand(2, 10, 8).cuda()))
    assert "self.positions is made for 5 positions, and x has 10" in found.title


def test_a_window_on_the_cpu_and_a_mask_of_whole_numbers(explained: Explained) -> None:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.window = torch.hann_window(400)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return torch.stft(x, 400, window=self.window, return_complex=True)

    found = explained(lambda: Net().cuda()(torch.rand(2, 4000).cuda()))
    assert found.kind == "two_devices" and "register_buffer" in found.fixes[0].action
    x = torch.rand(2, 4, 8, 16, device="cuda")
    mask = torch.ones(2, 1, 1, 8, device="cuda").long()
    found = explained(lambda: F.scaled_dot_product_attention(x, x, x, attn_mask=mask))
    assert found.kind == "mask_type" and "mask.bool()" in found.fixes[0].action


def test_a_mask_with_fewer_dimensions(explained: Explained) -> None:
    loss, padding = torch.rand(4, 5, 7).cuda(), torch.zeros(4, 5).cuda()
    found = explained(lambda: loss * padding)
    assert "padding (4, 5)" in found.title and "unsqueeze(-1)" in found.fixes[0].action
    factor = torch.rand(4).cuda()
    assert "x.view(-1, 1, 1)" in explained(lambda: loss * factor).fixes[0].action
