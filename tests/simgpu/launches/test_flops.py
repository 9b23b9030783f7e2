"""FLOPs by formula against multiply-adds that naive loops really make, whose results are right."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st
from torch.utils.flop_counter import FlopCounterMode

from trainfit.simgpu.operators.flops import causal_pairs, flops_of
from trainfit.simgpu.session import simulate

aten = torch.ops.aten
Numbers = torch.Tensor


def counted(func: Any, *args: Any, **kwargs: Any) -> int:
    """By formula, with a result that has the right shape."""
    return flops_of(func, args, kwargs, func(*args, **kwargs))


def normal(*shape: int) -> Numbers:
    generator = torch.Generator().manual_seed(sum(shape))
    return torch.randn(shape, generator=generator, dtype=torch.float64)


# --- Convolutions -----------------------------------------------------------------------------


class Naive:
    """Two-dimensional convolution without padding by loops; counts its multiply-adds."""

    def __init__(self, source: Numbers, weight: Numbers, stride: int, groups: int) -> None:
        self.source, self.weight, self.stride, self.groups = source, weight, stride, groups
        self.multiplied = 0

    def _taps(self, result: Numbers) -> Any:
        """(element of the result, of the input, of the weights) that meet."""
        out_channels, of_group, height, width = self.weight.shape
        for n, co, y, x in itertools.product(*map(range, result.shape)):
            first = co // (out_channels // self.groups) * of_group
            for c, ky, kx in itertools.product(range(of_group), range(height), range(width)):
                self.multiplied += 1
                at = (n, first + c, y * self.stride + ky, x * self.stride + kx)
                yield (n, co, y, x), at, (co, c, ky, kx)

    def forward(self, result: Numbers) -> Numbers:
        out = torch.zeros_like(result)
        for to, of, by in self._taps(result):
            out[to] += self.source[of] * self.weight[by]
        return out

    def of_input(self, grad: Numbers) -> Numbers:
        out = torch.zeros_like(self.source)
        for to, of, by in self._taps(grad):
            out[of] += grad[to] * self.weight[by]
        return out

    def of_weight(self, grad: Numbers) -> Numbers:
        out = torch.zeros_like(self.weight)
        for to, of, by in self._taps(grad):
            out[by] += grad[to] * self.source[of]
        return out


@pytest.mark.parametrize(("channels", "outs", "groups"), [(4, 6, 1), (4, 6, 2), (4, 4, 4)])
@pytest.mark.parametrize("stride", [1, 2])
def test_convolutions_and_their_gradients(
    channels: int, outs: int, groups: int, stride: int
) -> None:
    source, weight = normal(2, channels, 5, 4), normal(outs, channels // groups, 2, 3)
    places = ([stride] * 2, [0, 0], [1, 1], False, [0, 0], groups)
    result = F.conv2d(source, weight, stride=stride, groups=groups)
    grad = normal(*result.shape)
    naive = Naive(source, weight, stride, groups)
    assert torch.allclose(naive.forward(result), result)
    once = 2 * naive.multiplied
    assert counted(aten.convolution.default, source, weight, None, *places) == once
    backward = aten.convolution_backward.default
    expected = backward(grad, source, weight, None, *places, [True, True, False])
    naive.multiplied = 0
    assert torch.allclose(naive.of_input(grad), expected[0])
    assert torch.allclose(naive.of_weight(grad), expected[1])
    assert 2 * naive.multiplied == 2 * once
    for mask, passes in (([True, True, False], 2), ([False, True, True], 1), ([False] * 3, 0)):
        call = (grad, source, weight, None, *places, mask)
        assert flops_of(backward, call, {}, None) == passes * once


@pytest.mark.parametrize(("channels", "of_group", "groups"), [(4, 3, 1), (4, 3, 2), (4, 1, 4)])
def test_transposed_convolutions(channels: int, of_group: int, groups: int) -> None:
    """A transposed convolution is the gradient of one: its loops, the other way."""
    source, weight = normal(2, channels, 3, 4), normal(channels, of_group, 2, 2)
    places = ([2, 2], [0, 0], [1, 1], True, [0, 0], groups)
    result = aten.convolution.default(source, weight, None, *places)
    naive = Naive(torch.zeros_like(result), weight, 2, groups)
    assert torch.allclose(naive.of_input(source), result)
    assert counted(aten.convolution.default, source, weight, None, *places) == 2 * naive.multiplied
    call = (normal(*result.shape), source, weight, None, *places, [True, True, False])
    assert flops_of(aten.convolution_backward.default, call, {}, None) == 4 * naive.multiplied


# --- Attention --------------------------------------------------------------------------------


class NaiveAttention:
    """One head by loops over the pairs that may meet; the softmax multiplies nothing counted."""

    def __init__(self, q: Numbers, k: Numbers, v: Numbers, causal: bool) -> None:
        self.q, self.k, self.v, self.causal, self.multiplied = q, k, v, causal, 0

    def _dot(self, one: Numbers, other: Numbers) -> Numbers:
        self.multiplied += len(one)
        return one @ other

    def _sees(self, query: int) -> range:
        return range(min(query + 1, len(self.k)) if self.causal else len(self.k))

    def _weights(self, query: int) -> Numbers:
        scores = [self._dot(self.q[query], self.k[key]) for key in self._sees(query)]
        return torch.softmax(torch.stack(scores) / len(self.q[0]) ** 0.5, 0)

    def _sum(self, weights: Numbers, rows: Numbers) -> Numbers:
        self.multiplied += rows[: len(weights)].numel()
        return weights @ rows[: len(weights)]

    def forward(self) -> Numbers:
        return torch.stack([self._sum(self._weights(i), self.v) for i in range(len(self.q))])

    def backward(self, grad: Numbers) -> tuple[Numbers, Numbers, Numbers]:
        dq, dk, dv = map(torch.zeros_like, (self.q, self.k, self.v))
        for i in range(len(self.q)):
            weights = self._weights(i)
            of_weights = torch.stack([self._dot(grad[i], self.v[j]) for j in self._sees(i)])
            scores = weights * (of_weights - (weights * of_weights).sum())
            scores = scores / len(self.q[0]) ** 0.5
            dq[i] = self._sum(scores, self.k)
            for j in self._sees(i):
                self.multiplied += self.q.shape[1] + self.v.shape[1]
                dk[j] += scores[j] * self.q[i]
                dv[j] += weights[j] * grad[i]
        return dq, dk, dv


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize(("queries", "keys"), [(4, 4), (5, 3), (3, 6)])
def test_attention_and_its_gradients(causal: bool, queries: int, keys: int) -> None:
    q, k, v = (normal(n, 4).requires_grad_() for n in (queries, keys, keys + 0))
    out = F.scaled_dot_product_attention(q[None], k[None], v[None], is_causal=causal)[0]
    grad = normal(*out.shape)
    out.backward(grad)
    naive = NaiveAttention(q.detach(), k.detach(), v.detach(), causal)
    assert torch.allclose(naive.forward(), out)
    once, naive.multiplied = naive.multiplied, 0
    for ours, theirs in zip(naive.backward(grad), (q.grad, k.grad, v.grad), strict=True):
        assert theirs is not None and torch.allclose(ours, theirs)
    # Three samples of two heads.
    heads = [each.detach().expand(3, 2, *each.shape) for each in (q, k, v)]
    flash = aten._scaled_dot_product_flash_attention.default
    assert flops_of(flash, (*heads, 0.0, causal), {}, None) == 3 * 2 * 2 * once
    efficient = aten._scaled_dot_product_efficient_attention.default
    assert flops_of(efficient, (*heads, None, True, 0.0, causal), {}, None) == 3 * 2 * 2 * once
    more = (heads[0], None, None, None, queries, keys, 0.0, causal, None, None)
    backward = aten._scaled_dot_product_flash_attention_backward.default
    found = flops_of(backward, (heads[0], *heads, *more), {}, None)
    assert found == 3 * 2 * 2 * naive.multiplied


@given(st.integers(0, 40), st.integers(0, 40))
def test_pairs_of_a_causal_mask(queries: int, keys: int) -> None:
    assert causal_pairs(queries, keys) == torch.ones(queries, keys).tril().sum()


# --- Recurrent networks -----------------------------------------------------------------------


@pytest.mark.parametrize("layers", [1, 2])
@pytest.mark.parametrize("bidirectional", [False, True])
@pytest.mark.parametrize("projected", [0, 3])
def test_recurrent_networks(layers: int, bidirectional: bool, projected: int) -> None:
    """A network of matrix products, which PyTorch counts right, both ways."""
    time, batch, size, hidden = 3, 2, 5, 4
    network = torch.nn.LSTM(
        size, hidden, layers, bidirectional=bidirectional, proj_size=projected
    ).double()
    weights = [weight for group in network.all_weights for weight in group]
    source = normal(time, batch, size).requires_grad_()
    each = len(network.all_weights[0])
    with FlopCounterMode(display=False) as forward:
        result = _unrolled(network, source)
    assert torch.allclose(result, network(source)[0])
    with FlopCounterMode(display=False) as backward:
        result.sum().backward()
    places = (hidden, projected, layers, False, 0.0, True, bidirectional, [], None)
    call = (source, weights, each, None, None, None, 2, *places)
    assert flops_of(aten._cudnn_rnn.default, call, {}, None) == forward.get_total_flops()
    both = aten._cudnn_rnn_backward.default
    more = (result, None, None, None, 2, *places, None, [True, True, True, True])
    head = (source, weights, each, None, None, None)
    assert flops_of(both, (*head, *more), {}, None) == backward.get_total_flops()
    # Without the input's gradient, its products of the first layer are not made.
    less = (*more[:-1], [False, True, True, True])
    directions = 2 if bidirectional else 1
    saved = 2 * time * batch * directions * 4 * hidden * size
    assert flops_of(both, (*head, *less), {}, None) == backward.get_total_flops() - saved


def _unrolled(network: torch.nn.LSTM, source: Numbers) -> Numbers:
    """The same by matrix products; initial states that ask for gradients, as cuDNN gives them."""
    directions = 2 if network.bidirectional else 1
    for layer in range(network.num_layers):
        outs = []
        for direction in range(directions):
            parts = network.all_weights[layer * directions + direction]
            order = range(len(source))
            steps = dict.fromkeys(order)
            hidden = source.new_zeros(
                source.shape[1], network.proj_size or network.hidden_size
            ).requires_grad_()
            cell = source.new_zeros(source.shape[1], network.hidden_size).requires_grad_()
            for at in reversed(order) if direction else order:
                gates = source[at] @ parts[0].T + hidden @ parts[1].T + parts[2] + parts[3]
                i, f, g, o = gates.chunk(4, 1)
                cell = f.sigmoid() * cell + i.sigmoid() * g.tanh()
                hidden = o.sigmoid() * cell.tanh()
                hidden = hidden @ parts[4].T if network.proj_size else hidden
                steps[at] = hidden
            outs.append(torch.stack(list(steps.values())))
        source = torch.cat(outs, -1)
    return source


# --- Others -----------------------------------------------------------------------------------


def test_products_are_pytorchs_and_the_rest_is_nothing() -> None:
    one, other = normal(3, 5), normal(5, 7)
    assert counted(aten.mm.default, one, other) == 2 * 3 * 5 * 7
    assert counted(aten.addmm.default, normal(7), one, other) == 2 * 3 * 5 * 7
    assert counted(aten.add.Tensor, one, one) == 0


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_experts_are_multiplied_group_by_group(dtype: torch.dtype) -> None:
    with simulate("A100-80GB") as simulation:
        tokens = torch.randn(64, 32, device="cuda", dtype=dtype, requires_grad=True)
        weights = torch.randn(4, 32, 48, device="cuda", dtype=dtype, requires_grad=True)
        ends = torch.tensor([16, 32, 48, 64], device="cuda", dtype=torch.int32)
        out = torch.nn.functional.grouped_mm(tokens, weights, offs=ends)
        assert out.shape == (64, 48) and out.dtype is dtype
        out.backward(torch.ones_like(out))
        assert weights.grad is not None and weights.grad.dtype is dtype
    recording = simulation.recording
    products = [flops for flops in recording.kernel_flops.tolist() if flops > 64 * 48]
    assert products == [2 * 64 * 32 * 48] * 3
