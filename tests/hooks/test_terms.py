"""What losses are computed of, and what several passes and optimizers do with gradients: where that
is not what is meant, and none of what is."""

from __future__ import annotations

import copy
import sysconfig
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset, default_collate

from helpers_learning import found_of, train
from trainfit.hooks.learning import LearningObserver
from trainfit.results.findings import Finding
from trainfit.simgpu.session import Simulation

Tensor = torch.Tensor
Found = dict[str, Finding]
Kinds = Callable[[Callable[[LearningObserver], Any]], Found]
_STEPS = 4


@pytest.fixture
def kinds(simulation: Simulation) -> Kinds:
    return lambda training: found_of(training, simulation)


def net(outputs: int = 4, inputs: int = 8) -> nn.Sequential:
    return nn.Sequential(nn.Linear(inputs, 16), nn.ReLU(), nn.Linear(16, outputs)).cuda()


def rows(columns: int = 8, number: int = 16) -> Tensor:
    return torch.rand(number, columns, device="cuda")


def training(loss: Callable[[nn.Module, Tensor], Tensor], model: nn.Module | None = None) -> Any:
    """Some steps of a loss of the model and of a batch."""

    def of(observer: LearningObserver) -> Any:
        own = model or net()
        train(observer, own, lambda _: loss(own, rows()), range(_STEPS))
        return own

    return of


# -- logarithms --------------------------------------------------------------------------------


def _chosen(output: Tensor) -> Tensor:
    return output.gather(1, torch.zeros(len(output), 1, dtype=torch.long, device="cuda")).squeeze(1)


@pytest.mark.parametrize(
    "given",
    [
        lambda x: x,
        _chosen,
        lambda x: x + 1e-8,
        lambda x: -x[:, 0],
        lambda x: x.view(4, 4, 4),
    ],
)
def test_a_logarithm_of_a_layers_output_is_nan(
    kinds: Kinds, given: Callable[[Tensor], Tensor]
) -> None:
    found = kinds(training(lambda model, x: -torch.log(given(model(x))).mean()))["log_of_output"]
    assert found.severity == "critical"
    assert found.place is not None


@pytest.mark.parametrize(
    "given",
    [
        lambda x: x.softmax(1),
        lambda x: F.softplus(x) + 1e-6,
        lambda x: x.clamp(min=1e-6),
        lambda x: x.exp().sum(1),
        lambda x: x.abs() + 1e-6,
        lambda x: x**2 + 1,
    ],
)
def test_a_logarithm_of_what_is_above_0_is_none(
    kinds: Kinds, given: Callable[[Tensor], Tensor]
) -> None:
    assert "log_of_output" not in kinds(training(lambda model, x: -given(model(x)).log().mean()))


