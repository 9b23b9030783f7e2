"""What a simulated operator refuses, and what autograd sees of it, is what a GPU would have."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional

import trainfit
from trainfit.torch_private.operators import version


@pytest.fixture(autouse=True, scope="module")
def simulated() -> Iterator[None]:
    with trainfit.simulate("RTX 4090"):
        yield


def _versions(module: nn.Module) -> list[int]:
    return [weight._version for weight in module.parameters()]


def test_changes_in_place_are_counted_as_cuda_counts_them() -> None:
    """foreach kernels do (ATen/native/cuda/Foreach*.cu), fused optimizers do not, and what .data
    gives has a count of its own (Tensor::variable_data)."""
    model = nn.Linear(4, 4).cuda()
    began = _versions(model)
    model.weight.data.add_(1)
    assert _versions(model) == began
    for weight in model.parameters():
        weight.grad = torch.zeros_like(weight)
    torch.optim.SGD(model.parameters(), 0.1, fused=True).step()
    assert _versions(model) == began
    torch.optim.SGD(model.parameters(), 0.1).step()
    assert _versions(model) == [each + 1 for each in began]
    with torch.inference_mode():  # tensors of which nothing is counted
        torch._foreach_add_([torch.zeros(2, device="cuda")], 1.0)


def test_a_step_between_two_backward_passes_of_a_recurrent_network() -> None:
    network = nn.LSTM(4, 4).cuda()
    loss = network(torch.rand(3, 2, 4, device="cuda"))[0].sum()
    loss.backward(retain_graph=True)
    for weight in network.parameters():
        weight.data.add_(1)
    loss.backward(retain_graph=True)
    torch.optim.Adam(network.parameters()).step()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


@pytest.mark.parametrize("kind", [nn.LSTM, nn.GRU])
def test_a_recurrent_network_has_all_on_one_device(kind: Any) -> None:
    state = torch.zeros(1, 2, 4)
    states = (state, state) if kind is nn.LSTM else state
    here, there = torch.rand(3, 2, 4), torch.rand(3, 2, 4, device="cuda")
    with pytest.raises(RuntimeError, match="Input and hidden tensors are not at the same device"):
        kind(4, 4).cuda()(there, states)
    with pytest.raises(RuntimeError, match="tensor at cpu and parameter tensor at cuda:0"):
        kind(4, 4).cuda()(here)
    with pytest.raises(RuntimeError, match="tensor at cuda:0 and parameter tensor at cpu"):
        kind(4, 4)(there)


def test_ctc_loss_has_one_length_for_each_sample() -> None:
    steps, labels = torch.rand(9, 4, 5, device="cuda"), torch.ones(4, 2, dtype=torch.long)
    with pytest.raises(RuntimeError, match="input_lengths must be of size batch_size"):
        functional.ctc_loss(steps.transpose(0, 1), labels.cuda(), (9,) * 4, (2,) * 4)
    with pytest.raises(RuntimeError, match="Expected input_lengths to have value at most 9"):
        functional.ctc_loss(steps, labels.cuda(), (18,) * 4, (2,) * 4)


def _made(dtype: torch.dtype) -> torch.Tensor:
    return torch.rand(1, 8, 8, 8, device="cuda", dtype=dtype)


_SCALAR = "expected scalar type Half but found Float"


@pytest.mark.parametrize(
    ("call", "said"),
    [
        (lambda a, b: functional.layer_norm(a, (8,), b[0, 0, 0]), _SCALAR),
        (lambda a, b: functional.group_norm(a, 2, b[0, 0, 0], b[0, 0, 0]), _SCALAR),
        (lambda a, b: functional.grid_sample(a, b[..., :2]), _SCALAR),
        (functional.binary_cross_entropy, "Found dtype Float but expected Half"),
        (lambda a, b: functional.huber_loss(a, b).backward(), "Found dtype Float but expected"),
        (lambda a, b: a.clone().index_put((torch.tensor([0]),), b), "source and destination dty"),
        (
            lambda a, b: functional.scaled_dot_product_attention(a, b, b),
            "query, key, and value to have the same dtype",
        ),
    ],
)
def test_operands_of_one_dtype(call: Callable[..., Any], said: str) -> None:
    half = _made(torch.float16).requires_grad_()
    with pytest.raises(RuntimeError, match=said):
        call(half, _made(torch.float32))
    call(half, _made(torch.float16))


def test_what_the_device_cannot_do() -> None:
    numbers = torch.rand(2, device="cuda")
    with pytest.raises(RuntimeError, match=r"cannot pin 'torch\.cuda\.FloatTensor'"):
        numbers.pin_memory()
    with pytest.raises(RuntimeError, match="Expected a 'cuda' device type for generator"):
        torch.randperm(4, device="cuda", generator=torch.Generator())
    torch.randperm(4, device="cuda", generator=torch.Generator("cuda"))


@pytest.mark.parametrize(
    ("dtype", "shape"),
    [(torch.int32, ()), (torch.bool, ()), (torch.int32, (4, 4)), (torch.uint8, (4, 4))],
)
def test_classes_of_a_type_that_no_kernel_is_made_for(
    dtype: torch.dtype, shape: tuple[int, ...]
) -> None:
    output = torch.zeros(2, 3, *shape, device="cuda")
    target = torch.zeros(2, *shape, dtype=dtype, device="cuda")
    with pytest.raises((RuntimeError, NotImplementedError), match=r"Long but|not implemented for"):
        functional.cross_entropy(output, target)


@pytest.mark.parametrize("dtype", [torch.uint8, torch.int64])
def test_classes_of_bytes_are_classes(dtype: torch.dtype) -> None:
    output = torch.zeros(2, 3, device="cuda", requires_grad=True)
    functional.cross_entropy(output, torch.zeros(2, dtype=dtype, device="cuda")).backward()
    assert output.grad is not None and output.grad.shape == (2, 3)


def test_what_cudnn_does_not_differentiate() -> None:
    network = nn.LSTM(4, 4).cuda()
    x = torch.rand(3, 2, 4, device="cuda", requires_grad=True)

    def penalized() -> None:
        output = network(x)[0].sum()
        (gradient,) = torch.autograd.grad(output, x, create_graph=True)
        gradient.norm().backward()

    with pytest.raises(NotImplementedError, match="'_cudnn_rnn_backward' is not implemented"):
        penalized()
    with torch.backends.cudnn.flags(enabled=False):
        penalized()
    network.eval()
    with pytest.raises(RuntimeError, match="can only be called in training mode"):
        network(x)[0].sum().backward()
    with torch.backends.cudnn.flags(enabled=False):
        network(x)[0].sum().backward()


@pytest.mark.parametrize("name", ["index_add_", "index_copy_"])
def test_entries_are_added_in_one_type(name: str) -> None:
    """As TensorAdvancedIndexing.cpp checks them; under autocast a layer gives float16."""
    whole, rows = torch.zeros(4, 2, device="cuda"), torch.arange(3, device="cuda")
    getattr(whole, name)(0, rows, torch.ones(3, 2, device="cuda"))
    with pytest.raises(RuntimeError, match=r"self.*Float.*source.*Half"):
        getattr(whole, name)(0, rows, torch.ones(3, 2, device="cuda", dtype=torch.float16))


def test_what_inference_mode_makes_is_copied_and_computed_with() -> None:
    with torch.inference_mode():
        batch = torch.rand(4, 8)
        assert version(batch) == 0
        result = functional.normalize(nn.Linear(8, 2).cuda()(batch.cuda()), dim=-1)
        assert torch.cat([result, result]).shape == (8, 2)
