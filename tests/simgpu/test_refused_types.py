"""Types that a GPU's kernels are not made for are refused in PyTorch's words."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch.nn import functional as F

import trainfit


@pytest.fixture(autouse=True)
def _simulated() -> Iterator[None]:
    with trainfit.simulate("T4"):
        yield


@pytest.mark.parametrize(
    "computes",
    [
        torch.linalg.cholesky,
        torch.linalg.eigvalsh,
        torch.linalg.qr,
        torch.linalg.svdvals,
        lambda x: torch.linalg.solve(x, x),
        lambda x: torch.cdist(x, x),
    ],
)
def test_linear_algebra_in_16_bits(computes: Callable[[torch.Tensor], Any]) -> None:
    computes(torch.eye(4, device="cuda"))
    with pytest.raises(RuntimeError, match="not implemented for 'BFloat16'"):
        computes(torch.eye(4, device="cuda", dtype=torch.bfloat16))


def test_a_mask_of_whole_numbers() -> None:
    query = torch.rand(2, 4, 8, 16, device="cuda")
    mask = torch.ones(2, 1, 1, 8, device="cuda", dtype=torch.long)
    with pytest.raises(RuntimeError, match=r"attn_mask\.dtype: long int and  query"):
        F.scaled_dot_product_attention(query, query, query, attn_mask=mask)
    for allowed in (mask.bool(), mask.float()):
        F.scaled_dot_product_attention(query, query, query, attn_mask=allowed)