class _Positive(nn.Module):
    """A network whose weights are above 0, as those of monotonic ones."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.rand(4, 8))

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, F.softplus(self.weight))


def test_weights_that_are_kept_above_0_give_what_a_logarithm_may_get(kinds: Kinds) -> None:
    loss = training(lambda model, x: -model(x).log().mean(), _Positive().cuda())
    assert "log_of_output" not in kinds(loss)


def test_a_logarithm_that_is_only_shown_spoils_nothing(kinds: Kinds) -> None:
    def loss(model: Any, x: Tensor) -> Tensor:
        output = model(x)
        output.log().mean()
        return output.pow(2).mean()

    assert "log_of_output" not in kinds(training(loss))


# -- targets -----------------------------------------------------------------------------------


def _distilled(teacher: Callable[[Tensor], Tensor], *, log_target: bool = False) -> Any:
    large = net()

    def loss(model: Any, x: Tensor) -> Tensor:
        with torch.no_grad():
            target = teacher(large(x) / 4)
        output = F.log_softmax(model(x) / 4, dim=1)
        return nn.KLDivLoss(reduction="batchmean", log_target=log_target)(output, target.detach())

    return training(loss)


def test_logarithms_as_target_of_a_divergence(kinds: Kinds) -> None:
    found = kinds(_distilled(lambda x: F.log_softmax(x, dim=1)))["target_of_logs"]
    assert found.fixes[0].line == "log_target=True"
    assert "target_of_logs" in kinds(_distilled(lambda x: torch.softmax(x, 1).log()))


def test_probabilities_that_are_said_to_be_logarithms(kinds: Kinds) -> None:
    found = kinds(_distilled(lambda x: x.softmax(1), log_target=True))["target_of_logs"]
    assert "probabilities as target" in found.title


def test_targets_as_a_divergence_wants_them(kinds: Kinds) -> None:
    assert "target_of_logs" not in kinds(_distilled(lambda x: x.softmax(1)))
    right = _distilled(lambda x: x.log_softmax(1), log_target=True)
    assert "target_of_logs" not in kinds(right)


def test_a_target_of_the_next_state_is_trained_too(kinds: Kinds) -> None:
    def loss(q: Any, x: Tensor) -> Tensor:
        expected = x[:, 0] + 0.99 * q(rows()).max(1)[0] * (1 - x[:, 1].round())
        return F.smooth_l1_loss(_chosen(q(x)), expected)

    found = kinds(training(loss))["target_trained"]
    assert "smooth_l1_loss" in found.title


def test_a_target_that_is_cut_off_is_not(kinds: Kinds) -> None:
    def loss(q: Any, x: Tensor) -> Tensor:
        expected = x[:, 0] + 0.99 * q(rows()).max(1)[0]
        return F.smooth_l1_loss(_chosen(q(x)), expected.detach())

    assert "target_trained" not in kinds(training(loss))


@pytest.mark.parametrize(
    "loss",
    [
        lambda model, x: F.mse_loss(model(x), model(x + 0.1)),  # two views of one sample
        lambda model, x: F.mse_loss(model(x), x[:, :4] + model(x)),
        lambda model, x: F.mse_loss(model(x), 0.9 * model(x.flip(0))),
    ],
)
def test_two_outputs_that_are_meant_to_be_alike(kinds: Kinds, loss: Any) -> None:
    assert "target_trained" not in kinds(training(loss))


def _transcribed(steps: int, labels: int) -> Any:
    def loss(model: Any, _: Tensor) -> Tensor:
        output = model(torch.rand(steps, 3, 8, device="cuda")).log_softmax(2)
        targets = torch.ones(3, labels, dtype=torch.long, device="cuda")
        lengths = torch.full((3,), steps), torch.tensor([1, 2, labels])
        return nn.CTCLoss()(output, targets, *lengths)

    return training(loss)


def test_more_labels_than_steps(kinds: Kinds) -> None:
    found = kinds(_transcribed(5, 9))["labels_too_long"]
    assert "9 labels of 5 steps in 1 of 3 samples" in found.title
    assert "labels_too_long" not in kinds(_transcribed(9, 9))


# -- means and sums ----------------------------------------------------------------------------


def _focal(reduction: str) -> Any:
    def loss(model: Any, x: Tensor) -> Tensor:
        labels = torch.zeros(len(x), dtype=torch.long, device="cuda")
        entropy = F.cross_entropy(model(x), labels, reduction=reduction)
        return ((1 - torch.exp(-entropy)) ** 2 * entropy).mean()

    return training(loss)


def test_a_focal_loss_of_the_mean(kinds: Kinds) -> None:
    assert kinds(_focal("mean"))["focal_of_mean"].severity == "warning"
    assert "focal_of_mean" not in kinds(_focal("none"))


def _coded(reduction: str, weight: float) -> Any:
    model = nn.ModuleDict({"encoder": net(8, 400), "decoder": net(400, 4)})

    def loss(_: Any, __: Tensor) -> Tensor:
        x = rows(400)
        mean, log_var = model["encoder"](x).chunk(2, dim=1)
        output = model["decoder"](mean + torch.randn_like(mean) * (0.5 * log_var).exp())
        divergence = -0.5 * torch.sum(1 + log_var - mean.pow(2) - log_var.exp())
        return F.mse_loss(output, x, reduction=reduction) + weight * divergence

    return training(loss, model)


def test_a_sum_beside_a_mean(kinds: Kinds) -> None:
    found = kinds(_coded("mean", 1.0))["divergence_dominates"]
    assert "3,200×" in found.title  # half of 16 rows of 400 numbers


@pytest.mark.parametrize(("reduction", "weight"), [("sum", 1.0), ("mean", 1 / 6400), ("sum", 4.0)])
def test_sums_and_means_that_go_together(kinds: Kinds, reduction: str, weight: float) -> None:
    assert "divergence_dominates" not in kinds(_coded(reduction, weight))


def _normalized(number: int, **options: Any) -> Any:
    def loss(model: Any, x: Tensor) -> Tensor:
        output = model(x[:number])
        return (output / (output.std(0, **options) + 1e-6)).pow(2).mean()

    return training(loss)


def test_the_deviation_of_one_number_is_nan(kinds: Kinds) -> None:
    assert "drop_last" in kinds(_normalized(1))["deviation_of_one"].fixes[0].action
    assert "deviation_of_one" not in kinds(_normalized(2))
    assert "deviation_of_one" not in kinds(_normalized(1, correction=0))


def _returns(number: int, use: Any) -> Any:
    def loss(model: Any, x: Tensor) -> Tensor:
        rewards = torch.ones(number, device=x.device)
        rewards = (rewards - rewards.mean()) / (rewards.std() + 1e-8)
        return use(model(x[:number]).mean(1), rewards)

    return training(loss)


def test_what_is_multiplied_by_the_deviation_of_one_number(kinds: Kinds) -> None:
    weighted = lambda output, rewards: (output * rewards).sum()  # noqa: E731
    cleaned = lambda output, rewards: (output * torch.nan_to_num(rewards)).sum()  # noqa: E731
    assert "std() goes over" in kinds(_returns(1, weighted))["deviation_of_one"].title
    for number, use in ((4, weighted), (1, cleaned), (1, lambda output, _: output.sum())):
        assert "deviation_of_one" not in kinds(_returns(number, use))


# -- several passes and optimizers -------------------------------------------------------------


def _gan(cut: Callable[[Tensor], Tensor]) -> Any:
    def train(observer: LearningObserver) -> Any:
        generator, critic = net(8), net(1)
        of_generator = torch.optim.Adam(generator.parameters())
        of_critic = torch.optim.Adam(critic.parameters())
        for _ in range(_STEPS):
            observer.called(generator)
            observer.called(critic)
            of_critic.zero_grad()
            (critic(cut(generator(rows()))).mean() - critic(rows()).mean()).backward()
            of_critic.step()
            of_generator.zero_grad()
            (-critic(generator(rows())).mean()).backward()
            of_generator.step()
        return generator, critic

    return train


def test_a_pass_that_goes_on_through_the_generator(kinds: Kinds) -> None:
    found = kinds(_gan(lambda fake: fake))["graph_beyond"]
    assert "4 tensors" in found.title
    assert "graph_beyond" not in kinds(_gan(torch.Tensor.detach))


def test_parts_of_one_model_in_two_optimizers(kinds: Kinds) -> None:
    def train(observer: LearningObserver) -> Any:
        body, head = net(8), net(4)
        optimizers = [torch.optim.SGD(each.parameters(), 0.1) for each in (body, head)]
        for _ in range(_STEPS):
            observer.called(body)
            for each in optimizers:
                each.zero_grad()
            head(body(rows())).pow(2).mean().backward()
            for each in optimizers:
                each.step()
        return body, head

    found = kinds(train)
    assert not {"graph_beyond", "step_of_two"} & found.keys()


def test_the_part_behind_steps_last(kinds: Kinds) -> None:
    def train(observer: LearningObserver) -> Any:
        body, head = net(8), net(4)
        optimizers = [torch.optim.SGD(each.parameters(), 0.1) for each in (head, body)]
        for _ in range(_STEPS):
            observer.called(body)
            head(body(rows())).pow(2).mean().backward()
            for each in optimizers:
                each.step()
            for each in optimizers:
                each.zero_grad()
        return body, head

    assert "graph_beyond" not in kinds(train)


def test_an_optimizer_for_each_parameter_that_its_hook_steps(kinds: Kinds) -> None:
    def train(observer: LearningObserver) -> Any:
        models = [nn.Linear(8, 8, bias=False).cuda() for _ in range(12)]
        parameters = [each for model in models for each in model.parameters()]
        optimizers = {each: torch.optim.SGD([each], 0.1) for each in parameters}

        def step(parameter: Tensor) -> None:
            optimizers[parameter].step()
            optimizers[parameter].zero_grad()

        for each in parameters:
            each.register_post_accumulate_grad_hook(step)
        for _ in range(_STEPS):
            x = rows()
            for model in models:
                observer.called(model)
                x = model(x)
            x.pow(2).mean().backward()
        return models

    assert not {"graph_beyond", "step_of_two", "trained_in_turn"} & kinds(train).keys()


def _actor_critic(*, both: bool, zeroes: bool = False) -> Any:
    def train(observer: LearningObserver) -> Any:
        agent = nn.ModuleDict({"actor": net(), "critic": net(1)})
        critic = agent["critic"]
        of_actor = torch.optim.Adam((agent if both else agent["actor"]).parameters())
        of_critic = torch.optim.Adam(critic.parameters())
        for _ in range(_STEPS):
            observer.called(agent)
            of_critic.zero_grad()
            critic(rows()).pow(2).mean().backward()
            of_critic.step()
            if zeroes:
                of_actor.zero_grad()
            agent["actor"](rows()).pow(2).mean().backward()
            of_actor.step()
            of_actor.zero_grad()
        return agent

    return train


class _Shared(torch.optim.Optimizer):
    """Has another optimizer for its share of the parameters, as ZeroRedundancyOptimizer has."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(list(parameters), {})
        self.optim = torch.optim.Adam(self.param_groups[0]["params"][:2])

    def step(self, closure: Any = None) -> None:
        self.optim.step(closure)


