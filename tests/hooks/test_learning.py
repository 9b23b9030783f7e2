"""What spoils learning is seen, in real steps on the CPU and in simulated ones; nothing else is."""

from __future__ import annotations

import contextlib
import inspect
import itertools
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader, Dataset, DistributedSampler, Subset, TensorDataset

import trainfit
from helpers_learning import observing
from trainfit.findings.training.learning import of_learning
from trainfit.hooks import ranks as ranks_module
from trainfit.hooks.learning import LearningObserver
from trainfit.hooks.losses import scale_of_loss
from trainfit.hooks.ranks import EpochOrder
from trainfit.results.runs.learning import LearningFacts

Training = Callable[[str], Any]


def data(device: str, batch: int = 8, width: int = 16) -> torch.Tensor:
    return torch.randn(batch, width).to(device)


def net(device: str) -> nn.Module:
    return nn.Sequential(nn.Linear(16, 16), nn.Dropout(), nn.Linear(16, 1)).to(device)


def steps(
    model: nn.Module, optimizer: torch.optim.Optimizer, device: str, *, zero: bool = True
) -> None:
    for _ in range(4):
        model(data(device)).mean().backward()
        optimizer.step()
        if zero:
            optimizer.zero_grad()


# -- trainings with one fault each -----------------------------------------------------------------


def healthy(device: str) -> nn.Module:
    model = net(device)
    steps(model, torch.optim.AdamW(model.parameters()), device)
    return model


def zeroed_by_hand(device: str) -> None:
    model = net(device)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    for _ in range(4):
        model(data(device)).mean().backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        for parameter in model.parameters():
            assert parameter.grad is not None
            parameter.grad.zero_()


def dropped_by_hand(device: str) -> None:
    model = net(device)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    for _ in range(4):
        model(data(device)).mean().backward()
        optimizer.step()
        for parameter in model.parameters():
            parameter.grad = None


def warm_up(device: str) -> None:
    model = net(device)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: step / 10)
    for _ in range(4):
        model(data(device)).mean().backward()
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()


def evaluates(device: str) -> None:
    model = net(device)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    for _ in range(2):
        model.train()
        steps(model, optimizer, device)
        model.eval()
        with torch.no_grad():
            model(data(device))


def frozen_batch_norm(device: str) -> None:
    """A part stays in evaluation mode, as detectors have it."""
    model = nn.Sequential(nn.Linear(16, 16), nn.BatchNorm1d(16), nn.Linear(16, 1)).to(device)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    for _ in range(2):
        model.train()
        model[1].eval()
        steps(model, optimizer, device)


def accumulates(device: str) -> None:
    model = net(device)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    for _ in range(3):
        for _ in range(4):
            (model(data(device)).mean() / 4).backward()
        optimizer.step()
        optimizer.zero_grad()


def half_loss(model: nn.Module, device: str) -> torch.Tensor:
    with torch.autocast(device, torch.float16):
        return model(data(device)).mean()  # type: ignore[no-any-return]


def scales(device: str) -> None:
    model = net(device)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    scaler = torch.amp.GradScaler(device)
    for _ in range(3):
        scaler.scale(half_loss(model, device)).backward()
        scaler.unscale_(optimizer)
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()


def adversaries(device: str) -> None:
    """Two optimizers, each with its own model, of which the second has gradients of both losses
    until they are set to zero."""
    one, two = net(device), nn.Linear(1, 1).to(device)
    first = torch.optim.SGD(one.parameters(), 0.1)
    second = torch.optim.SGD(two.parameters(), 0.1)
    for _ in range(3):
        second.zero_grad()
        two(one(data(device)).detach()).mean().backward()
        second.step()
        two(one(data(device))).mean().backward()
        first.step()
        first.zero_grad()


def no_gradient(device: str) -> None:
    """Reentrant checkpoints below a frozen embedding."""
    embedding = nn.Embedding(10, 16).to(device).requires_grad_(False)
    blocks = nn.ModuleList(nn.Linear(16, 16) for _ in range(6)).to(device)
    head = nn.Linear(16, 1).to(device)
    optimizer = torch.optim.SGD([*blocks.parameters(), *head.parameters()], 0.1)
    for _ in range(2):
        x = embedding(torch.zeros(8, dtype=torch.long).to(device))
        for block in blocks:
            x = checkpoint(block, x, use_reentrant=True)
        head(x).mean().backward()
        optimizer.step()
        optimizer.zero_grad()


def held_by_other_ranks(device: str) -> None:
    """As FSDP leaves the parameters of which this rank has no part."""
    here = nn.Linear(16, 1).to(device)
    elsewhere = nn.Parameter(torch.empty(0, device=device))
    optimizer = torch.optim.SGD([*here.parameters(), elsewhere], 0.1)
    for _ in range(3):
        here(data(device)).mean().backward()
        optimizer.step()
        optimizer.zero_grad()


def detached(device: str) -> None:
    first, second = nn.Linear(16, 16).to(device), nn.Linear(16, 1).to(device)
    optimizer = torch.optim.SGD([*first.parameters(), *second.parameters()], 0.1)
    for _ in range(3):
        second(first(data(device)).detach()).mean().backward()
        optimizer.step()
        optimizer.zero_grad()


def clipped_scaled(device: str) -> None:
    model = net(device)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    scaler = torch.amp.GradScaler(device)
    for _ in range(3):
        scaler.scale(half_loss(model, device)).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()


