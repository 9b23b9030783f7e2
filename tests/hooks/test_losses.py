"""Loss functions that get something else than they are for, layers that are made in each step, and
gradients that nobody uses: seen on the CPU and on the simulated device; nothing else is."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import trainfit
from helpers_learning import findings_of
from trainfit.hooks.learning import LearningObserver
from trainfit.hooks.losses import product_of
from trainfit.results.findings import Finding
from trainfit.simgpu.session import Simulation

Loss = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
Found = Callable[..., tuple[Finding, ...]]


@pytest.fixture(params=["cpu", "cuda"])
def found(request: pytest.FixtureRequest) -> Iterator[Found]:
    """Runs steps of models, one after the other, and tells the findings."""
    if request.param == "cpu":
        yield functools.partial(_findings, "cpu", None)
    else:
        with trainfit.simulate("T4") as simulation:
            yield functools.partial(_findings, "cuda", simulation)


@pytest.fixture
def simulated() -> Iterator[Found]:
    """Likewise of what is seen on the simulated device only."""
    with trainfit.simulate("T4") as simulation:
        yield functools.partial(_findings, "cuda", simulation)


def _findings(
    device: str,
    simulation: Simulation | None,
    *models: nn.Module,
    loss: Loss = lambda output, _: output.mean(),
    trained: Callable[[], Any] | None = None,
    step: Callable[[torch.Tensor], torch.Tensor] | None = None,
) -> tuple[Finding, ...]:
    def training(observer: LearningObserver) -> None:
        for model in models:
            model.to(device)
            model.register_forward_hook(lambda module, _, output: observer.returned(module, output))
        parameters = trained() if trained is not None else models[0].parameters()
        optimizer = torch.optim.SGD(parameters, 0.1)
        targets = torch.zeros(8, dtype=torch.long).to(device)
        for _ in range(4):
            for model in models:
                observer.called(model)
            x = torch.randn(8, 16).to(device)
            loss(step(x) if step is not None else models[0](x), targets).backward()
            optimizer.step()
            optimizer.zero_grad()

    return findings_of(training, simulation)


def kinds(findings: tuple[Finding, ...]) -> list[str]:
    return [finding.kind for finding in findings]


KL_DIV = nn.KLDivLoss(reduction="batchmean")


def net(outputs: int = 4) -> nn.Module:
    return nn.Sequential(nn.Linear(16, 16), nn.ReLU(), nn.Linear(16, outputs))


def test_a_loss_that_needs_an_activation_before_it(found: Found) -> None:
    for loss, instead in (
        (F.nll_loss, "cross_entropy"),
        (lambda output, y: F.nll_loss(output.relu(), y), "cross_entropy"),
        (lambda output, _: KL_DIV(output, torch.full_like(output, 0.25)), "log_softmax"),
    ):
        (finding,) = found(net(), loss=loss)
        assert finding.kind == "activation_missing" and finding.severity == "critical"
        assert instead in finding.fixes[0].action
        assert finding.place is not None and finding.place.file.endswith("test_losses.py")


def test_probabilities_of_a_layer_s_output(found: Found) -> None:
    """On the CPU PyTorch refuses them where they are none; it does not look at these."""

    def loss(output: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return nn.BCELoss()(output.squeeze(1), y.float())

    layer = nn.Linear(16, 1)
    with torch.no_grad():
        layer.weight.zero_()
        layer.bias.fill_(0.5)
    (finding,) = found(
        layer, loss=loss, trained=lambda: [{"params": layer.parameters(), "lr": 1e-9}]
    )
    assert finding.kind == "activation_missing"
    assert "BCEWithLogitsLoss" in finding.fixes[0].action


def test_the_matmul_of_a_layer_that_adds_its_bias() -> None:
    value, weight = torch.randn(4, 12, 16, requires_grad=True), torch.randn(16, 5)
    bias = nn.Parameter(torch.zeros(5))
    assert product_of((value @ weight + bias).grad_fn) is not None
    assert product_of((value.relu() + value.tanh()).grad_fn) is None
    assert product_of((value.relu() @ weight + value.tanh() @ weight).grad_fn) is None
    assert product_of((nn.Linear(16, 5)(value) + bias).grad_fn) is None  # it has one of its own
    assert product_of(None) is None


def test_one_class(found: Found) -> None:
    (finding,) = found(net(1), loss=F.cross_entropy)
    assert finding.kind == "one_class"
    assert "8×1" in finding.title and "single class" in finding.title


def test_logits_that_a_relu_cuts_off(found: Found) -> None:
    for loss in (
        lambda output, y: F.cross_entropy(output.relu(), y),
        lambda output, y: F.binary_cross_entropy_with_logits(F.relu(output[:, 0]), y.float()),
    ):
        (finding,) = found(net(), loss=loss)
        assert finding.kind == "activation_clips" and finding.severity == "warning"
    # SqueezeNet's last layers, and a layer whose small slope lets gradients through.
    for loss in (
        lambda output, y: F.cross_entropy(output.relu()[:, :, None].mean(2), y),
        lambda output, y: F.cross_entropy(F.leaky_relu(output), y),
    ):
        assert found(net(), loss=loss) == ()


def _mean_square(difference: torch.Tensor) -> torch.Tensor:
    return (difference**2).mean()


@pytest.mark.parametrize(
    "loss",
    [
        lambda output, y: _mean_square(output - y),
        lambda output, y: _mean_square(y - output),
        lambda output, y: 2 * (output.squeeze(1) - y[:, None]).abs().sum(1).mean() / 8,
        lambda output, y: torch.sqrt(_mean_square(output - y)) + output.abs().mean(),
        lambda output, y: torch.linalg.norm(output - y),
        lambda output, y: -(y * output.sigmoid().log()).mean(),
        lambda output, y: _mean_square(output.gather(1, y.long()[:, None]) - y),
    ],
)
def test_a_loss_by_hand_that_broadcasts(simulated: Found, loss: Loss) -> None:
    (finding,) = simulated(net(1), loss=lambda output, y: loss(output, y.float()))
    assert finding.kind == "loss_broadcast"
    assert finding.title.startswith(
        "The loss compares each output with every target: outputs are 8"
    )
    assert finding.place is not None and finding.place.file.endswith("test_losses.py")


@pytest.mark.parametrize(
    "loss",
    [
        lambda output, y: _mean_square(output - y[:, None]),
        lambda output, y: _mean_square(output[:, 0] - y),
        # Each with each on purpose: as it is written, and weighted by pairs.
        lambda output, y: _mean_square(output[:, 0][:, None] - y),
        lambda output, y: (torch.eye(8, device=y.device) * (output - y).abs()).mean(),
        lambda output, y: torch.exp(-((output - y) ** 2)).sum(1).log().mean(),
        lambda output, _: _mean_square(output - output[:, 0]),
        lambda output, y: _mean_square(output - y[:1]),
    ],
)
def test_a_loss_by_hand_of_one_shape_or_of_pairs(simulated: Found, loss: Loss) -> None:
    assert simulated(net(1), loss=lambda output, y: loss(output, y.float())) == ()


def test_a_log_softmax_over_the_samples(found: Found) -> None:
    (finding,) = found(net(), loss=lambda output, y: F.nll_loss(output.log_softmax(0), y))
    assert finding.kind == "activation_elsewhere"
    assert "8×4" in finding.title


@pytest.mark.parametrize(
    "loss",
    [
        lambda output, y: F.nll_loss(output.log_softmax(-1), y),
        lambda output, y: F.nll_loss(
            output.view(8, 2, 2).log_softmax(1), torch.zeros(8, 2, dtype=torch.long).to(y.device)
        ),
        # Scores of classes that were put last, and moved then.
        lambda output, y: F.nll_loss(
            output.view(8, 2, 2).log_softmax(-1).transpose(1, 2),
            torch.zeros(8, 2, dtype=torch.long).to(y.device),
        ),
        lambda output, y: F.binary_cross_entropy(output.sigmoid()[:, 0], y.float()),
        lambda output, y: F.binary_cross_entropy(  # a mean of experts' probabilities
            (output.softmax(1) @ output.detach().sigmoid().T).mean(1).clone(), y.float()
        ),
        lambda output, y: F.binary_cross_entropy(
            (output.softmax(1) @ torch.full((4, 1), 0.5).to(y.device)).squeeze(1), y.float()
        ),
        lambda output, _: KL_DIV(output.log_softmax(1), torch.full_like(output, 0.25)),
        lambda output, y: F.cross_entropy(output[:, :2], y),
        # A contrast of all pairs, of a batch with one.
        lambda output, y: F.cross_entropy(output[:1] @ output[:1].T, y[:1]),
    ],
)
def test_losses_that_get_what_they_are_for(found: Found, loss: Loss) -> None:
    assert kinds(found(net(), loss=loss)) == []


class Remade(nn.Module):
    """Makes its last layer in each forward pass."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(16, 8)

    def forward(self, x: torch.Tensor) -> Any:
        return nn.Linear(8, 1).to(x.device)(self.first(x))