def test_an_optimizer_within_another_makes_one_step_with_it(kinds: Kinds) -> None:
    """ZeroRedundancyOptimizer was said to step with the gradients of another optimizer."""
    model = net()

    def train(observer: LearningObserver) -> Any:
        optimizer = _Shared(model.parameters())
        for _ in range(_STEPS):
            observer.called(model)
            model(rows()).pow(2).mean().backward()
            optimizer.step()
            optimizer.zero_grad()
        return model

    assert "step_of_two" not in kinds(train)


def test_two_optimizers_step_with_one_gradient(kinds: Kinds) -> None:
    assert "4 tensors" in kinds(_actor_critic(both=True))["step_of_two"].title
    assert "step_of_two" not in kinds(_actor_critic(both=False))
    assert "step_of_two" not in kinds(_actor_critic(both=True, zeroes=True))


def _attacked(passes: int, gradient: Callable[[nn.Module, Tensor, Tensor], Tensor]) -> Any:
    def train(observer: LearningObserver) -> Any:
        model = net()
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        for _ in range(_STEPS):
            observer.called(model)
            optimizer.zero_grad()
            x = rows()
            for _ in range(passes):
                x = x.detach().requires_grad_()
                x = x + gradient(model, x, model(x).pow(2).mean()).sign()
            model(x.detach()).pow(2).mean().backward()
            optimizer.step()
        return model

    return train


