"""Returns that a loss minimizes, views that are one tensor, means over padding, what each step
moves or keeps, and parameters that a copy or no_grad cuts off: told, and not where they are meant.
"""

from __future__ import annotations

import copy
import gc
from collections import deque
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, Dataset

from helpers_learning import observing
from trainfit.findings.training.learning import of_learning
from trainfit.findings.training.misuse import of_misuse
from trainfit.hooks.learning import LearningObserver
from trainfit.hooks.provenance.policies import with_transitions
from trainfit.results.findings import Finding
from trainfit.results.runs.learning import LearningFacts
from trainfit.simgpu.session import Simulation

Tensor = torch.Tensor
Found = dict[str, Finding]
Kinds = Callable[..., Found]
_STEPS = 5


@pytest.fixture
def kinds(simulation: Simulation) -> Kinds:
    """Of steps with a loss; ``optimizer`` makes one of a model's parameters."""

    def of(
        loss: Callable[[LearningObserver], Tensor],
        model: nn.Module,
        optimizer: Callable[[Any], torch.optim.Optimizer] = lambda it: torch.optim.SGD(it, 0.1),
        after: Callable[[], Any] = lambda: None,
    ) -> Found:
        with observing(simulation, counts_in_place=False) as observer:
            own = optimizer(model.parameters())
            for _ in range(_STEPS):
                own.zero_grad()
                loss(observer).backward()
                own.step()
                after()
            return {each.kind: each for each in of_learning(observer.facts())}

    return of


def net(outputs: int = 4) -> nn.Sequential:
    return nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, outputs)).cuda()


# -- returns -----------------------------------------------------------------------------------


def _by_distribution(model: nn.Module) -> Tensor:
    policy = torch.distributions.Categorical(logits=model(torch.rand(16, 8, device="cuda")))
    return policy.log_prob(policy.sample())


def _by_hand(model: nn.Module) -> Tensor:
    output = F.log_softmax(model(torch.rand(16, 8, device="cuda")), -1)
    return output.gather(1, torch.zeros(16, 1, dtype=torch.long, device="cuda")).squeeze(1)


def _ratio(model: nn.Module) -> Tensor:
    now = _by_distribution(model)
    return (now - now.detach()).exp()


_NUMBERS = torch.rand(16, device="cpu")


def _advantages() -> Tensor:
    adv = _NUMBERS.cuda()
    return (adv - adv.mean()) / adv.std()


@pytest.mark.parametrize("log_prob", [_by_distribution, _by_hand, _ratio])
@pytest.mark.parametrize(
    ("loss", "told"),
    [
        (lambda lp, reward: (lp * reward).mean(), True),
        (lambda lp, returns: torch.stack([each * returns[0] for each in lp[:2]]).sum(), True),
        (lambda lp, advantage: -(-lp * advantage).sum(), True),
        (lambda lp, reward: (lp * reward).sum() / 16 + 0.1, True),
        (lambda lp, reward: -(lp * reward).mean(), False),
        (lambda lp, advantage: (-lp * advantage).mean(), False),
        (lambda lp, reward: (lp * reward).mean() * -1, False),
        (lambda lp, reward: 1 - (lp * reward).mean(), False),
        (lambda lp, cost: (lp * cost).mean(), False),
        (lambda lp, neg_reward: (lp * neg_reward).mean(), False),
        (lambda lp, reward: (lp * -reward).mean(), False),
        (lambda lp, weights: (lp * weights).mean(), False),
    ],
)
def test_a_return_is_not_minimized(
    kinds: Kinds,
    log_prob: Callable[[nn.Module], Tensor],
    loss: Callable[[Tensor, Tensor], Tensor],
    *,
    told: bool,
) -> None:
    model = net()
    found = kinds(lambda _: loss(log_prob(model), _advantages()), model)
    assert ("return_minimized" in found) == told
    if told:
        assert found["return_minimized"].severity == "critical"
        assert "-(log_prob * " in found["return_minimized"].fixes[0].action


def test_an_optimizer_that_maximizes_needs_no_minus(kinds: Kinds) -> None:
    model = net()
    found = kinds(
        lambda _: (_by_hand(model) * _advantages()).mean(),
        model,
        lambda it: torch.optim.SGD(it, 0.1, maximize=True),
    )
    assert "return_minimized" not in found


# -- views -------------------------------------------------------------------------------------


def contrasted(one: Tensor, other: Tensor) -> Tensor:
    one, other = F.normalize(one), F.normalize(other)
    return F.cross_entropy(one @ other.T, torch.arange(len(one), device="cuda"))


def _augmented() -> Tensor:
    return torch.rand(16, 8).cuda() + torch.rand(16, 8, device="cuda")


def _twice(model: nn.Module) -> tuple[Tensor, Tensor]:
    x = _augmented()
    return model(x), model(x)