def small_eps(device: str) -> None:
    model = net(device).half()
    optimizer = torch.optim.Adam(model.parameters())
    for _ in range(2):
        model(data(device).half()).mean().backward()
        optimizer.step()
        optimizer.zero_grad()


def gradients_kept(device: str) -> None:
    model = net(device)
    steps(model, torch.optim.SGD(model.parameters(), 0.1), device, zero=False)


def rate_zero(device: str) -> None:
    model = net(device)
    steps(model, torch.optim.SGD(model.parameters(), 0.0), device)


def anomaly_mode(device: str) -> None:
    with torch.autograd.detect_anomaly(check_nan=False):
        healthy(device)


def evaluation_mode(device: str) -> None:
    model = net(device)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    for _ in range(2):
        steps(model, optimizer, device)
        model.eval()


def sanity_check(device: str) -> None:
    """An evaluation before the first step, and no train() after it."""
    model = net(device)
    model.train()
    model.eval()
    steps(model, torch.optim.SGD(model.parameters(), 0.1), device)


def kept_in_evaluation(device: str) -> None:
    """As from_pretrained gives it: nobody said train()."""
    model = net(device).eval()
    steps(model, torch.optim.SGD(model.parameters(), 0.1), device)


def checked_before(device: str) -> None:
    model = net(device)
    model.train()
    model.eval()
    model.train()
    steps(model, torch.optim.SGD(model.parameters(), 0.1), device)


def restored_by_attribute(device: str) -> None:
    """As Lightning does it after its validation."""
    model = net(device)
    model.train()
    model.eval()
    for module in model.modules():
        module.training = True
    steps(model, torch.optim.SGD(model.parameters(), 0.1), device)


def not_registered(device: str) -> nn.Module:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = [nn.Linear(16, 16).to(device) for _ in range(2)]
            self.head = nn.Linear(16, 1)

        def forward(self, x: torch.Tensor) -> Any:
            return self.head(self.layers[1](self.layers[0](x)))

    model = Net().to(device)
    steps(model, torch.optim.SGD(model.parameters(), 0.1), device)
    return model


def mostly_frozen(device: str) -> None:
    model = nn.Sequential(nn.Linear(16, 512), nn.Linear(512, 64), nn.Linear(64, 1)).to(device)
    model.requires_grad_(False)
    model[2].bias.requires_grad_(True)
    steps(model, torch.optim.SGD(model.parameters(), 0.1), device)


def prompt_tuning(device: str) -> None:
    """One matrix is trained, of a model that is frozen."""
    model = nn.Sequential(nn.Linear(16, 512), nn.Linear(512, 64), nn.Linear(64, 1)).to(device)
    model.requires_grad_(False)
    model[2].weight.requires_grad_(True)
    steps(model, torch.optim.SGD(model.parameters(), 0.1), device)


def loss_not_divided(device: str) -> None:
    model = net(device)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    for _ in range(3):
        for _ in range(4):
            model(data(device)).mean().backward()
        optimizer.step()
        optimizer.zero_grad()


def _fed() -> Any:
    return torch.utils.data.DataLoader(torch.randn(96, 16), batch_size=8)


def gradients_dropped(device: str) -> None:
    """zero_grad() at each micro-batch."""
    model = net(device)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    for number, batch in enumerate(_fed()):
        optimizer.zero_grad()
        (model(batch.to(device)).mean() / 3).backward()
        if number % 3 == 2:
            optimizer.step()


def nothing_left(device: str) -> None:
    """zero_grad() between the backward pass and the step."""
    model = net(device)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    for _ in range(3):
        model(data(device)).mean().backward()
        optimizer.zero_grad()
        optimizer.step()


def nothing_but_zeros_left(device: str) -> None:
    """… which writes zeros."""
    model = net(device)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    for _ in range(3):
        model(data(device)).mean().backward()
        optimizer.zero_grad(set_to_none=False)
        optimizer.step()


def added_to_zeros(device: str) -> None:
    """Gradients of several losses, changed by the script after zero_grad() wrote zeros."""
    model = net(device)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    for _ in range(3):
        model(data(device)).mean().backward()
        kept = [each.grad.clone() for each in model.parameters() if each.grad is not None]
        optimizer.zero_grad(set_to_none=False)
        for each, gradient in zip(model.parameters(), kept, strict=True):
            assert each.grad is not None
            each.grad += gradient
        optimizer.step()


def step_repeated(device: str) -> None:
    """A scaler's step, and the optimizer's own next to it."""
    model = net(device)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    for _ in range(3):
        model(data(device)).mean().backward()
        optimizer.step()
        optimizer.step()
        optimizer.zero_grad()


def put_together(device: str) -> None:
    """Gradients of several losses, kept and put back when all were dropped."""
    model = net(device)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    for _ in range(4):
        model(data(device)).mean().backward()
        kept = [weight.grad for weight in model.parameters()]
        optimizer.zero_grad()
        for weight, gradient in zip(model.parameters(), kept, strict=True):
            weight.grad = gradient
        optimizer.step()
        optimizer.zero_grad()


def penalized(device: str) -> None:
    """Two losses of one batch, and a gradient of the data whose other ones are dropped."""
    model = net(device)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    for batch in _fed():
        x = batch.to(device).requires_grad_()
        model(x).mean().backward()
        optimizer.zero_grad()
        model(x.detach() + 0.1 * x.grad.sign()).mean().backward()
        sum(weight.pow(2).sum() for weight in model.parameters()).backward()
        optimizer.step()
        optimizer.zero_grad()