def _by_backward(_: nn.Module, x: Tensor, loss: Tensor) -> Tensor:
    loss.backward()
    assert x.grad is not None
    return x.grad


def _and_zeroed(model: nn.Module, x: Tensor, loss: Tensor) -> Tensor:
    gradient = _by_backward(model, x, loss)
    model.zero_grad()
    return gradient


def test_gradients_of_an_attack_are_in_the_step(kinds: Kinds) -> None:
    found = kinds(_attacked(3, _by_backward))["attack_in_step"]
    assert "3 passes" in found.title


@pytest.mark.parametrize(
    ("passes", "gradient"),
    [
        (3, lambda _, x, loss: torch.autograd.grad(loss, x)[0]),
        (3, _and_zeroed),
        (1, _by_backward),  # the clean batch is learned, too
    ],
)
def test_gradients_of_an_attack_that_are_not(kinds: Kinds, passes: int, gradient: Any) -> None:
    assert "attack_in_step" not in kinds(_attacked(passes, gradient))


def test_an_interleaved_pipeline_is_no_attack(kinds: Kinds) -> None:
    """A rank's later stage has gradients of what it received; its first stage has no such."""

    def train(observer: LearningObserver) -> Any:
        first, later = net(8), net(8)
        optimizer = torch.optim.SGD([*first.parameters(), *later.parameters()], 0.1)
        for _ in range(_STEPS):
            observer.called(first)
            optimizer.zero_grad()
            for _ in range(3):
                received = rows().requires_grad_()
                later(received).backward(rows())  # its gradient is sent
                first(rows()).backward(rows())
            optimizer.step()
        return first, later

    assert "attack_in_step" not in kinds(train)