class Listed(Remade):
    """Has it in a list."""

    def __init__(self) -> None:
        super().__init__()
        self.others = [nn.Linear(8, 1)]

    def forward(self, x: torch.Tensor) -> Any:
        return self.others[0].to(x.device)(self.first(x))


def test_layers_that_each_step_makes_anew(found: Found) -> None:
    (finding,) = found(Remade())
    assert finding.kind == "not_registered" and "new ones" in finding.cause
    assert "__init__" in finding.fixes[0].action
    (finding,) = found(Listed())
    assert finding.kind == "not_registered" and "list" in finding.cause


def test_gradients_that_no_optimizer_uses(found: Found) -> None:
    backbone, head = nn.Linear(16, 16), nn.Linear(16, 4)
    (finding,) = found(nn.Sequential(backbone, head), trained=head.parameters)
    assert finding.kind == "gradients_unused" and finding.severity == "warning"
    assert "(1.1 KiB)" in finding.title and "0.weight, 0.bias" in finding.title


def test_a_teacher_with_a_graph(found: Found) -> None:
    student, teacher = net(), net()
    (finding,) = found(student, teacher, step=lambda x: torch.square(student(x) - teacher(x)))
    assert finding.kind == "gradients_unused"
    assert finding.title.startswith("4 tensors")
    assert finding.severity == "info"  # as many are used


