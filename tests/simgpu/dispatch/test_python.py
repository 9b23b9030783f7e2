"""What scripts do with devices and data in Python, as a GPU answers it."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
import torch
from torch import nn

pytestmark = pytest.mark.usefixtures("sim")


def test_a_device_is_made_of_a_number() -> None:
    assert torch.device(0) == torch.device("cuda:0") == torch.device("cuda", 0)
    assert torch.device(1) == torch.device("cuda:1")  # that there is none shows when it is used
    assert torch.device(torch.device("cpu")) == torch.device("cpu")
    assert torch.device(type="cuda", index=0).index == 0
    with pytest.raises(RuntimeError, match="must not be negative"):
        torch.device(-1)


def host() -> torch.Tensor:
    return torch.ones(3)


@pytest.mark.parametrize(
    "made",
    [
        lambda: host().to(0),
        lambda: host().to(torch.device(0), torch.float16),
        lambda: host().cuda(device=0),
        lambda: torch.zeros_like(host(), device=0),
        lambda: torch.tensor([1.0], device=0),
        lambda: torch.from_numpy(np.ones(3)).to(device=0, non_blocking=True),
        lambda: nn.Linear(2, 2).to(0).weight,
        lambda: nn.Linear(2, 2, device=0).weight,
        lambda: torch.randn(2, generator=torch.Generator(device=0), device=0),
    ],
)
def test_it_is_taken_everywhere(made: Callable[[], torch.Tensor]) -> None:
    assert made().device == torch.device("cuda:0")


@pytest.mark.parametrize(
    "made",
    [
        lambda: host().to(1),
        lambda: host().to(torch.device(1)),
        lambda: torch.ones(3, device=torch.device(1)),
        lambda: torch.cuda.set_device(torch.device(1)),
    ],
)
def test_a_gpu_that_is_not_there_is_refused(made: Callable[[], torch.Tensor]) -> None:
    with pytest.raises(RuntimeError, match="invalid device ordinal"):
        made()


def test_as_the_default_and_in_contexts() -> None:
    with torch.device(0):
        assert nn.Linear(2, 2).weight.is_cuda
    with torch.cuda.device(0), torch.cuda.device(torch.device(0)):
        assert torch.ones(2, device="cuda").get_device() == 0
    torch.set_default_device(0)
    assert torch.ones(2).is_cuda and torch.get_default_device() == torch.device("cuda:0")
    torch.set_default_device(None)
    assert not torch.ones(2).is_cuda


def test_storages_tell_which_tensors_share_them() -> None:
    whole = torch.zeros(1024, device="cuda")
    half = whole[512:]
    other = torch.zeros(1024, device="cuda")
    pointers = [each.untyped_storage().data_ptr() for each in (whole, half, other)]
    assert pointers[0] == pointers[1] == whole.data_ptr() != pointers[2]
    assert half.data_ptr() == pointers[0] + 2048


def test_data_that_nobody_has_is_not_shared() -> None:
    with pytest.raises(BufferError, match="no data to share"):
        torch.from_dlpack(torch.zeros(3, device="cuda"))


def test_unknown_numbers_are_close_and_known_ones_compared() -> None:
    unknown = torch.rand(1000, device="cuda")
    torch.testing.assert_close(unknown, unknown * 1.5)
    torch.testing.assert_close(torch.arange(3, device="cuda"), torch.arange(3, device="cuda"))
    with pytest.raises(AssertionError):
        torch.testing.assert_close(
            torch.arange(3, device="cuda"), torch.arange(1, 4, device="cuda")
        )