def _with_target(update: Callable[[nn.Module, nn.Module], Any]) -> Any:
    def train(observer: LearningObserver) -> Any:
        online, target = net(), net()
        update(target, online)
        optimizer = torch.optim.Adam(online.parameters())
        for _ in range(_STEPS):
            for each in (online, target):
                observer.called(each)
            with torch.no_grad():
                expected = target(rows())
            optimizer.zero_grad()
            F.mse_loss(online(rows()), expected).backward()
            optimizer.step()
            update(target, online)
        return online, target

    return train


def _same_data(target: nn.Module, online: nn.Module) -> None:
    for one, other in zip(target.parameters(), online.parameters(), strict=True):
        one.data = other.data


def _copied_data(target: nn.Module, online: nn.Module) -> None:
    for one, other in zip(target.parameters(), online.parameters(), strict=True):
        one.data = 0.99 * one.data + 0.01 * other.data


def test_a_target_network_with_the_memory_of_the_other(kinds: Kinds) -> None:
    found = kinds(_with_target(_same_data))["one_memory"]
    assert "Two models (Sequential)" in found.title
    assert "one_memory" not in kinds(_with_target(_copied_data))
    copied = _with_target(lambda target, online: target.load_state_dict(online.state_dict()))
    assert "one_memory" not in kinds(copied)


def test_models_that_share_an_encoder_are_meant_so(kinds: Kinds) -> None:
    def train(observer: LearningObserver) -> Any:
        encoder = net(8)
        policy, value = nn.Sequential(encoder, net()), nn.Sequential(encoder, net(1))
        parameters = dict.fromkeys([*policy.parameters(), *value.parameters()])
        optimizer = torch.optim.Adam(list(parameters))
        for _ in range(_STEPS):
            for each in (policy, value):
                observer.called(each)
            optimizer.zero_grad()
            (policy(rows()).mean() + value(rows()).pow(2).mean()).backward()
            optimizer.step()
        return policy, value, copy.deepcopy(policy)

    assert "one_memory" not in kinds(train)


def test_a_differential_equation_has_graphs_on_both_sides(kinds: Kinds) -> None:
    def loss(model: Any, x: Tensor) -> Tensor:
        x.requires_grad_()
        first = torch.autograd.grad(model(x).sum(), x, create_graph=True)[0]
        second = torch.autograd.grad(first[:, 0].sum(), x, create_graph=True)[0]
        return F.mse_loss(first[:, 1], x[:, 0].detach() + 0.9 * second[:, 0])

    assert "target_trained" not in kinds(training(loss, net(1)))