def penalized_by_hand(device: str) -> None:
    """The same without a DataLoader."""
    model = net(device)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    for _ in range(4):
        LearningObserver.called(_watching[-1], model)
        model(data(device)).mean().backward()
        sum(weight.pow(2).sum() for weight in model.parameters()).backward()
        optimizer.step()
        optimizer.zero_grad()


def adversarial_nets(device: str) -> None:
    """A discriminator's two passes, then a generator's, of each batch."""
    maker, judge = nn.Linear(16, 16).to(device), net(device)
    of_judge = torch.optim.Adam(judge.parameters())
    of_maker = torch.optim.Adam(maker.parameters())
    for batch in _fed():
        judge.zero_grad()
        judge(batch.to(device)).mean().backward()
        made = maker(data(device))
        judge(made.detach()).mean().backward()
        of_judge.step()
        maker.zero_grad()
        judge(made).mean().backward()
        of_maker.step()


def rate_vanishes(device: str) -> None:
    """A schedule in epochs that is stepped with each batch."""
    model = net(device)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, step_size=2, gamma=1e-4)
    for _ in range(17):
        model(data(device)).mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        schedule.step()


def schedule_has_ended(device: str) -> None:
    """It has come to 0, and the training goes on."""
    model = net(device)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: max(0.0, 1 - step / 5))
    for _ in range(17):
        model(data(device)).mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        schedule.step()


def annealed(device: str) -> None:
    """Warm restarts go down to nothing, again and again."""
    model = net(device)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    restarts = torch.optim.lr_scheduler.CosineAnnealingWarmRestarts(optimizer, 4, eta_min=1e-12)
    for _ in range(17):
        model(data(device)).mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        restarts.step()


def another_model(device: str) -> nn.Module:
    """The optimizer has the tensors of a model that was replaced."""
    optimizer = torch.optim.SGD(net(device).parameters(), 0.1)
    model = net(device)
    steps(model, optimizer, device)
    return model


def compared(device: str, loss: Callable[[torch.Tensor, torch.Tensor], torch.Tensor]) -> None:
    model = net(device)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    for _ in range(4):
        loss(model(data(device)), torch.randn(8).to(device)).backward()
        optimizer.step()
        optimizer.zero_grad()


def loss_broadcast(device: str) -> None:
    compared(device, nn.MSELoss())


def loss_of_one_shape(device: str) -> None:
    compared(device, lambda out, target: nn.functional.l1_loss(out.squeeze(1), target))
    compared(device, lambda out, target: nn.functional.mse_loss(out, target[:1]))
    compared(device, lambda out, target: nn.functional.huber_loss(out, target.unsqueeze(1)))
    # Each with each, as quantiles of reinforcement learning are.
    compared(device, lambda out, target: nn.functional.huber_loss(out, target.unsqueeze(0)))


def activation_twice(device: str) -> None:
    classes = torch.zeros(8, dtype=torch.long).to(device)
    compared(device, lambda out, _: nn.CrossEntropyLoss()(out.expand(8, 3).softmax(1), classes))


def one_class(device: str) -> None:
    compared(
        device,
        lambda out, target: nn.functional.binary_cross_entropy(
            out.softmax(1), target[:, None].sigmoid()
        ),
    )


def several_classes(device: str) -> None:
    compared(
        device,
        lambda out, target: nn.functional.binary_cross_entropy(
            out.sigmoid(), target[:, None].sigmoid()
        ),
    )
    classes = torch.zeros(8, dtype=torch.long).to(device)
    compared(
        device, lambda out, _: nn.functional.nll_loss(out.expand(8, 3).log_softmax(-1), classes)
    )


def activated_once(device: str) -> None:
    classes = torch.zeros(8, dtype=torch.long).to(device)
    compared(device, lambda out, _: nn.functional.cross_entropy(out.expand(8, 3), classes))
    compared(
        device, lambda out, _: nn.functional.nll_loss(out.expand(8, 3).log_softmax(1), classes)
    )
    compared(device, lambda out, to: nn.functional.mse_loss(out.sigmoid().squeeze(1), to.sigmoid()))


def over_data(device: str, take: Callable[[DataLoader[Any]], Iterator[Any]], **loader: Any) -> None:
    model = net(device)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    for (x,) in take(DataLoader(TensorDataset(torch.randn(64, 16)), **loader)):
        model(x.to(device)).mean().backward()
        optimizer.step()
        optimizer.zero_grad()


def iterator_restarted(device: str) -> None:
    over_data(device, lambda it: (next(iter(it)) for _ in range(4)), batch_size=8)


def iterated_by_epochs(device: str) -> None:
    """Epochs of several steps; of one; single shuffled batches, which cost little here."""
    over_data(device, lambda it: (x for _ in range(3) for x in it), batch_size=32)
    over_data(device, lambda it: (x for _ in range(5) for x in it), batch_size=64)
    shuffled: dict[str, Any] = {"batch_size": 8, "shuffle": True}
    over_data(device, lambda it: (next(iter(it)) for _ in range(4)), **shuffled)


def iterated_by_short_epochs(device: str) -> None:
    """Of the later steps only some are looked at; none of them begins all of the data."""
    over_data(device, lambda it: (x for _ in range(12) for x in it), batch_size=12)


