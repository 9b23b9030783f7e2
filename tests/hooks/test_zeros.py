"""-inf and 0 that make NaN of a loss, each with a twin that is right."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from helpers_learning import Kinds

Tensor = torch.Tensor


def _entropies(fill: float, logarithm: Callable[[Tensor], Tensor]) -> None:
    net = nn.Linear(8, 4).cuda()
    optimizer = torch.optim.SGD(net.parameters(), 0.1)
    allowed = torch.tensor([True, True, False, True]).cuda()
    for _ in range(3):
        scores = net(torch.randn(16, 8).cuda()).masked_fill(~allowed, fill)
        p = scores.softmax(-1)
        (p * logarithm(p)).sum(-1).mean().backward()
        optimizer.step()
        optimizer.zero_grad()


def test_a_probability_of_0_times_its_logarithm(kinds: Kinds) -> None:
    assert kinds(lambda: _entropies(-torch.inf, torch.log))["zero_times_log"].place is not None


@pytest.mark.parametrize(
    ("fill", "logarithm"),
    [(-1e9, torch.log), (-torch.inf, lambda p: (p + 1e-8).log()),
     (-torch.inf, lambda p: p.clamp(min=1e-8).log())],
)  # fmt: skip
def test_logarithms_that_are_limited(
    kinds: Kinds, fill: float, logarithm: Callable[[Tensor], Tensor]
) -> None:
    assert "zero_times_log" not in kinds(lambda: _entropies(fill, logarithm))


def _attention(shortest: int, fill: float = -torch.inf) -> None:
    tokens = torch.randint(1, 50, (12, 10))
    tokens[3, shortest:] = 0
    embed, head = nn.Embedding(50, 16).cuda(), nn.Linear(16, 2).cuda()
    optimizer = torch.optim.SGD([*embed.parameters(), *head.parameters()], 0.1)
    for (rows,) in DataLoader(TensorDataset(tokens), 4):
        rows = rows.cuda()
        x = embed(rows)
        scores = (x @ x.transpose(1, 2)).masked_fill((rows == 0)[:, None, :], fill)
        head((scores.softmax(-1) @ x)[:, 0]).sum().backward()
        optimizer.step()
        optimizer.zero_grad()


def test_a_sample_that_is_nothing_but_padding(kinds: Kinds) -> None:
    found = kinds(lambda: _attention(0))["mask_misused"]
    assert "nothing but padding" in found.title and found.place is not None
    assert "mask_misused" not in kinds(lambda: _attention(1))
    assert "mask_misused" not in kinds(lambda: _attention(0, -1e9))


def _pooling(of_batch: Callable[[Tensor, Tensor], Tensor], shortest: int) -> None:
    """Attention over a set's elements; the mask comes from the data set, or from the lengths."""
    lengths = torch.full((12,), 7)
    lengths[3] = shortest
    padding = torch.arange(10)[None] >= lengths[:, None]
    embed, query, head = nn.Linear(8, 16).cuda(), nn.Linear(16, 1).cuda(), nn.Linear(16, 1).cuda()
    parameters = [each for part in (embed, query, head) for each in part.parameters()]
    optimizer = torch.optim.SGD(parameters, 0.1)
    for x, pad, n in DataLoader(TensorDataset(torch.randn(12, 10, 8), padding, lengths), 4):
        h = embed(x.cuda())
        scores = query(h).squeeze(-1).masked_fill(of_batch(pad, n), -torch.inf)
        head((scores.softmax(-1).unsqueeze(-1) * h).sum(1)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()


@pytest.mark.parametrize(
    "of_batch",
    [
        lambda pad, n: pad.cuda(),
        lambda pad, n: ~(~pad).cuda(),
        lambda pad, n: torch.arange(10, device="cuda")[None] >= n.cuda()[:, None],
        lambda pad, n: ~(torch.arange(10, device="cuda").unsqueeze(0) < n.cuda().unsqueeze(1)),
        lambda pad, n: n.cuda()[:, None] <= torch.arange(10, device="cuda"),
    ],
)
def test_a_set_without_an_element(
    kinds: Kinds, of_batch: Callable[[Tensor, Tensor], Tensor]
) -> None:
    assert "nothing but padding" in kinds(lambda: _pooling(of_batch, 0))["mask_misused"].title
    assert "mask_misused" not in kinds(lambda: _pooling(of_batch, 1))


def test_a_mask_that_is_true_for_all_elements_hides_none_where_it_is_turned(kinds: Kinds) -> None:
    assert "mask_misused" not in kinds(lambda: _pooling(lambda pad, n: ~(~pad).cuda(), 10))


# -- counts, degrees and tables -----------------------------------------------------------------


def _train(loss_of: Callable[[nn.Module, Tensor, Tensor], Tensor], labels: Tensor) -> None:
    net = nn.Linear(8, 4).cuda()
    optimizer = torch.optim.SGD(net.parameters(), 0.1)
    for x, y in DataLoader(TensorDataset(torch.randn(12, 8), labels), 4):
        loss_of(net, x.cuda(), y.cuda()).backward()
        optimizer.step()
        optimizer.zero_grad()


def _errors(net: nn.Module, x: Tensor) -> Tensor:
    return net(x).square().mean(-1)


NONE, ONE = torch.zeros(12, dtype=torch.long), torch.eye(4, dtype=torch.long)[0].repeat(3)


def test_a_mean_over_nothing_and_a_division_by_the_number_of_nothing(kinds: Kinds) -> None:
    selected = lambda net, x, y: _errors(net, x)[y > 0].mean()  # noqa: E731
    divided = lambda net, x, y: (_errors(net, x) * (y > 0)).sum() / (y > 0).sum()  # noqa: E731
    read = lambda net, x, y: _errors(net, x)[y > 0].sum() / int((y > 0).sum())  # noqa: E731
    for loss, kind in ((selected, "loss_of_nothing"), (divided, "zeros_inverted"), (read, None)):
        found = kinds(lambda loss=loss: _train(loss, NONE))
        assert found[kind or "zeros_inverted"].place is not None
        assert not {"zeros_inverted", "loss_of_nothing"} & {
            *kinds(lambda loss=loss: _train(loss, ONE))
        }


def test_counts_that_are_limited(kinds: Kinds) -> None:
    def limited(net: nn.Module, x: Tensor, y: Tensor) -> Tensor:
        return (_errors(net, x) * (y > 0)).sum() / (y > 0).sum().clamp(min=1)

    def left_out(net: nn.Module, x: Tensor, y: Tensor) -> Tensor:
        error = _errors(net, x)
        return error[y > 0].mean() if (y > 0).any() else error.sum() * 0

    for loss in (limited, left_out):
        found = kinds(lambda loss=loss: _train(loss, NONE))
        assert not {"zeros_inverted", "loss_of_nothing"} & {*found}


def _graph(inverse: Callable[[Tensor], Tensor], ends: Tensor) -> None:
    """A graph of 100 nodes, whose edges end at these; a node without one has degree 0."""
    x, net = torch.randn(100, 8).cuda(), nn.Linear(8, 4).cuda()
    optimizer = torch.optim.SGD(net.parameters(), 0.1)
    ends = ends.cuda()
    for _ in range(3):
        degree = torch.zeros(100, device="cuda")
        degree = degree.scatter_add_(0, ends, torch.ones(len(ends), device="cuda"))
        (net(x) * inverse(degree)[:, None]).mean().backward()
        optimizer.step()
        optimizer.zero_grad()


def _masked(degree: Tensor) -> Tensor:
    inverse = degree.pow(-0.5)
    return inverse.masked_fill_(inverse == torch.inf, 0)


def _assigned(degree: Tensor) -> Tensor:
    inverse = degree.rsqrt()
    inverse[degree == 0] = 0
    return inverse


@pytest.mark.parametrize(
    "inverse", [lambda it: it**-0.5, torch.rsqrt, lambda it: 1 / it, lambda it: 1 / it.sqrt()]
)
def test_the_degree_of_a_node_without_an_edge(
    kinds: Kinds, inverse: Callable[[Tensor], Tensor]
) -> None:
    found = kinds(lambda: _graph(inverse, torch.arange(90)))["zeros_inverted"]
    assert found.title.startswith("10 of 100 numbers are 0") and found.place is not None
    assert "zeros_inverted" not in kinds(lambda: _graph(inverse, torch.arange(100)))


@pytest.mark.parametrize(
    "inverse",
    [
        *(_masked, _assigned, lambda it: it.clamp(min=1) ** -0.5, lambda it: (it + 1).rsqrt()),
        lambda it: torch.where(it > 0, it.rsqrt(), 0.0),
        lambda it: it.pow(-0.5).nan_to_num(posinf=0.0),
        lambda it: it**0.5,
    ],
)
def test_degrees_of_0_that_are_cared_for(kinds: Kinds, inverse: Callable[[Tensor], Tensor]) -> None:
    assert "zeros_inverted" not in kinds(lambda: _graph(inverse, torch.arange(90)))


def _table(use: Callable[[nn.Module, Tensor], Tensor], deviation: float) -> None:
    """Columns that are divided by their deviation on the host."""
    x, net = torch.ones(16, 8) / deviation - 1 / deviation if deviation else None, nn.Linear(8, 4)
    x = torch.zeros(16, 8) / 0 if x is None else x
    net, x = net.cuda(), x.cuda()
    optimizer = torch.optim.SGD(net.parameters(), 0.1)
    for _ in range(3):
        use(net, x).backward()
        optimizer.step()
        optimizer.zero_grad()


def test_nan_of_the_host_that_is_multiplied(kinds: Kinds) -> None:
    errors = lambda net, x: _errors(net, x).mean()  # noqa: E731
    filled = lambda net, x: _errors(net, x.nan_to_num()).mean()  # noqa: E731
    left_out = lambda net, x: (  # noqa: E731
        (net(torch.ones(16, 8).cuda()).sum(1) - x[:, 0])[~x[:, 0].isnan()].sum()
    )
    assert kinds(lambda: _table(errors, 0.0))["nan_copied"].place is not None
    assert "nan_copied" not in kinds(lambda: _table(errors, 1.0))
    for use in (filled, left_out):
        assert "nan_copied" not in kinds(lambda use=use: _table(use, 0.0))


@pytest.mark.parametrize(
    ("gives", "is_told"),
    [
        (lambda x: x.relu(), True),
        (lambda x: x.relu() / x.relu().sum(1, keepdim=True), True),
        (lambda x: x.clamp(min=0)[:, :2], True),
        (lambda x: x.relu() + 1e-8, False),
        (lambda x: x.clamp(min=1e-8), False),
        (lambda x: x.softmax(1), False),
    ],
)
def test_the_logarithm_of_what_is_0(
    kinds: Kinds, gives: Callable[[Tensor], Tensor], is_told: bool
) -> None:
    loss = lambda net, x, _: gives(net(x)).log().mean()  # noqa: E731
    assert ("log_of_zero" in kinds(lambda: _train(loss, ONE))) == is_told