# -- padding -----------------------------------------------------------------------------------


class _Language(nn.Module):
    def __init__(self, padding: int | None) -> None:
        super().__init__()
        self.embedding = nn.Embedding(20, 8, padding_idx=padding)
        self.layer = nn.Linear(8, 20)

    def forward(self, tokens: Tensor) -> Tensor:
        output: Tensor = self.layer(self.embedding(tokens))
        return output


def _sentences(number: int = 24, length: int = 12, used: int = 7) -> Tensor:
    tokens = torch.randint(1, 20, (number, length))
    tokens[:, used:] = 0
    return tokens


def _language(
    labels: Callable[[Tensor], Tensor], *, padding: int | None = 0, used: int = 7, **options: Any
) -> Any:
    def train(observer: LearningObserver) -> Any:
        model = _Language(padding).cuda()
        optimizer = torch.optim.Adam(model.parameters())
        criterion = nn.CrossEntropyLoss(**options).cuda()
        for (batch,) in DataLoader(TensorDataset(_sentences(used=used)), 6):
            observer.called(model)
            tokens = batch.cuda()
            optimizer.zero_grad()
            output = model(tokens[:, :-1])
            loss = criterion(output.reshape(-1, 20), labels(tokens[:, 1:]).reshape(-1))
            (loss.mean() if options.get("reduction") == "none" else loss).backward()
            optimizer.step()
        return model

    return train


def test_a_loss_over_padding(kinds: Kinds) -> None:
    found = kinds(_language(lambda tokens: tokens))["padding_learned"]
    assert "45% of a batch's labels are 0" in found.title  # 5 of 11
    assert found.fixes[0].line == "ignore_index=0"


@pytest.mark.parametrize(
    ("labels", "options"),
    [
        (lambda tokens: tokens, {"ignore_index": 0}),
        (lambda tokens: tokens, {"reduction": "none"}),  # a mask may come after it
        (lambda tokens: tokens, {"weight": torch.ones(20)}),
        (lambda tokens: tokens, {"padding": None}),
        (lambda tokens: tokens, {"used": 12}),
        (lambda tokens: tokens.masked_fill(tokens == 0, -100), {}),
        (lambda tokens: tokens.clone().fill_(3), {}),
    ],
)
def test_losses_without_padding(
    kinds: Kinds, labels: Callable[[Tensor], Tensor], options: dict[str, Any]
) -> None:
    assert "padding_learned" not in kinds(_language(labels, **options))


# -- batches, hooks, norms ---------------------------------------------------------------------


class _Batch:
    def __init__(self, rows: list[Any]) -> None:
        self.x = torch.stack([each for (each,) in rows])


class _Pinned(_Batch):
    def pin_memory(self) -> _Batch:
        return self


def _loaded(collate: Any, *, pin: bool = True) -> Any:
    def train(observer: LearningObserver) -> Any:
        model = net()
        loader = DataLoader(TensorDataset(torch.rand(32, 8)), 8, collate_fn=collate, pin_memory=pin)
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        for batch in loader:
            observer.called(model)
            optimizer.zero_grad()
            x = batch.x if isinstance(batch, _Batch) else batch[0]
            model(x.cuda()).pow(2).mean().backward()
            optimizer.step()
        return model

    return train


def test_a_class_of_batches_that_is_not_pinned(kinds: Kinds) -> None:
    assert "class _Batch" in kinds(_loaded(_Batch))["pinned_in_vain"].title
    assert "pinned_in_vain" not in kinds(_loaded(_Pinned))
    assert "pinned_in_vain" not in kinds(_loaded(_Batch, pin=False))
    assert "pinned_in_vain" not in kinds(_loaded(default_collate))