def iterated_by_epochs_of_looks(device: str) -> None:
    """Each epoch begins with one of the few later steps that are looked at."""

    def take(loader: DataLoader[Any]) -> Iterator[Any]:
        for steps in (15, 16, 32, 64, 2):
            yield from itertools.islice(loader, steps)

    over_data(device, take, batch_size=1)


def clipped_late(device: str, limit: float = 1.0) -> None:
    model = net(device)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    for _ in range(4):
        optimizer.zero_grad()
        model(data(device)).mean().backward()
        optimizer.step()
        nn.utils.clip_grad_norm_(model.parameters(), limit)


def clipped_between_two_steps(device: str) -> None:
    """One backward pass for two optimizers; the norm is measured after the steps."""
    first, second = net(device), nn.Linear(1, 1).to(device)
    optimizers = [torch.optim.SGD(each.parameters(), 0.1) for each in (first, second)]
    for _ in range(4):
        second(first(data(device))).mean().backward()
        for model, optimizer in zip((first, second), optimizers, strict=True):
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
        nn.utils.clip_grad_norm_(first.parameters(), float("inf"))
        for optimizer in optimizers:
            optimizer.zero_grad()


def loss_is_a_leaf(device: str) -> nn.Module:
    model = net(device)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    for _ in range(4):
        loss = model(data(device)).argmax(1).float().mean()
        loss.requires_grad = True
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    return model


def head_is_replaced(device: str) -> nn.Module:
    model = nn.Sequential(nn.Linear(16, 16), nn.Linear(16, 4)).to(device)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    model[1] = nn.Linear(16, 2).to(device)
    steps(model, optimizer, device)
    return model


def head_alone_is_trained(device: str) -> nn.Module:
    """Without freezing the rest: its gradients are made for nothing, but it learns as meant."""
    model = nn.Sequential(nn.Linear(16, 16), nn.Linear(16, 4)).to(device)
    steps(model, torch.optim.SGD(model[1].parameters(), 0.1), device)
    return model


def head_alone_is_trained_with_another_part(device: str) -> nn.Module:
    """Which lives, and does not run yet: nothing was replaced."""
    model = nn.Sequential(nn.Linear(16, 16), nn.Dropout(), nn.Linear(16, 1)).to(device)
    other = nn.Linear(4, 4).to(device)
    optimizer = torch.optim.SGD([*model[2].parameters(), *other.parameters()], 0.1)
    _watching[-1].called(model)
    steps(model, optimizer, device)
    assert other.weight.grad is None
    return model


def norm_measured_after_the_step(device: str) -> None:
    clipped_late(device, 1e9)


def pairs_compared(device: str) -> None:
    """Each output with each other, and with each of several targets."""
    model = nn.Linear(16, 4).to(device)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    for _ in range(4):
        optimizer.zero_grad()
        output = model(data(device))
        loss = nn.functional.l1_loss(output[:, None], output, reduction="none").mean()
        wanted = torch.rand(8, 4, device=device)
        loss += nn.functional.mse_loss(output[:, None], wanted, reduction="none").min(1)[0].mean()
        loss.backward()
        optimizer.step()


def scaled_step(device: str) -> None:
    model = net(device)
    optimizer, scaler = torch.optim.SGD(model.parameters(), 0.1), torch.amp.GradScaler(device)
    for _ in range(4):
        optimizer.zero_grad()
        scaler.scale(half_loss(model, device)).backward()
        optimizer.step()


def unscaled_by_hand(device: str) -> None:
    model = net(device)
    optimizer, scaler = torch.optim.SGD(model.parameters(), 0.1), torch.amp.GradScaler(device)
    for _ in range(4):
        optimizer.zero_grad()
        scaler.scale(half_loss(model, device)).backward()
        for parameter in model.parameters():
            assert parameter.grad is not None
            parameter.grad.div_(scaler.get_scale())
        optimizer.step()


def scaled_for_a_fused_optimizer(device: str) -> None:
    model = net(device)
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    scaler = torch.amp.GradScaler(device)
    for _ in range(4):
        optimizer.zero_grad()
        scaler.scale(half_loss(model, device)).backward()
        scaler.step(optimizer)
        scaler.update()


def critic_kept(device: str) -> None:
    """The critic's gradients are those of all losses so far."""
    generator, critic = net(device), nn.Linear(1, 1).to(device)
    for_generator = torch.optim.SGD(generator.parameters(), 0.1)
    for_critic = torch.optim.SGD(critic.parameters(), 0.1)
    for _ in range(4):
        made = generator(data(device))
        critic(made.detach()).mean().backward()
        for_critic.step()
        for_generator.zero_grad()
        critic(made).mean().backward()
        for_generator.step()


HEALTHY = (healthy, zeroed_by_hand, dropped_by_hand, warm_up, evaluates, frozen_batch_norm)
FAULTY = (no_gradient, clipped_scaled, small_eps, gradients_kept, rate_zero, anomaly_mode)
MORE_FAULTY = (
    *(evaluation_mode, mostly_frozen, loss_not_divided, gradients_dropped, rate_vanishes),
    *(step_repeated, not_registered, loss_broadcast, activation_twice, clipped_late),
    *(iterator_restarted, one_class, scaled_step),
)
MORE_HEALTHY = (
    *(loss_of_one_shape, activated_once, clipped_between_two_steps, head_alone_is_trained),
    *(several_classes, iterated_by_epochs, norm_measured_after_the_step, pairs_compared),
    *(unscaled_by_hand, scaled_for_a_fused_optimizer),
    iterated_by_short_epochs,
    iterated_by_epochs_of_looks,
    held_by_other_ranks,
)
SEVERAL_LOSSES = (penalized, penalized_by_hand, adversarial_nets, annealed, put_together)


