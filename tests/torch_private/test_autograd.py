"""What a graph tells of itself, by the newest PyTorch, too."""

from __future__ import annotations

import torch

from trainfit.torch_private.autograd import needs_changed


def test_the_operator_that_needed_what_was_changed_in_place() -> None:
    x = torch.randn(3, requires_grad=True)
    y = x.exp()
    loss = (y * y).sum()
    assert needs_changed(loss.grad_fn) is None
    y.mul_(2)
    assert needs_changed(loss.grad_fn) == "Mul"


def test_a_change_that_nothing_needs() -> None:
    x = torch.randn(3, requires_grad=True)
    y = x + 1
    loss = (3 * y).sum()
    y.mul_(2)
    assert needs_changed(loss.grad_fn) is None
    assert needs_changed(None) is None