#: A function of an installed package.
_LIBRARY = compile(
    "def register(module, hook): return module.register_forward_hook(hook)",
    f"{sysconfig.get_path('purelib')}/library/hooks.py",
    "exec",
)


def _hooked(*, removes: bool = False, once: bool = False, by_library: bool = False) -> Any:
    model = net()
    kept: list[Any] = []
    library: dict[str, Any] = {}
    exec(_LIBRARY, library)
    register = library["register"] if by_library else torch.nn.Module.register_forward_hook

    def loss(_: Any, x: Tensor) -> Tensor:
        if not (once and kept):
            handle = register(model[0], lambda *it: kept.append(it[2].sum()))
        output = model(x)
        if removes:
            handle.remove()
        return output.pow(2).mean() + kept[-1] * 1e-3

    return training(loss, model)


def test_one_more_hook_in_each_step(kinds: Kinds) -> None:
    found = kinds(_hooked())["hooks_added"]
    assert "one more hook" in found.title
    assert "hooks_added" not in kinds(_hooked(removes=True))
    assert "hooks_added" not in kinds(_hooked(once=True))


def test_hooks_that_a_library_adds_are_not_the_scripts(kinds: Kinds) -> None:
    """Transformers adds one whenever checkpointing is turned on, which KTO does in each step."""
    assert "hooks_added" not in kinds(_hooked(by_library=True))


def _fine_tuned(*, evaluates: bool = False, freezes: bool = True) -> Any:
    backbone = nn.Sequential(nn.Linear(8, 16), nn.BatchNorm1d(16), nn.ReLU()).cuda()
    model = nn.Sequential(backbone, nn.Linear(16, 4).cuda())
    backbone.requires_grad_(not freezes)
    backbone.train(not evaluates)
    return training(lambda _, x: model(x).pow(2).mean(), model)


def test_statistics_of_a_frozen_norm_that_move(kinds: Kinds) -> None:
    found = kinds(_fine_tuned())["norm_of_frozen"]
    assert "BatchNorm 0.1" in found.title
    assert "norm_of_frozen" not in kinds(_fine_tuned(evaluates=True))
    assert "norm_of_frozen" not in kinds(_fine_tuned(freezes=False))


def _by_foreach(ema: nn.Module, model: nn.Module) -> None:
    own, new = ([each.detach() for each in it.parameters()] for it in (ema, model))
    torch._foreach_lerp_(own, new, 0.1)


def _assigned(ema: nn.Module, model: nn.Module) -> None:
    for own, new in zip(ema.parameters(), model.parameters(), strict=True):
        own.data = own.data * 0.9 + new.data * 0.1


@pytest.mark.parametrize("moves", [True, False])
def test_an_encoder_that_follows_another_is_not_frozen(kinds: Kinds, moves: bool) -> None:
    """MoCo's, BYOL's: the script moves its weights, and its BatchNorm is to see each batch."""

    def train(update: Callable[[nn.Module, nn.Module], Any]) -> Any:
        def run(observer: LearningObserver) -> Any:
            model = nn.ModuleDict({"query": nn.Sequential(nn.Linear(8, 16), nn.BatchNorm1d(16))})
            model["key"] = copy.deepcopy(model["query"]).requires_grad_(False)
            model.cuda()
            optimizer = torch.optim.SGD(model["query"].parameters(), 0.1)
            for _ in range(_STEPS):
                observer.called(model)
                with torch.no_grad():
                    if moves:
                        update(model["key"], model["query"])
                    key = model["key"](rows())
                optimizer.zero_grad()
                F.mse_loss(model["query"](rows()), key).backward()
                optimizer.step()
            return model

        return run

    for update in (_parameters_alone, _assigned, _by_data, _by_foreach, _whole_state):
        assert ("norm_of_frozen" in kinds(train(update))) is not moves