def _each(model: nn.Module) -> tuple[Tensor, Tensor]:
    return model(_augmented()), model(_augmented())


@pytest.mark.parametrize(
    ("views", "loss", "severity"),
    [
        (_twice, contrasted, "critical"),
        (_each, contrasted, ""),
        (_each, lambda a, b: F.mse_loss(a, b.detach()), ""),
    ],
)
def test_two_views_are_two(
    kinds: Kinds,
    views: Callable[[nn.Module], tuple[Tensor, Tensor]],
    loss: Callable[[Tensor, Tensor], Tensor],
    severity: str,
) -> None:
    model = net()
    found = kinds(lambda _: loss(*views(model)), model)
    told = found.get("same_views")
    assert (told.severity if told else "") == severity


def test_both_results_of_one_input_are_told_where_both_are_trained(kinds: Kinds) -> None:
    model = net()

    def loss(_: LearningObserver) -> Tensor:
        one, other = _twice(model)
        return one.mean() + other.square().mean()

    assert kinds(loss, model)["same_views"].severity == "info"


def test_dropout_makes_two_views_of_one_sample(kinds: Kinds) -> None:
    model = nn.Sequential(nn.Linear(8, 16), nn.Dropout(0.1), nn.Linear(16, 4)).cuda()
    assert "same_views" not in kinds(lambda _: contrasted(*_twice(model)), model)


class Views(Dataset[tuple[Tensor, Tensor]]):
    def __init__(self, *, same: bool) -> None:
        self.same = same

    def __len__(self) -> int:
        return 160

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        view = torch.rand(4, 8)
        return view, view if self.same else torch.rand(4, 8)


@pytest.mark.parametrize("joins", [False, True])
@pytest.mark.parametrize("same", [False, True])
def test_views_of_a_data_set_are_two(kinds: Kinds, *, same: bool, joins: bool) -> None:
    model = nn.Sequential(nn.Flatten(), nn.Linear(32, 4)).cuda()
    batches = iter(DataLoader(Views(same=same), 16))

    def loss(_: LearningObserver) -> Tensor:
        views = [each.cuda() for each in next(batches)]
        both = model(torch.cat(views)).chunk(2) if joins else map(model, views)
        return contrasted(*both)

    assert ("same_views" in kinds(loss, model)) == same


def test_an_autoencoders_target_is_no_view(kinds: Kinds) -> None:
    model = nn.Linear(8, 8).cuda()
    batches = iter(DataLoader(Views(same=True), 16))

    def loss(_: LearningObserver) -> Tensor:
        x, target = next(batches)
        return F.mse_loss(model(x.cuda()), target.cuda())

    assert "same_views" not in kinds(loss, model)


# -- means over time ---------------------------------------------------------------------------


def _texts() -> Tensor:
    tokens = torch.arange(16 * 12).reshape(16, 12) * 7 % 97 + 1
    for row in range(len(tokens)):
        tokens[row, 3 + row % 8 :] = 0
    return tokens


def _masked(x: Tensor, tokens: Tensor) -> Tensor:
    keep = (tokens != 0).unsqueeze(-1)
    return (x * keep).sum(1) / keep.sum(1)


@pytest.mark.parametrize(
    ("pool", "padded", "told"),
    [
        (lambda x, tokens: x.mean(1), True, True),
        (lambda x, tokens: torch.mean(x, dim=-2), True, True),
        (lambda x, tokens: x.mean(1), False, False),
        (_masked, True, False),
        (lambda x, tokens: (x * (tokens != 0).unsqueeze(-1)).mean(1), True, False),
        (lambda x, tokens: x[:, 0], True, False),
        (lambda x, tokens: x.mean(2), True, False),
    ],
)
def test_a_mean_leaves_padding_out(
    kinds: Kinds, pool: Callable[[Tensor, Tensor], Tensor], *, padded: bool, told: bool
) -> None:
    model = nn.ModuleList([nn.Embedding(100, 16, padding_idx=0), nn.Linear(16, 16)]).cuda()
    tokens = _texts() if padded else _texts() + 1

    def loss(_: LearningObserver) -> Tensor:
        given = tokens.cuda()
        return pool(model[1](model[0](given)), given).square().mean()

    assert ("padding_averaged" in kinds(loss, model)) == told


# -- what each step moves or keeps -------------------------------------------------------------


def test_a_module_that_each_step_makes_is_none_that_is_moved(kinds: Kinds) -> None:
    model = net()

    def loss(_: LearningObserver) -> Tensor:
        return nn.Linear(4, 1).to("cuda")(model(torch.rand(16, 8, device="cuda"))).mean()

    assert "moved_each_step" not in kinds(loss, model)