# -- what is seen of them --------------------------------------------------------------------------

_watching: list[LearningObserver] = []


@pytest.fixture(params=["cpu", "cuda"])
def watched(request: pytest.FixtureRequest) -> Iterator[Callable[[Training], LearningFacts]]:
    """Runs a training, on the CPU or on the simulated device."""

    def run(training: Training) -> LearningFacts:
        with observing(counts_in_place=request.param == "cpu") as observer:
            _watching.append(observer)
            model = training(request.param)
            if model is not None:
                observer.called(model)
            return observer.facts()

    if request.param == "cpu":
        yield run
    else:
        with trainfit.simulate("T4"):
            yield run


def kinds(facts: LearningFacts) -> list[str]:
    return [finding.kind for finding in of_learning(facts)]


@pytest.mark.parametrize(
    "training", [*HEALTHY, *MORE_HEALTHY, *SEVERAL_LOSSES, accumulates, scales, adversaries]
)
def test_no_false_alarm(watched: Callable[..., LearningFacts], training: Training) -> None:
    facts = watched(training)
    assert facts.steps
    assert kinds(facts) == []


@pytest.mark.parametrize("training", [*FAULTY, *MORE_FAULTY])
def test_the_fault_alone_is_found(
    watched: Callable[..., LearningFacts], training: Training
) -> None:
    assert kinds(watched(training)) == [training.__name__]  # type: ignore[attr-defined]


def test_one_of_two_optimizers_keeps_its_gradients(watched: Callable[..., LearningFacts]) -> None:
    (found,) = of_learning(watched(critic_kept))
    assert found.kind == "gradients_kept"
    assert found.title.startswith("Gradients of 1×1, … are never set to zero")


def test_a_schedule_that_has_ended(watched: Callable[..., LearningFacts]) -> None:
    (found,) = of_learning(watched(schedule_has_ended))
    assert found.kind == "rate_vanishes" and "fallen to 0:" in found.title
    assert found.place is not None and found.place.file.endswith("test_learning.py")


def test_detached(watched: Callable[..., LearningFacts]) -> None:
    facts = watched(detached)
    assert (facts.optimized, facts.without_gradient) == (4, 2)
    assert kinds(facts) == ["no_gradient"]
    assert of_learning(facts)[0].title.startswith("2 of 4 trainable tensors had no gradient")


def test_an_evaluation_before_the_first_step_may_leave_its_mode(
    watched: Callable[..., LearningFacts],
) -> None:
    assert kinds(watched(sanity_check)) == ["evaluation_mode"]
    for training in (checked_before, kept_in_evaluation, restored_by_attribute):
        assert kinds(watched(training)) == []


def test_all_gradients_are_dropped(watched: Callable[..., LearningFacts]) -> None:
    for training in (nothing_left, nothing_but_zeros_left):
        (found,) = of_learning(watched(training))
        assert found.kind == "gradients_dropped" and "nothing is learned" in found.title
    assert kinds(watched(added_to_zeros)) == []


def test_the_lines(watched: Callable[..., LearningFacts]) -> None:
    for training, words in (
        (no_gradient, "checkpoint(block"),
        (clipped_scaled, "clip_grad_norm_"),
        (evaluation_mode, "model.eval()"),
        (gradients_dropped, "optimizer.zero_grad()"),
        (loss_broadcast, "loss(model(data(device))"),
        (activation_twice, "nn.CrossEntropyLoss()"),
        (one_class, "binary_cross_entropy("),
        (clipped_late, "clip_grad_norm_"),
        (loss_is_a_leaf, "loss.backward()"),
    ):
        place = of_learning(watched(training))[0].place
        assert place is not None
        with open(place.file) as file:
            assert words in file.read().splitlines()[place.line - 1]


def test_an_optimizer_of_another_model(watched: Callable[..., LearningFacts]) -> None:
    (found,) = of_learning(watched(another_model))
    assert found.kind == "no_gradient"
    assert "another one" in found.cause
    assert "4 of 4" in found.title


def test_a_loss_that_is_a_new_tensor(watched: Callable[..., LearningFacts]) -> None:
    (found,) = of_learning(watched(loss_is_a_leaf))
    assert found.kind == "no_gradient" and found.severity == "critical"
    assert found.title.startswith("Nothing is learned: 4 of 4 trainable tensors had no gradient")
    assert "requires_grad was set on a loss" in found.cause


def test_no_part_was_replaced(watched: Callable[..., LearningFacts]) -> None:
    with_another = watched(head_alone_is_trained_with_another_part)
    assert kinds(with_another) == ["no_gradient", "gradients_unused"]


def test_a_layer_that_was_replaced_after_the_optimizer(
    watched: Callable[..., LearningFacts],
) -> None:
    (found,) = of_learning(watched(head_is_replaced))
    assert found.kind == "part_replaced" and found.severity == "critical"
    assert found.title == "1.weight, 1.bias: never trained, no optimizer has them"