def test_gradients_that_somebody_uses(found: Found) -> None:
    student, teacher = net(), net()
    later = torch.optim.SGD(teacher.parameters(), 0.1)

    def apart(x: torch.Tensor) -> torch.Tensor:
        return torch.square(student(x) - teacher(x))

    assert kinds(found(student, teacher, step=apart)) == []
    del later
    teacher.requires_grad_(False)
    assert kinds(found(student, teacher, step=apart)) == []
    # Copies of another precision are what the optimizer has.
    copies = [nn.Parameter(each.detach().clone()) for each in student.parameters()]
    assert "gradients_unused" not in kinds(found(student, trained=lambda: copies))


def test_a_teacher_whose_graph_nobody_uses(found: Found) -> None:
    def finding_of(
        teacher: nn.Module, distil: Callable[[nn.Module, torch.Tensor], torch.Tensor]
    ) -> tuple[Finding, ...]:
        student = net()
        return found(
            student,
            teacher,
            step=lambda x: student(x) + distil(teacher, x),
            loss=F.cross_entropy,
        )

    large = nn.Sequential(nn.Linear(16, 60_000), nn.Linear(60_000, 4))
    (finding,) = finding_of(large, lambda teacher, x: teacher(x).detach())
    assert finding.kind == "graph_unused" and finding.severity == "warning"
    assert "no_grad" in finding.fixes[0].action and finding.place is not None
    (finding,) = finding_of(net(), lambda teacher, x: teacher(x).detach())
    assert finding.severity == "info"
    # Not of one that is called without gradients, is frozen, or whose input's are asked for.
    assert finding_of(net(), torch.no_grad()(lambda teacher, x: teacher(x))) == ()
    assert finding_of(net().requires_grad_(False), lambda teacher, x: teacher(x)) == ()

    def sensitivity(teacher: nn.Module, x: torch.Tensor) -> torch.Tensor:
        x.requires_grad_()
        return torch.autograd.grad(teacher(x).sum(), x)[0][:, :4]

    assert finding_of(net(), sensitivity) == ()


def test_a_view_that_is_to_swap_dimensions(simulated: Found) -> None:
    def of(view: Callable[[torch.Tensor], torch.Tensor]) -> tuple[Finding, ...]:
        return simulated(net(24), loss=lambda output, _: view(output).square().mean())

    for view in (
        lambda x: x.view(8, 6, 4).view(8, 4, 6),  # heads and positions
        lambda x: x.view(8, 6, 2, 2).view(8, 4, 6),  # channels and pixels
        lambda x: torch.reshape(x[:, :20], (20, 8)),
        lambda x: x.view(8, 4, 6).view(8, 3, 4, 2),  # the width's heads, before the length
        lambda x: x.view(8, 3, 4, 2).reshape(8, 4, 6),  # … and back
    ):
        (finding,) = of(view)
        assert finding.kind == "view_for_transpose" and finding.severity == "warning"
        assert finding.place is not None and finding.place.file.endswith("test_losses.py")
    for view in (
        lambda x: x.view(8, 2, 12).transpose(1, 2).reshape(12, 16),
        lambda x: x.view(8, 4, 6).transpose(1, 2).reshape(8, 1, 6, 4).reshape(48, 4),
        lambda x: x.view(2, 4, 24).view(8, 24).view(8, 6, 4).view(8, 6, 2, 2),
        lambda x: x.view(1, 8, 24).view(8, 24, 1).view(8, 1, 24),
        lambda x: x.view(8, 4, 3, 2).view(8, 4, 6).view(8, 24),
        lambda x: x.view(8, 4, 3, 2).transpose(1, 2).transpose(1, 2).reshape(8, 4, 6),
        lambda x: torch.reshape(x, (24, 8)),  # or three heads of each of 8, split off
    ):
        assert of(view) == ()


def test_a_number_that_float16_does_not_have(simulated: Found) -> None:
    def of(eps: float, dtype: torch.dtype = torch.float16) -> tuple[Finding, ...]:
        return simulated(
            net(), loss=lambda output, _: (output.to(dtype).sigmoid() + eps).log().float().mean()
        )

    (finding,) = of(1e-8)
    assert finding.kind == "eps_lost" and "1e-08 is 0 in float16" in finding.title
    assert finding.place is not None and finding.place.file.endswith("test_losses.py")
    assert of(1e-4) == of(6e-8) == of(1e-8, torch.bfloat16) == of(1e-8, torch.float32) == ()