@pytest.mark.parametrize("back", [False, True])
def test_a_module_is_moved_once(kinds: Kinds, *, back: bool) -> None:
    model, teacher = net(), nn.Linear(8, 4)

    def loss(_: LearningObserver) -> Tensor:
        x = torch.rand(16, 8, device="cuda")
        teacher.cuda()
        with torch.no_grad():
            target = teacher(x)
        if back:
            teacher.cpu()
        return F.mse_loss(model(x), target)

    found = kinds(loss, model)
    assert ("moved_each_step" in found) == back


@pytest.mark.parametrize(
    ("keeps", "told"),
    [
        (list, True),
        (deque, True),
        (lambda: deque(maxlen=4), False),
        (lambda: None, False),
    ],
)
def test_copies_on_the_host_are_not_kept(
    kinds: Kinds, keeps: Callable[[], Any], *, told: bool
) -> None:
    model, kept = nn.Linear(8, 8).cuda(), keeps()
    x = torch.rand(1 << 18, 8, device="cuda")

    def after() -> None:
        copied = x.cpu()
        if kept is not None:
            kept.append({"output": copied})

    found = kinds(lambda _: model(x[:16]).mean(), model, after=after)
    assert ("host_copies_kept" in found) == told
    if told:
        assert found["host_copies_kept"].evidence[0].value == x.nbytes


# -- what is cut off ---------------------------------------------------------------------------


@pytest.mark.parametrize("copied", [False, True])
def test_a_copys_gradients_do_not_reach_the_original(kinds: Kinds, *, copied: bool) -> None:
    model = net()

    def loss(_: LearningObserver) -> Tensor:
        used = copy.deepcopy(model) if copied else model
        return used(torch.rand(16, 8, device="cuda")).mean()

    found = kinds(loss, model)
    assert ("no_gradient" in found) == copied
    if copied:
        assert "copy.deepcopy" in found["no_gradient"].cause
        assert found["no_gradient"].severity == "critical" and found["no_gradient"].place


def test_a_line_without_gradients_is_named(kinds: Kinds) -> None:
    model = net()

    def loss(observer: LearningObserver) -> Tensor:
        observer.called(model)
        with torch.no_grad():
            features = model[0](torch.rand(16, 8, device="cuda"))
        return model[2](features).mean()

    found = kinds(loss, model)["no_gradient"]
    assert "gradients are off" in found.cause and found.place is not None
    assert "outside of torch.no_grad()" in found.fixes[0].action


def test_an_optimizer_of_another_model_is_said(kinds: Kinds) -> None:
    model, other = net(), net()

    def loss(observer: LearningObserver) -> Tensor:
        observer.called(model)
        observer.called(other)
        with torch.no_grad():
            target = other(torch.rand(16, 8, device="cuda"))
        return F.mse_loss(model(torch.rand(16, 8, device="cuda")), target)

    found = kinds(loss, other)["no_gradient"]
    assert found.severity == "critical"
    assert "of another model than the one that is trained" in found.cause


# -- replay buffers ----------------------------------------------------------------------------


class Walk:
    """An environment that changes its state in place; ``copies``: and returns copies of it."""

    def __init__(self, *, copies: bool) -> None:
        self.state, self.copies = np.zeros(4, dtype=np.float32), copies

    def step(self, action: int) -> np.ndarray[Any, Any]:
        self.state[action] += 1
        return self.state.copy() if self.copies else self.state


@pytest.mark.parametrize("as_mapping", [False, True])
@pytest.mark.parametrize("copies", [False, True])
def test_states_of_a_replay_buffer_are_copies(*, copies: bool, as_mapping: bool) -> None:
    gc.collect()  # what other tests left in cycles
    walk, goal, buffer = Walk(copies=copies), np.ones(4), deque[Any](maxlen=100)
    state = walk.step(0)
    for step in range(20):
        following = walk.step(step % 4)
        row = {"state": state, "action": step % 4, "next": following, "goal": goal}
        buffer.append(row if as_mapping else tuple(row.values()))
        state = following
    found = with_transitions(LearningFacts(steps=1)).misuses
    assert [each.kind for each in found] == ["states_aliased"] * (not copies)
    assert copies or of_misuse(found[0]).evidence[0].value == str(len(buffer))


@pytest.mark.parametrize("as_mapping", [False, True])
def test_samples_whose_labels_are_their_input_are_no_transitions(*, as_mapping: bool) -> None:
    """As language models are trained: each sample has a text of its own, which is its label."""
    gc.collect()
    texts = [torch.randint(100, (16,)) for _ in range(20)]
    rows: list[Any] = [{"input_ids": text, "mask": 1, "labels": text} for text in texts]
    rows = rows if as_mapping else [tuple(row.values()) for row in rows]
    assert len(rows) == 20 and not with_transitions(LearningFacts(steps=1)).misuses
