"""Loss functions that get something else than they are for, layers that are made in each step, and
gradients that nobody uses: seen on the CPU and on the simulated device; nothing else is."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import trainfit
from trainfit.findings.learning import of_learning
from trainfit.hooks.learning import LearningObserver
from trainfit.hooks.learning_hooks import install
from trainfit.results.findings import Finding
from trainfit.simgpu.device.user_location import user_frame
from trainfit.simgpu.patching import PatchSet

Loss = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
Found = Callable[..., tuple[Finding, ...]]


@pytest.fixture(params=["cpu", "cuda"])
def found(request: pytest.FixtureRequest) -> Iterator[Found]:
    """Runs steps of models, one after the other, and tells the findings."""

    def run(
        *models: nn.Module,
        loss: Loss = lambda output, _: output.mean(),
        trained: Callable[[], Any] | None = None,
        step: Callable[[torch.Tensor], torch.Tensor] | None = None,
    ) -> tuple[Finding, ...]:
        device = request.param
        patches = PatchSet()
        observer = LearningObserver(user_frame, counts_in_place=device == "cpu")
        remove = install(lambda: observer, patches)
        try:
            for model in models:
                model.to(device)
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
            return of_learning(observer.facts())
        finally:
            remove()
            patches.restore()

    if request.param == "cpu":
        yield run
    else:
        with trainfit.simulate("T4"):
            yield run


def kinds(findings: tuple[Finding, ...]) -> list[str]:
    return [finding.kind for finding in findings]


def net(outputs: int = 4) -> nn.Module:
    return nn.Sequential(nn.Linear(16, 16), nn.ReLU(), nn.Linear(16, outputs))


def test_a_loss_that_needs_an_activation_before_it(found: Found) -> None:
    for loss, instead in (
        (F.nll_loss, "cross_entropy"),
        (lambda output, y: F.nll_loss(output.relu(), y), "cross_entropy"),
        (lambda output, _: nn.KLDivLoss()(output, torch.full_like(output, 0.25)), "log_softmax"),
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


def test_one_class(found: Found) -> None:
    (finding,) = found(net(1), loss=F.cross_entropy)
    assert finding.kind == "one_class"
    assert "8×1" in finding.title and "single class" in finding.title


def test_a_log_softmax_over_the_samples(found: Found) -> None:
    (finding,) = found(net(), loss=lambda output, y: F.nll_loss(output.log_softmax(0), y))
    assert finding.kind == "activation_elsewhere"
    assert "8×4" in finding.title


@pytest.mark.parametrize(
    "loss",
    [
        lambda output, y: F.nll_loss(output.log_softmax(-1), y),
        lambda output, y: F.nll_loss(output.softmax(1).log(), y),
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
        lambda output, _: F.kl_div(output.log_softmax(1), torch.full_like(output, 0.25)),
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
