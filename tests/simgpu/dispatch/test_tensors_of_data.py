"""``torch.tensor`` and other constructors that take numbers: on the device wherever they are
called, with the values and dtypes that they have on the CPU."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import trainfit
from helpers_cases import slow_but
from trainfit.simgpu.device.tensor import current_engine, plain

DATA: dict[str, Any] = {
    "list": [1.0, 2.0],
    "nested": [[1, 2], [3, 4]],
    "empty": [],
    "number": 3,
    "bool": True,
    "array": np.arange(6).reshape(2, 3),
    "empty array": np.zeros((0, 10), bool),
    "arrays": [np.ones(2), np.zeros(2)],
    "tensor": torch.ones(2, dtype=torch.float64),
}
HOST = torch.ones(1, dtype=torch.float16)
MAKERS: dict[str, Callable[..., torch.Tensor]] = {
    "tensor": torch.tensor,
    "as_tensor": torch.as_tensor,
    "asarray": torch.asarray,
    "new_tensor": HOST.new_tensor,
}


@pytest.fixture(autouse=True)
def simulation() -> Iterator[None]:
    with trainfit.simulate("RTX 4090"):
        yield
    assert "__new__" not in vars(torch.Tensor)  # the legacy constructor is PyTorch's again


def _directly(call: Callable[[], None]) -> None:
    call()


def _without_gradients(call: Callable[[], None]) -> None:
    with torch.inference_mode():
        call()


def _in_a_thread(call: Callable[[], None]) -> None:
    failed: list[BaseException] = []

    def run() -> None:
        try:
            call()
        except BaseException as error:
            failed.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    if failed:
        raise failed[0]


WHERE = pytest.mark.parametrize("where", [_directly, _without_gradients, _in_a_thread])


@pytest.mark.parametrize(
    "where",
    # Each is tried with other data and makers below.
    slow_but([_directly, _without_gradients, _in_a_thread], _directly),
)
@pytest.mark.parametrize("maker", MAKERS)
@pytest.mark.parametrize("data", DATA)
@pytest.mark.filterwarnings("ignore:To copy construct")
def test_numbers_arrive_as_on_the_cpu(where: Any, maker: str, data: str) -> None:
    def check() -> None:
        for dtype in (None, torch.float32):
            expected = MAKERS[maker](DATA[data], dtype=dtype)
            made = MAKERS[maker](DATA[data], dtype=dtype, device="cuda")
            assert made.is_cuda
            assert made.dtype is expected.dtype
            assert torch.equal(made.cpu(), expected)

    where(check)


@WHERE
def test_numbers_of_the_device_are_read(where: Any) -> None:
    def check() -> None:
        known = torch.arange(4, device="cuda")
        for device in ("cpu", "cuda", None):
            made = torch.tensor([[known[0], 7], [known[3], known[1]]], device=device)
            assert made.is_cuda is (device == "cuda")
            assert made.dtype is torch.int64
            assert made.tolist() == [[0, 7], [3, 1]]

    where(check)


def test_what_nobody_knows_stays_unknown() -> None:
    losses = [torch.rand(100, device="cuda").mean() for _ in range(2)]
    made = torch.tensor(losses, device="cuda")
    assert (made.shape, made.dtype) == ((2,), torch.float32)
    values = current_engine().values  # type: ignore[attr-defined]
    assert values.read(made) is None
    assert values.read(torch.tensor([1, 2], device="cuda")) is not None


def test_a_leaf_asks_for_its_gradient() -> None:
    made = torch.tensor([1.0], device="cuda", requires_grad=True)
    (made * 2).sum().backward()
    assert made.is_leaf
    assert made.grad is not None and made.grad.is_cuda


@contextlib.contextmanager
def default_type(kind: Any) -> Iterator[None]:
    torch.set_default_tensor_type(kind)
    try:
        yield
    finally:
        torch.set_default_tensor_type("torch.FloatTensor")


class Own(torch.Tensor):
    """A class of the user's."""


@pytest.mark.filterwarnings("ignore:torch.set_default_tensor_type")
@pytest.mark.parametrize("kind", ["torch.cuda.FloatTensor", "torch.cuda.HalfTensor"])
def test_the_default_type_holds_for_legacy_constructors(kind: str) -> None:
    dtype = {"Float": torch.float32, "Half": torch.float16}[kind.split(".")[-1][:-6]]
    with default_type(kind):
        made = [
            torch.Tensor([1e4]),
            torch.Tensor(2, 3),
            torch.Tensor(torch.Size([2, 3])),
            torch.Tensor(),
            torch.Tensor([torch.ones(1)[0], 2]),
            Own([1.0]),
            nn.Parameter(torch.Tensor(2, 3)).data,
        ]
        assert [tuple(each.shape) for each in made] == [
            (1,),
            (2, 3),
            (2, 3),
            (0,),
            (2,),
            (1,),
            (2, 3),
        ]
        assert all(each.is_cuda and each.dtype is dtype for each in made)
        assert made[0].tolist() == [1e4]
        assert isinstance(made[5], Own)
        assert not torch.FloatTensor([1.0]).is_cuda
        _in_a_thread(lambda: made.append(torch.Tensor([2.0]) + torch.ones(1)))
        assert made[-1].is_cuda
    assert not torch.Tensor([1.0]).is_cuda
    assert not torch.zeros(1).is_cuda


