"""What a training's first steps show of its batches, optimizers, samples and graphs; and none of
those that do what they are for."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributions import Categorical, Normal, kl_divergence
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

import trainfit
from helpers_learning import found_of
from trainfit.findings.training.learning import of_learning
from trainfit.hooks.learning import LearningObserver
from trainfit.hooks.remade import Remade
from trainfit.results.findings import Finding
from trainfit.results.runs.learning import LearningFacts
from trainfit.simgpu.interventions.script_state import MadeOptimizer

Tensor = torch.Tensor
Found = Callable[[Callable[[LearningObserver], Any]], dict[str, Finding]]


@pytest.fixture
def found() -> Iterator[Found]:
    """On the CPU."""
    yield lambda training: found_of(lambda it: (training(it), gc.collect()))


@pytest.fixture
def simulated() -> Iterator[Found]:
    with trainfit.simulate("T4") as simulation:
        yield lambda training: found_of(lambda it: (training(it), gc.collect()), simulation)


def _train(
    observer: LearningObserver,
    model: nn.Module,
    loss: Callable[[Any], Tensor],
    loader: DataLoader[Any],
    make: Callable[[], torch.optim.Optimizer],
    *,
    each_step: bool = False,
) -> None:
    optimizer = make()
    for batch in loader:
        if each_step:
            optimizer = make()
        observer.called(model)
        observer.returned(model, None)
        optimizer.zero_grad()
        loss(batch).backward()
        optimizer.step()


def _net(inputs: int = 16, outputs: int = 4) -> nn.Module:
    return nn.Sequential(nn.Linear(inputs, 32), nn.ReLU(), nn.Linear(32, outputs))


def _plain(device: str = "cpu") -> tuple[nn.Module, Callable[[Any], Tensor], DataLoader[Any]]:
    model = _net().to(device)
    data = TensorDataset(torch.randn(40, 16), torch.randint(0, 4, (40,)))

    def loss(batch: Any) -> Tensor:
        x, y = (each.to(device) for each in batch)
        return F.cross_entropy(model(x), y)

    return model, loss, DataLoader(data, 8, shuffle=True)


def _is_here(finding: Finding) -> bool:
    return finding.place is not None and finding.place.file.endswith("test_training_misuse.py")


def test_an_optimizer_for_each_step(found: Found) -> None:
    def run(
        each_step: bool, kind: Callable[..., torch.optim.Optimizer], **options: float
    ) -> dict[str, Finding]:
        model, loss, loader = _plain()

        def make() -> torch.optim.Optimizer:
            return kind(model.parameters(), **options)

        return found(
            lambda observer: _train(observer, model, loss, loader, make, each_step=each_step)
        )

    told = run(True, torch.optim.Adam)["optimizer_remade"]
    assert told.title.startswith("A new Adam is made for each step") and _is_here(told)
    assert "optimizer_remade" in run(True, torch.optim.SGD, lr=0.1, momentum=0.9)
    assert not run(True, torch.optim.SGD, lr=0.1)  # it keeps nothing
    assert not run(False, torch.optim.Adam)


def test_an_optimizer_within_another_steps_in_turn_with_it() -> None:
    """ZeroRedundancyOptimizer makes its own in one line with itself, over the same parameters."""
    outer, inner = (torch.optim.Adam(_net().parameters()) for _ in range(2))
    inner.param_groups = outer.param_groups
    remade = Remade()
    assert not any(remade.steps(each, "train.py:3") for _ in range(9) for each in (outer, inner))


def test_an_optimizer_of_one_line_is_let_go_for_the_next() -> None:
    model, other = _net(), _net()
    first, second, third = (
        MadeOptimizer(torch.optim.Adam(each.parameters()), "train.py:3")
        for each in (model, model, other)
    )
    assert second.replaces(first) and not third.replaces(second)
    second.place = "train.py:4"
    assert not second.replaces(first)


def test_a_schedule_of_an_optimizer_that_is_replaced(found: Found) -> None:
    def run(keep: bool) -> dict[str, Finding]:
        model, loss, loader = _plain()

        def training(observer: LearningObserver) -> Any:
            optimizer: torch.optim.Optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
            schedule = torch.optim.lr_scheduler.StepLR(optimizer, 2)
            kept = [optimizer] if keep else []
            optimizer = torch.optim.AdamW(model.parameters())
            _train(observer, model, loss, loader, lambda: optimizer)
            return schedule, optimizer, kept

        return found(training)

    told = run(keep=False)["schedule_left_behind"]
    assert told.title.startswith("StepLR changes the learning rate of an optimizer that makes no")
    assert "AdamW" in told.title and _is_here(told)
    assert not run(keep=True)  # it may be for a later phase


def test_a_schedule_of_an_optimizer_that_made_steps_until_it_was_replaced(found: Found) -> None:
    def run(again: bool) -> dict[str, Finding]:
        model, loss, loader = _plain()

        def training(observer: LearningObserver) -> Any:
            optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
            schedule = torch.optim.lr_scheduler.StepLR(optimizer, 2)
            _train(observer, model, loss, loader, lambda: optimizer)
            optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
            if again:
                schedule = torch.optim.lr_scheduler.StepLR(optimizer, 2)
            _train(observer, model, loss, loader, lambda: optimizer)
            return schedule, optimizer

        return found(training)

    assert "schedule_left_behind" in run(again=False)
    assert "schedule_left_behind" not in run(again=True)


def test_a_data_set_that_is_sorted_by_class(found: Found) -> None:
    def run(labels: Tensor, learns: bool = True, **options: Any) -> dict[str, Finding]:
        model, loss, _ = _plain()
        if not learns:
            loss = lambda batch: model(batch[0]).square().mean()  # noqa: E731
        loader = DataLoader(TensorDataset(torch.randn(len(labels), 16), labels), 8, **options)
        return found(
            lambda observer: _train(
                observer, model, loss, loader, lambda: torch.optim.Adam(model.parameters())
            )
        )

    in_order = torch.arange(4).repeat_interleave(20)
    told = run(in_order)["sorted_by_class"]
    assert "shuffle=True" in told.fixes[0].action and _is_here(told)
    assert "one class after another of 4" in told.title
    assert not run(in_order, shuffle=True)
    assert not run(in_order, learns=False)  # a style, by images in folders
    assert not run(torch.arange(80) % 4)
    assert not run(torch.zeros(80, dtype=torch.long))
    assert not run(torch.arange(4).repeat_interleave(8))  # a class is a single batch


def test_batches_that_are_mostly_padding(found: Found) -> None:
    def run(longest: int, *, frozen: bool = False) -> dict[str, Finding]:
        tokens = torch.zeros(32, 128, dtype=torch.long)
        tokens[:, :longest] = torch.randint(1, 50, (32, longest))
        encoder, model = nn.Sequential(nn.Embedding(50, 8), nn.Flatten()), nn.Linear(1024, 4)
        whole = nn.Sequential(encoder, model)
        encoder.requires_grad_(not frozen)
        trained = model if frozen else whole

        def loss(batch: Any) -> Tensor:
            result = model(encoder(batch[0])) if frozen else whole(batch[0])
            return result.square().mean()

        loader = DataLoader(TensorDataset(tokens), 8, shuffle=True)
        return found(
            lambda observer: _train(
                observer, model, loss, loader, lambda: torch.optim.Adam(trained.parameters())
            )
        )

    told = run(30)["padding_everywhere"]
    assert told.title.startswith("77% of the positions are padding in all rows of a batch: batches")
    assert "8×128" in told.title and "no row is longer than 30" in told.title and _is_here(told)
    assert "longest row of the batch" in told.fixes[0].action
    assert not run(100)
    assert "padding_everywhere" not in run(0)  # zeros in the place of a text
    # As the text encoder of Stable Diffusion, whose every position the trained model attends to.
    assert "padding_everywhere" not in run(30, frozen=True)


def test_samples_of_an_encoder_without_a_graph(found: Found) -> None:
    def run(sample: str, *, asks: bool = False) -> dict[str, Finding]:
        encoder, decoder = _net(16, 8), _net(4, 16)
        model = nn.ModuleList([encoder, decoder])

        def loss(batch: Any) -> Tensor:
            mean, deviation = encoder(batch[0]).chunk(2, 1)
            q = Normal(mean, deviation.exp())
            z = getattr(q, sample)()
            more = -q.log_prob(z).mean() if asks else 0.0
            prior = Normal(torch.zeros(4), torch.ones(4))
            divergence = kl_divergence(q, prior).mean()
            return F.mse_loss(decoder(z), batch[0]) + divergence + more

        return found(
            lambda observer: _train(
                observer, model, loss, _plain()[2], lambda: torch.optim.Adam(model.parameters())
            )
        )

    told = run("sample")["sample_without_graph"]
    assert "rsample()" in told.fixes[0].action and told.title.startswith("Normal.sample()")
    assert not run("rsample")
    assert not run("sample", asks=True)  # a policy


def test_a_softmax_by_hand(simulated: Found) -> None:
    def run(activate: Callable[[Tensor], Tensor]) -> dict[str, Finding]:
        model = _net().cuda()

        def loss(batch: Any) -> Tensor:
            x, y = (each.cuda() for each in batch)
            return -activate(model(x)).gather(1, y[:, None]).log().mean()

        return simulated(
            lambda observer: _train(
                observer, model, loss, _plain()[2], lambda: torch.optim.Adam(model.parameters())
            )
        )

    def by_hand(x: Tensor) -> Tensor:
        exponential = torch.exp(x)
        return exponential / exponential.sum(1, keepdim=True)

    told = run(by_hand)["softmax_by_hand"]
    assert _is_here(told) and "softmax" in told.fixes[0].action
    assert not run(lambda x: by_hand(x - x.max(1, keepdim=True).values))
    assert not run(lambda x: by_hand(-x.square()))
    assert not run(lambda x: x.softmax(1))


class Keeping(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.y = y = x.exp()
        return y

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:  # type: ignore[override]
        return grad * ctx.y


class Saving(Keeping):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        y = x.exp()
        ctx.save_for_backward(y)
        ctx.x = x
        return y

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:  # type: ignore[override]
        return grad * ctx.saved_tensors[0]


def test_a_function_that_keeps_its_result(found: Found) -> None:
    def run(function: Any) -> dict[str, Finding]:
        model, _, loader = _plain()

        def loss(batch: Any) -> Tensor:
            return function.apply(model(batch[0])).mean()

        return found(
            lambda observer: _train(
                observer, model, loss, loader, lambda: torch.optim.Adam(model.parameters())
            )
        )

    told = run(Keeping)["result_on_context"]
    assert told.title.startswith("Keeping keeps its result as ctx.y") and _is_here(told)
    assert "save_for_backward(y" in told.fixes[0].action
    assert not run(Saving)


def test_autocast_without_a_layer_in_it(simulated: Found) -> None:
    def run(*, model_within: bool) -> dict[str, Finding]:
        model = _net().cuda()

        def loss(batch: Any) -> Tensor:
            x, y = (each.cuda() for each in batch)
            with torch.autocast("cuda", torch.bfloat16, enabled=model_within):
                out = model(x)
            with torch.autocast("cuda", torch.bfloat16):
                return F.cross_entropy(out, y)

        return simulated(
            lambda observer: _train(
                observer, model, loss, _plain()[2], lambda: torch.optim.Adam(model.parameters())
            )
        )

    told = run(model_within=False)["autocast_in_vain"]
    assert _is_here(told) and "call the model within it" in told.fixes[0].action
    assert not run(model_within=True)


def test_autocast_of_a_teacher_alone(simulated: Found) -> None:
    model, teacher = _net().cuda(), _net().cuda().requires_grad_(False)

    def training(observer: LearningObserver) -> None:
        def loss(batch: Any) -> Tensor:
            x = batch[0].cuda()
            with torch.autocast("cuda", torch.bfloat16):
                observer.called(teacher)
                goal = teacher(x)
            return F.mse_loss(model(x), goal.float())

        _train(observer, model, loss, _plain()[2], lambda: torch.optim.Adam(model.parameters()))

    assert "autocast_in_vain" not in simulated(training)


def test_an_evaluation_that_is_sorted(found: Found) -> None:
    """Between steps, of a data set as they are: in the order of its classes."""
    model, loss, loader = _plain()
    in_order = torch.arange(4).repeat_interleave(20)
    evaluation = DataLoader(TensorDataset(torch.randn(80, 16), in_order), 8)

    def evaluated(batch: Any) -> Tensor:
        for x, _ in evaluation:
            model(x)
        return loss(batch)

    told = found(
        lambda observer: _train(
            observer, model, evaluated, loader, lambda: torch.optim.Adam(model.parameters())
        )
    )
    assert "sorted_by_class" not in told


def test_a_large_model_in_float64(found: Found) -> None:
    def run(width: int, dtype: torch.dtype) -> dict[str, Finding]:
        model = nn.Linear(16, width).to(dtype)

        def loss(batch: Any) -> Tensor:
            return model(batch[0].to(dtype)).square().mean()

        return found(
            lambda observer: _train(
                observer,
                model,
                loss,
                _plain()[2],
                lambda: torch.optim.SGD(model.parameters(), 0.1),
            )
        )

    assert run(70_000, torch.float64)["double"].severity == "info"
    assert not run(70_000, torch.float32)
    assert not run(7, torch.float64)


def test_batches_of_an_epochs_end_that_train_nothing(found: Found) -> None:
    def run(*, at_end: bool) -> dict[str, Finding]:
        model, loss, loader = _plain()

        def training(observer: LearningObserver) -> None:
            optimizer = torch.optim.Adam(model.parameters())
            for _ in range(3):
                optimizer.zero_grad()
                for number, batch in enumerate(loader):
                    observer.called(model)
                    (loss(batch) / 2).backward()
                    if number % 2 or (at_end and number + 1 == len(loader)):
                        optimizer.step()
                        optimizer.zero_grad()

        return found(training)

    told = run(at_end=False)["remainder_dropped"]
    assert told.title.startswith("The rest of an epoch, 1 batch, trains nothing")
    assert told.severity == "warning" and _is_here(told)
    assert "remainder_dropped" not in run(at_end=True)
    (little,) = of_learning(LearningFacts(steps=4, remainder=3, remainder_share=0.01))
    assert little.severity == "info" and "3 batches, trains nothing" in little.title


def test_an_advantage_that_is_not_detached(found: Found) -> None:
    def run(advantage: Callable[[Tensor, Tensor], Tensor], *, trunk: bool = False) -> Any:
        actor, critic, body = _net(), _net(16, 1), _net(16, 16)
        model = nn.ModuleList([actor, critic, body])

        def loss(batch: Any) -> Tensor:
            x = body(batch[0]) if trunk else batch[0]
            policy, values = Categorical(logits=actor(x)), critic(x).squeeze(1)
            returns = torch.ones(len(x))
            chosen = policy.log_prob(policy.sample())
            gain = -(chosen * advantage(returns, values)).mean()
            return gain + F.mse_loss(values, returns) - 0.01 * policy.entropy().mean()

        return found(
            lambda observer: _train(
                observer, model, loss, _plain()[2], lambda: torch.optim.Adam(model.parameters())
            )
        )

    for trunk in (False, True):
        told = run(lambda returns, values: returns - values, trunk=trunk)["advantage_with_graph"]
        assert _is_here(told) and "detach()" in told.fixes[0].action
    normalized = run(lambda returns, values: (returns - values - 1.0) / 2.0)
    assert "advantage_with_graph" in normalized
    for healthy in (
        lambda returns, values: (returns - values).detach(),
        lambda returns, values: returns - values.detach(),
        lambda returns, _: returns,
        lambda _, values: values.sigmoid(),  # a weight of a mixture
    ):
        assert "advantage_with_graph" not in run(healthy)


def test_a_state_of_which_no_name_is_the_models(found: Found) -> None:
    state = {f"module.{name}": value for name, value in _net().state_dict().items()}

    def run(state: dict[str, Any]) -> dict[str, Finding]:
        model, loss, loader = _plain()

        def load_and_train(observer: LearningObserver) -> None:
            model.load_state_dict(state, strict=False)
            _train(observer, model, loss, loader, lambda: torch.optim.SGD(model.parameters(), 0.1))

        return found(load_and_train)

    told = run(state)["state_not_loaded"]
    assert "module.0.weight against 0.weight" in told.title and _is_here(told)
    assert 'removeprefix("module.")' in told.fixes[0].action
    nested = run({"model": _net().state_dict(), "epoch": 3})["state_not_loaded"]
    assert 'checkpoint["state_dict"]' in nested.fixes[0].action
    # All but a new head; all and more.
    assert not run({k: v for k, v in _net().state_dict().items() if k[0] == "0"})
    assert not run({**_net().state_dict(), "head.weight": torch.zeros(3)})
    assert not run({})


def test_gradients_with_a_graph_that_nobody_uses(found: Found) -> None:
    def run(train: Callable[[nn.Module, Tensor], None]) -> dict[str, Finding]:
        model, _, loader = _plain()
        optimizer = torch.optim.SGD(model.parameters(), 0.1)

        def steps(observer: LearningObserver) -> None:
            for x, y in loader:
                observer.called(model)
                optimizer.zero_grad()
                train(model, F.cross_entropy(model(x), y))
                optimizer.step()

        return found(steps)

    def penalized(model: nn.Module, loss: Tensor) -> None:
        loss.backward(create_graph=True)
        sum(p.grad.pow(2).sum() for p in model.parameters() if p.grad is not None).backward()

    def asked(model: nn.Module, loss: Tensor) -> None:
        loss.backward(create_graph=True)
        torch.autograd.grad(sum(p.grad.sum() for p in model.parameters()), [*model.parameters()])

    told = run(lambda _, loss: loss.backward(create_graph=True))["second_order_unused"]
    assert _is_here(told) and told.fixes[0].line == "loss.backward()"
    for train in (penalized, asked, lambda _, loss: loss.backward()):
        assert "second_order_unused" not in run(train)


def test_labels_that_are_shifted_by_the_script_and_by_the_model(simulated: Found) -> None:
    class Causal(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed, self.head = nn.Embedding(50, 8), nn.Linear(8, 50)
            self.positions = nn.Embedding(12, 8)

        def forward(self, tokens: Tensor, labels: Tensor) -> Tensor:
            places = torch.arange(tokens.shape[1], device=tokens.device)[None]
            output = self.head(self.embed(tokens) + self.positions(places)).flatten(0, 1)
            labels = F.pad(labels, (0, 1), value=-100)[..., 1:].contiguous()
            return F.cross_entropy(output, labels.flatten())

    def run(loss: Callable[[nn.Module, Tensor], Tensor]) -> dict[str, Finding]:
        model = Causal().cuda()
        loader = DataLoader(torch.randint(0, 50, (16, 12)), 4)

        def train(observer: LearningObserver) -> None:
            def make() -> torch.optim.Optimizer:
                return torch.optim.SGD(model.parameters(), 0.1)

            _train(observer, model, lambda tokens: loss(model, tokens.cuda()), loader, make)

        return simulated(train)

    assert "shifted_twice" in run(lambda model, tokens: model(tokens[:, :-1], tokens[:, 1:]))
    assert "shifted_twice" not in run(lambda model, tokens: model(tokens, tokens))
    assert "shifted_twice" not in run(lambda model, tokens: model(tokens[:, 1:], tokens[:, 1:]))


def test_ctc_of_a_layers_output(found: Found) -> None:
    def run(activate: Callable[[Tensor], Tensor]) -> dict[str, Finding]:
        model = nn.Linear(16, 5)
        lengths = torch.full((4,), 12), torch.full((4,), 3)

        def loss(batch: Any) -> Tensor:
            output = activate(model(batch)).transpose(0, 1)
            return F.ctc_loss(output, torch.ones(4, 3, dtype=torch.long), *lengths)

        loader = DataLoader(torch.randn(16, 12, 16), 4)
        return found(
            lambda observer: _train(
                observer, model, loss, loader, lambda: torch.optim.SGD(model.parameters(), 0.1)
            )
        )

    told = run(lambda x: x)["activation_missing"]
    assert told.title.startswith("ctc_loss gets a layer's output") and _is_here(told)
    assert "activation_twice" in run(lambda x: x.softmax(2))
    assert not run(lambda x: x.log_softmax(2))


def test_a_function_of_rates_where_a_factor_is_wanted(found: Found) -> None:
    def run(function: Callable[[int], float], lr: float) -> dict[str, Finding]:
        model, loss, loader = _plain()

        def make() -> torch.optim.Optimizer:
            optimizer = torch.optim.Adam(model.parameters(), lr)
            kept.append(torch.optim.lr_scheduler.LambdaLR(optimizer, function))
            return optimizer

        kept: list[Any] = []
        return found(lambda observer: _train(observer, model, loss, loader, make))

    told = run(lambda epoch: 1e-3 * 0.95**epoch, 1e-3)["rate_times_rate"]
    assert told.title.startswith("The learning rate is never above 1e-06") and _is_here(told)
    for function, lr in (
        (lambda epoch: 0.95**epoch, 1e-3),
        (lambda step: min(1.0, (step + 1) / 5000), 1e-3),  # a warm-up
        (lambda step: 512**-0.5 * min((step + 1) ** -0.5, (step + 1) * 4000**-1.5), 1.0),
    ):
        assert "rate_times_rate" not in run(function, lr)


def test_a_gradient_penalty_without_a_graph(simulated: Found) -> None:
    def run(create_graph: bool, weight: bool = False) -> dict[str, Finding]:
        model = _net().cuda()

        def loss(batch: Tensor) -> Tensor:
            x = batch.cuda().requires_grad_(True)
            value = model(x).mean()
            (slope,) = torch.autograd.grad(value, x, create_graph=create_graph)
            penalty = ((slope.norm(2, dim=1) - 1) ** 2).mean()
            value = model(x).mean()
            return value * penalty if weight else value + 10 * penalty

        loader = DataLoader(torch.randn(32, 16), 8)
        return simulated(
            lambda observer: _train(
                observer, model, loss, loader, lambda: torch.optim.SGD(model.parameters(), 0.1)
            )
        )

    told = run(False)["term_cut_off"]
    assert "create_graph=True" in told.cause and "create_graph=True" in told.fixes[0].action
    assert "term_cut_off" not in run(True)
    assert "term_cut_off" not in run(False, weight=True)


def test_ctc_of_a_layer_over_time_steps(simulated: Found) -> None:
    def run(activate: Callable[[Tensor], Tensor]) -> dict[str, Finding]:
        model = nn.Sequential(nn.Linear(16, 8), nn.Linear(8, 5)).cuda()
        lengths = torch.full((4,), 12), torch.full((4,), 3)

        def loss(batch: Tensor) -> Tensor:
            output = activate(model(batch.cuda().transpose(0, 1)))
            return F.ctc_loss(output, torch.ones(4, 3, dtype=torch.long).cuda(), *lengths)

        loader = DataLoader(torch.randn(16, 12, 16), 4)
        return simulated(
            lambda observer: _train(
                observer, model, loss, loader, lambda: torch.optim.SGD(model.parameters(), 0.1)
            )
        )

    assert "activation_missing" in run(lambda x: x)
    assert not run(lambda x: x.log_softmax(2))


def _initialized(
    *weights: int, after: Callable[[nn.Sequential], Any] = lambda _: None
) -> Callable[[LearningObserver], nn.Module]:
    """A training of three layers, of which these get zeros."""

    def training(observer: LearningObserver) -> nn.Module:
        layers = (nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 32), nn.ReLU(), nn.Linear(32, 3))
        model = nn.Sequential(*layers)
        for at in weights:
            nn.init.zeros_(model[at].weight)
        after(model)
        model.cuda()
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        for _ in range(3):
            observer.called(model)
            optimizer.zero_grad()
            model(torch.randn(8, 16, device="cuda")).mean().backward()
            optimizer.step()
        return model

    return training


def test_weights_that_all_begin_with_one_value_on_a_gpu(simulated: Found) -> None:
    told = simulated(_initialized(0, 2, 4))["units_alike"]
    assert "All 32 units of 0.weight (and of 2 other layers)" in told.title
    for training in (
        _initialized(2, 4),
        _initialized(0, 2, 4, after=lambda model: nn.init.xavier_uniform_(model[0].weight)),
        _initialized(0, 2, 4, after=lambda model: model.load_state_dict(model.state_dict())),
    ):
        assert "units_alike" not in simulated(training)


def _coded(drawn: Callable[[Normal], Any], *, decodes: bool = True) -> Any:
    """A coder whose divergence is written out."""

    def training(observer: LearningObserver) -> nn.Module:
        model = nn.ModuleList([nn.Linear(6, 4), nn.Linear(2, 6)]).cuda()
        optimizer = torch.optim.SGD(model.parameters(), 0.1)

        def loss(x: Tensor) -> Tensor:
            mean, log_variance = model[0](x).chunk(2, 1)
            z = drawn(Normal(mean, (0.5 * log_variance).exp()))
            part = model[1](z).square().mean() if decodes else ((z - mean) ** 2).mean()
            return part + (mean.square() + log_variance.exp() - log_variance).mean()

        for _ in range(4):
            observer.called(model)
            optimizer.zero_grad()
            loss(torch.rand(8, 6, device="cuda")).backward()
            optimizer.step()
        return model

    return training


def test_a_sample_next_to_a_divergence_that_is_written_out(simulated: Found) -> None:
    told = simulated(_coded(lambda it: it.sample()))["sample_without_graph"]
    assert told.place is not None and "Normal.sample()" in told.title
    for training in (
        _coded(lambda it: it.rsample()),
        _coded(lambda it: it.sample(), decodes=False),  # a density that is written out
        _coded(lambda it: (it.sample(), it.log_prob(it.loc))[0]),  # a policy's
    ):
        assert "sample_without_graph" not in simulated(training)


@pytest.mark.parametrize("which", ["both", "apart", "same"])
def test_parameters_of_two_optimizers_in_turn(simulated: Found, which: str) -> None:
    def training(observer: LearningObserver) -> nn.Module:
        model = nn.ModuleList([nn.Linear(6, 6), nn.Linear(6, 1)]).cuda()
        first, last = model
        owned = {
            "both": (model, last),
            "apart": (first, last),
            "same": (model, model),  # two stages of a step, as of an own optimizer
        }[which]
        deceives, tells = (torch.optim.SGD(each.parameters(), 0.1) for each in owned)
        for _ in range(5):
            x = torch.rand(8, 6, device="cuda")
            for optimizer, sign in ((tells, 1), (deceives, -1)):
                observer.called(model)
                optimizer.zero_grad()
                (sign * last(first(x))).mean().backward()
                optimizer.step()
        return model

    assert ("trained_in_turn" in simulated(training)) is (which == "both")