def test_a_critic_that_is_frozen_in_turns_is_trained(kinds: Kinds) -> None:
    def train(observer: LearningObserver) -> Any:
        generator = net(8)
        critic = nn.Sequential(nn.Linear(8, 16), nn.BatchNorm1d(16), nn.Linear(16, 1)).cuda()
        of_generator = torch.optim.Adam(generator.parameters())
        of_critic = torch.optim.Adam(critic.parameters())
        for _ in range(_STEPS):
            observer.called(generator)
            observer.called(critic)
            critic.requires_grad_(True)
            of_critic.zero_grad()
            critic(generator(rows()).detach()).mean().backward()
            of_critic.step()
            critic.requires_grad_(False)
            of_generator.zero_grad()
            critic(generator(rows())).mean().backward()
            of_generator.step()
        return generator, critic

    assert "norm_of_frozen" not in kinds(train)


def _averaged(update: Callable[[nn.Module, nn.Module], Any]) -> Any:
    def train(observer: LearningObserver) -> Any:
        model = nn.Sequential(nn.Linear(8, 16), nn.BatchNorm1d(16), nn.Linear(16, 4)).cuda()
        ema = copy.deepcopy(model).eval().requires_grad_(False)
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        for _ in range(_STEPS):
            observer.called(model)
            optimizer.zero_grad()
            model(rows()).pow(2).mean().backward()
            optimizer.step()
            with torch.no_grad():
                update(ema, model)
        with torch.no_grad():
            observer.called(ema)
            ema(rows())
        return model, ema

    return train


def _parameters_alone(ema: nn.Module, model: nn.Module) -> None:
    for own, new in zip(ema.parameters(), model.parameters(), strict=True):
        own.mul_(0.9).add_(new, alpha=0.1)


def _buffers_too(ema: nn.Module, model: nn.Module) -> None:
    _parameters_alone(ema, model)
    for own, new in zip(ema.buffers(), model.buffers(), strict=True):
        own.copy_(new)


def _by_data(ema: nn.Module, model: nn.Module) -> None:
    for own, new in zip(ema.parameters(), model.parameters(), strict=True):
        own.data.mul_(0.9).add_(new.data, alpha=0.1)
    for own, new in zip(ema.buffers(), model.buffers(), strict=True):
        own.data.copy_(new.data)


def _whole_state(ema: nn.Module, model: nn.Module) -> None:
    state = model.state_dict()
    for name, own in ema.state_dict().items():
        own.copy_(state[name])


def test_a_teacher_of_the_same_class(kinds: Kinds) -> None:
    """Its weights were given to it before it was moved: it is none that the script changes."""

    def train(observer: LearningObserver) -> Any:
        student, teacher = (
            nn.Sequential(nn.Linear(8, 16), nn.BatchNorm1d(16), nn.Linear(16, 4)) for _ in range(2)
        )
        teacher.load_state_dict(copy.deepcopy(student.state_dict()))
        for each in (student, teacher):
            each.cuda()
        teacher.eval()
        optimizer = torch.optim.SGD(student.parameters(), 0.1)
        for _ in range(_STEPS):
            for each in (student, teacher):
                observer.called(each)
            with torch.no_grad():
                observer.called(teacher)
                target = teacher(rows())
            optimizer.zero_grad()
            F.mse_loss(student(rows()), target).backward()
            optimizer.step()
        return student, teacher

    assert "norm_left_behind" not in kinds(train)


def test_averaged_weights_with_statistics_of_the_start(kinds: Kinds) -> None:
    found = kinds(_averaged(_parameters_alone))["norm_left_behind"]
    assert "BatchNorm 1" in found.title


@pytest.mark.parametrize(
    "update",
    [
        _buffers_too,
        _by_data,
        _whole_state,
        lambda ema, model: ema.load_state_dict(model.state_dict()),
        lambda ema, model: None,  # a teacher that stays as it is
    ],
)
def test_averages_with_their_statistics(kinds: Kinds, update: Any) -> None:
    assert "norm_left_behind" not in kinds(_averaged(update))