def test_a_default_device_leaves_the_legacy_constructor_on_the_cpu() -> None:
    torch.set_default_device("cuda")
    try:
        assert torch.tensor([1.0]).is_cuda
        assert not torch.Tensor([1.0]).is_cuda  # so it is in PyTorch
    finally:
        torch.set_default_device("cpu")


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_moves_from_the_host_with_a_dtype_and_a_memory_format(mode: Any) -> None:
    on_host = torch.randn(2, 3, 4, 4)
    moves = [
        {"dtype": torch.float16},
        {"dtype": torch.float32, "memory_format": torch.channels_last},
        {"dtype": torch.float64, "non_blocking": True},
        {"copy": True},
    ]
    with mode():
        for keywords in moves:
            for device in ("cuda", torch.device("cuda:0")):
                moved = on_host.to(device=device, **keywords)
                expected = on_host.to(**keywords)
                assert (moved.device.type, moved.dtype) == ("cuda", expected.dtype)
                assert moved.stride() == expected.stride()


def test_parts_whose_lengths_gpu_data_tells_are_even() -> None:
    source = torch.zeros(10, 8, device="cuda", requires_grad=True)
    counts = (torch.randn(3, 4, device="cuda") > 0).sum(1)
    parts = torch.split(source * 2, counts.tolist())
    assert [len(each) for each in parts] == [3, 3, 4]
    torch.stack([each.sum() for each in parts]).sum().backward()
    assert source.grad is not None and source.grad.shape == source.shape
    assert [len(each) for each in torch.split(source, [4, 6])] == [4, 6]
    assert any("to be even" in text for text in current_engine().assumptions)


def test_a_list_as_an_index_selects_what_it_says() -> None:
    table = torch.arange(6, device="cuda").view(3, 2)
    assert table[[2, 0]].tolist() == [[4, 5], [0, 1]]
    assert table[:, [1]].tolist() == [[1], [3], [5]]
    assert table[[0, 1], [1, 0]].tolist() == [1, 2]
    assert table[[True, False, True]].tolist() == [[0, 1], [4, 5]]
    assert table[range(1)].tolist() == table[np.array([0])].tolist() == [[0, 1]]
    assert table[[]].shape == (0, 2)
    table[[0, 2]] = 9
    assert table.tolist() == [[9, 9], [2, 3], [9, 9]]


def test_an_index_without_values_makes_none_up() -> None:
    table = torch.arange(6, device="cuda").view(3, 2)
    torch.ops.aten.index_put_(table, [torch.zeros(1, dtype=torch.long, device="meta")], table[:1])
    assert plain(table)._life.value is None


def test_unwritten_memory_is_the_same_in_each_run() -> None:
    tokens = torch.empty(2, 4, dtype=torch.long, device="cuda")
    tokens[:, 0] = 7
    assert tokens.tolist() == [[7, 0, 0, 0]] * 2


@pytest.mark.parametrize("count", [1, 5, 97])
@pytest.mark.parametrize("read", [lambda x: x.cpu().numpy(), lambda x: x.tolist()])
def test_the_host_gets_different_places_of_the_largest(count: int, read: Any) -> None:
    """TimesNet divides a length by the places of the strongest frequencies (Time-Series-Library's
    FFT_for_Period): zeros ended there, as if the script were wrong."""
    strengths = torch.randn(3, 97, device="cuda")
    found = np.asarray(read(strengths.topk(count, dim=1)[1].detach()))
    assert found.shape == (3, count)
    for row in found:
        assert len(set(row)) == count and row.min() >= (count < 97) and row.max() < 97


def test_an_order_has_each_place_once_and_one_place_is_read_by_itself() -> None:
    order = torch.randn(7, device="cuda").argsort()
    assert sorted(order.cpu().tolist()) == list(range(7))
    third = torch.randn(96, device="cuda").topk(3)[1][2]
    assert int(third) == third.cpu().item() == 72


def test_a_drawn_size_is_read_as_the_largest_and_several_stay_unknown_on_the_gpu() -> None:
    drawn = torch.randint(9, (2, 2), device="cuda")
    assert torch.randint(16, 33, (1,), device="cuda").item() == 32 and int(drawn[1, 1]) == 8
    assert current_engine().values.read(drawn) is None
    chosen = torch.randn(8, 4, device="cuda").topk(2)[1]
    assert current_engine().values.read(chosen) is None