def _on_two_ranks(
    run: Callable[[nn.Module, nn.Module, DataLoader[Any]], Any], **given: Any
) -> LearningFacts:
    """What is seen of one of two simulated ranks; ``run`` gets a wrapper, its model and a loader
    made with ``given``."""
    with trainfit.simulate("2x T4"), observing(counts_in_place=False) as observer:
        _watching.append(observer)
        try:
            torch.distributed.init_process_group("nccl", rank=0, world_size=2)
            model = net("cuda")
            wrapper = DistributedDataParallel(model)
            samples = TensorDataset(torch.randn(64, 16))
            options = {name: make(samples) for name, make in given.items()}
            called = run(wrapper, model, DataLoader(samples, 8, **options))
            optimizer = torch.optim.SGD(model.parameters(), 0.1)
            observer.called(called)
            steps(model, optimizer, "cuda")
            return observer.facts()
        finally:
            if torch.distributed.is_initialized():
                torch.distributed.destroy_process_group()


@pytest.fixture
def rendezvous(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MASTER_ADDR", "localhost")
    monkeypatch.setenv("MASTER_PORT", "29500")


@pytest.mark.usefixtures("rendezvous")
def test_ranks_that_go_over_the_same_data() -> None:
    def run(wrapper: nn.Module, _: nn.Module, loader: DataLoader[Any]) -> nn.Module:
        next(iter(loader))
        return wrapper

    assert kinds(_on_two_ranks(run)) == ["data_not_split"]
    split = _on_two_ranks(run, sampler=lambda samples: DistributedSampler(samples, 2, 0))
    assert kinds(split) == []


@pytest.mark.usefixtures("rendezvous")
def test_ranks_that_have_a_part_of_the_data_each() -> None:
    def run(of: Dataset[Any]) -> Callable[..., nn.Module]:
        def go(wrapper: nn.Module, _: nn.Module, loader: DataLoader[Any]) -> nn.Module:
            next(iter(DataLoader(of, 4, shuffle=True)))
            return wrapper

        return go

    samples = TensorDataset(torch.randn(64, 16))
    assert kinds(_on_two_ranks(run(samples))) == ["data_not_split"]
    assert kinds(_on_two_ranks(run(Subset(samples, range(60))))) == ["data_not_split"]
    assert kinds(_on_two_ranks(run(Subset(samples, range(0, 64, 2))))) == []
    samples.rank = 0  # type: ignore[attr-defined]  # it gives what belongs to a rank
    assert kinds(_on_two_ranks(run(samples))) == []


@pytest.mark.usefixtures("rendezvous")
def test_an_evaluation_before_the_first_step_goes_over_all_data_and_training_does_not() -> None:
    def run(wrapper: nn.Module, _: nn.Module, loader: DataLoader[Any]) -> nn.Module:
        training = iter(loader)
        list(DataLoader(loader.dataset, 4))
        next(training)
        return wrapper

    found = _on_two_ranks(run, sampler=lambda samples: DistributedSampler(samples, 2, 0))
    assert kinds(found) == []


def epochs(*numbers: int) -> Callable[..., nn.Module]:
    """A training of passes over the data, of which the sampler is told the numbers (-1: none)."""

    def run(wrapper: nn.Module, model: nn.Module, loader: DataLoader[Any]) -> nn.Module:
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        for number in numbers:
            if number >= 0:
                loader.sampler.set_epoch(number)  # type: ignore[attr-defined]
            for (x,) in loader:
                wrapper(x.cuda()).mean().backward()
                optimizer.step()
                optimizer.zero_grad()
        return wrapper

    return run


@pytest.mark.usefixtures("rendezvous")
def test_ranks_whose_epochs_have_one_order() -> None:
    def shuffled(samples: Dataset[Any]) -> Any:
        return DistributedSampler(samples, 2, 0)

    (found,) = of_learning(_on_two_ranks(epochs(-1, -1), sampler=shuffled))
    assert found.kind == "same_order" and found.place is not None
    assert kinds(_on_two_ranks(epochs(0, 1), sampler=shuffled)) == []
    assert kinds(_on_two_ranks(epochs(-1), sampler=shuffled)) == []
    in_order = _on_two_ranks(
        epochs(-1, -1), sampler=lambda samples: DistributedSampler(samples, 2, 0, shuffle=False)
    )
    assert kinds(in_order) == []


def test_a_loop_that_nobody_tells_the_epoch(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a first epoch that is not over yet: the script's source has to tell."""
    samples = TensorDataset(torch.randn(64, 16))
    loader = DataLoader(samples, 8, sampler=DistributedSampler(samples, 2, 0))

    def order(name: str) -> EpochOrder:
        monkeypatch.setattr(ranks_module, "_SET_EPOCH", name)
        found = EpochOrder()
        found.begins(loader, 0)
        return found

    never = order("set_" + "a_name_that_no_source_has")
    assert never.same(40) is not None and never.same(4) is None and never.same() is None
    never.told()
    assert never.same(40) is None
    assert order("def test_a_loop_that_nobody").same(40) is None


@pytest.mark.usefixtures("rendezvous")
def test_an_evaluation_may_have_one_order() -> None:
    def run(wrapper: nn.Module, model: nn.Module, loader: DataLoader[Any]) -> nn.Module:
        data = TensorDataset(torch.randn(16, 16))
        valid = DataLoader(data, 8, sampler=DistributedSampler(data, 2, 0))
        for number in range(2):
            epochs(number)(wrapper, model, loader)
            for (x,) in valid:
                wrapper(x.cuda())
        return wrapper

    shuffled = _on_two_ranks(run, sampler=lambda samples: DistributedSampler(samples, 2, 0))
    assert kinds(shuffled) == []


@pytest.mark.usefixtures("rendezvous")
def test_what_is_around_a_wrapper_calls_it() -> None:
    """torch.compile, or a module of the script's; an evaluation calls the model within."""

    def run(wrapper: nn.Module, model: nn.Module, _: DataLoader[Any]) -> nn.Module:
        _watching[-1].called(model)
        return nn.Sequential(wrapper)

    assert kinds(_on_two_ranks(run)) == []


@pytest.mark.usefixtures("rendezvous")
def test_a_wrapper_that_is_passed_by() -> None:
    def run(wrapper: nn.Module, model: nn.Module, loader: DataLoader[Any]) -> nn.Module:
        return model

    (found,) = of_learning(_on_two_ranks(run))
    assert found.kind == "gradients_not_shared" and "Sequential is called" in found.title


@pytest.mark.usefixtures("rendezvous")
@pytest.mark.parametrize("goes_past", [True, False])
def test_a_wrapper_that_a_method_of_the_model_passes_by(goes_past: bool) -> None:
    """``wrapper.module.training_loss(x)`` calls the model's layers, and no model."""

    def run(wrapper: nn.Module, model: Any, _: DataLoader[Any]) -> nn.Module:
        if not goes_past:
            _watching[-1].called(wrapper)  # an evaluation may call what it likes
        called: nn.Module = model[0]
        return called

    wanted = ["gradients_not_shared"] if goes_past else []
    found = kinds(_on_two_ranks(run))
    assert [each for each in found if each == "gradients_not_shared"] == wanted


def test_names_of_a_model(watched: Callable[..., LearningFacts]) -> None:
    def unused(device: str) -> nn.Module:
        model = net(device)
        model.register_parameter("unused", nn.Parameter(torch.zeros(3, device=device)))
        steps(model, torch.optim.SGD(model.parameters(), 0.1), device)
        return model

    assert watched(unused).without_names == ("unused",)


def test_micro_batches(watched: Callable[..., LearningFacts]) -> None:
    divided, not_divided = watched(accumulates), watched(loss_not_divided)
    assert (divided.micro_batches, divided.is_divided) == (4, True)
    assert (not_divided.micro_batches, not_divided.is_divided) == (4, False)
    assert watched(healthy).is_divided is None


@pytest.mark.parametrize(
    ("scaled", "divisors", "is_known"),
    [
        (lambda loss: loss, set(), True),
        (lambda loss: loss / 4, {4.0}, True),
        (lambda loss: loss * 0.25, {4.0}, True),
        (lambda loss: (loss / 4).float().squeeze(), {4.0}, True),
        (lambda loss: loss / 4 * 0.5, {2.0, 4.0}, True),
        (lambda loss: loss / 4 + loss * 3 / 4, {4.0}, True),
        (lambda loss: (loss + 0.1 * loss) / 2, {2.0}, True),
        (lambda loss: loss * torch.ones(2), set(), False),
    ],
)
def test_what_a_loss_was_divided_by(
    scaled: Callable[[torch.Tensor], torch.Tensor], divisors: set[float], is_known: bool
) -> None:
    loss = torch.randn(4, requires_grad=True).square().mean()
    assert scale_of_loss(scaled(loss).grad_fn) == (divisors, is_known)


def test_an_error_of_ours_ends_the_looking() -> None:
    """The training goes on."""
    with observing() as observer:
        observer.stepping = lambda optimizer: 1 / 0  # type: ignore[method-assign,assignment]
        healthy("cpu")
    assert observer.facts().steps == 0


def test_most_steps_are_not_looked_at_and_cost_next_to_nothing() -> None:
    awake = set()
    with observing() as observer:
        model = net("cpu")
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        for number in range(1, 41):
            model(data("cpu")).mean().backward()
            if observer.awake:
                awake.add(number)
            optimizer.step()
            optimizer.zero_grad()
            if number == 20:
                model.eval()
    # The 21st, because of a mode that was set.
    assert awake == {1, 2, 3, 4, 8, 16, 21, 32}
    assert kinds(observer.facts()) == ["evaluation_mode"]


def test_two_optimizers_are_both_looked_at() -> None:
    with observing() as observer:
        first, second = net("cpu"), net("cpu")
        one = torch.optim.SGD(first.parameters(), 0.1)
        other = torch.optim.SGD(second.parameters(), 0.0)
        for _ in range(16):
            first(data("cpu")).mean().backward()
            one.step()
            one.zero_grad()
            second(data("cpu")).mean().backward()
            other.step()
            other.zero_grad()
    assert observer.facts().steps == 2 * 6
    assert kinds(observer.facts()) == []


def test_names_are_those_of_the_module_within() -> None:
    with observing() as observer:
        inner = nn.ModuleDict({"used": nn.Linear(16, 1), "unused": nn.Linear(16, 1)})

        class Around(nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.module = inner

        optimizer = torch.optim.SGD(inner.parameters(), 0.1)
        inner["used"](data("cpu")).mean().backward()
        optimizer.step()
        around = Around()
        observer.called(around)
        assert observer.facts().without_names == ("unused.weight", "unused.bias")


def test_the_only_vector_that_is_trained(watched: Callable[[Training], LearningFacts]) -> None:
    assert watched(mostly_frozen).trained_vector == "1"
    assert watched(prompt_tuning).trained_vector is None
    assert watched(healthy).trained_vector is None


@pytest.mark.parametrize("name", ["lora_A", "prompt_embeddings", "inner"])
def test_weights_next_to_adapters_are_meant_to_be_frozen(name: str) -> None:
    with observing() as observer:
        model = nn.Linear(256, 256)
        model.requires_grad_(False)
        model.add_module(name, nn.Linear(256, 1))
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        for _ in range(4):
            observer.called(model)
            getattr(model, name)(model(torch.rand(2, 256))).mean().backward()
            optimizer.step()
            optimizer.zero_grad()
    assert ("mostly_frozen" in kinds(observer.facts())) is (name == "inner")


def test_one_bias_alone_is_hardly_meant_but_a_prompt_is() -> None:
    bias = LearningFacts(
        steps=4,
        optimized=8,
        frozen=7,
        trained_numbers=10,
        all_numbers=6000,
        trained_vector="d.bias",
    )
    (one,) = of_learning(bias)
    assert one.kind == "mostly_frozen" and one.is_critical
    assert one.title.startswith("Only `d.bias` is trained, 10 of 6,000 numbers")
    prompt = LearningFacts(steps=4, optimized=8, frozen=7, trained_numbers=10, all_numbers=6000)
    (other,) = of_learning(prompt)
    assert other.severity == "warning" and other.confidence == "possible"


def test_a_rate_of_0_has_the_line_of_its_schedule_or_optimizer(
    watched: Callable[[Training], LearningFacts],
) -> None:
    def scheduled(device: str) -> None:
        model = net(device)
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: step // 1000)
        steps(model, optimizer, device)
        schedule.step()

    for training, line in ((rate_zero, 2), (scheduled, 3)):
        facts = watched(training)
        assert facts.zero_rates and facts.rate_zero_at is not None
        assert facts.rate_zero_at.endswith(f":{training.__code__.co_firstlineno + line}")
    assert watched(healthy).rate_zero_at is None


@pytest.mark.parametrize(
    ("source", "is_used"),
    [
        ("# TODO: sampler.set_epoch(epoch)\nx = 1\n", False),
        ("def set_epoch(self, epoch): ...\n", False),
        ("loader.sampler.set_epoch(epoch)\n", True),
        ("call = getattr(sampler, 'set_epoch', None)\n", True),
        ("sampler.set_epoch(\n", True),  # what it says is not known
    ],
)
def test_a_comment_tells_no_sampler_the_epoch(
    source: str, is_used: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "train.py"
    file.write_text(source)
    module = ModuleType("a_script")
    module.__file__ = str(file)
    monkeypatch.setattr(ranks_module, "loaded_modules", lambda: [(module, vars(module))])
    assert ranks_module._is_called("set_epoch") is is_used


def test_the_line_of_a_second_step(watched: Callable[[Training], LearningFacts]) -> None:
    (found,) = (
        each for each in of_learning(watched(step_repeated)) if each.kind == "step_repeated"
    )
    line = inspect.getsourcelines(step_repeated)[1] + 7
    assert found.place is not None
    assert found.place.file.endswith("test_learning.py") and found.place.line == line


@pytest.mark.usefixtures("rendezvous")
def test_shards_are_no_tensors_that_nobody_trains() -> None:
    """FSDP2 computes with others than the optimizer has, also once its group is gone."""
    from torch.distributed.fsdp import fully_shard

    with trainfit.simulate("2x T4"), observing(counts_in_place=False) as observer:
        _watching.append(observer)
        torch.distributed.init_process_group("nccl", rank=0, world_size=2)
        model = fully_shard(net("cuda"))
        observer.called(model)
        steps(model, torch.optim.SGD(model.parameters(), 0.1), "cuda")
        torch.distributed.destroy_process_group()
        assert kinds(observer.facts()) == []


def _without_sync(model: Any, x: torch.Tensor, how: str, *, is_last: bool) -> None:
    """A micro-batch, of which ``how`` says what is within ``no_sync()``."""
    none = contextlib.nullcontext()
    within = none if is_last and how != "all" else model.no_sync()
    with within if how in ("both", "all") else none:
        loss = model(x).square().mean() / 2
        with none if how in ("both", "all", "none") else within:
            loss.backward()


@pytest.mark.usefixtures("rendezvous")
@pytest.mark.parametrize(
    ("how", "wanted"),
    [
        ("backward", ["no_sync_in_vain"]),
        ("all", ["never_averaged"]),
        ("both", []),
        ("none", []),
    ],
)
def test_where_no_sync_holds(how: str, wanted: list[str]) -> None:
    with trainfit.simulate("2x T4"), observing(counts_in_place=False) as observer:
        _watching.append(observer)
        torch.distributed.init_process_group("nccl", rank=0, world_size=2)
        model = DistributedDataParallel(net("cuda"))
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        observer.called(model)
        for _ in range(5):
            for number in range(2):
                x = torch.randn(8, 16, device="cuda")
                _without_sync(model, x, how, is_last=number == 1)
            optimizer.step()
            optimizer.zero_grad()
        found = kinds(observer.facts())
        torch.distributed.destroy_process_group()
    assert [each for each in found if each in ("no_sync_in_vain", "never_averaged")] == wanted
