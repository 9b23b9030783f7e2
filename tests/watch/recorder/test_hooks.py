"""Looks at hooks of modules and tensors, told from what is a part of the model."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import ClassVar

import pytest
import torch
from torch import nn

from trainfit.watch.recorder.looks.stacks import (
    in_hook,
    is_in_pass,
    users_stack,
    waits_in_pass,
)

Look = Callable[[], None]


def by_hook(net: nn.Module, look: Look) -> None:
    def hook(module: nn.Module, inputs: object, output: torch.Tensor) -> None:
        look()

    net.register_forward_hook(hook)


def by_object(net: nn.Module, look: Look) -> None:
    class Probe:
        def __call__(self, module: nn.Module, inputs: object) -> None:
            look()

    net.register_forward_pre_hook(Probe())


def by_gradient(net: nn.Module, look: Look) -> None:
    def hook(module: nn.Module, inputs: object, outputs: object) -> None:
        look()

    net.register_full_backward_hook(hook)


def by_parameter(net: nn.Module, look: Look) -> None:
    def hook(gradient: torch.Tensor) -> None:
        look()

    next(net.parameters()).register_hook(hook)


def adapts(net: nn.Module, look: Look) -> None:
    """A hook that gives another output: the model needs it."""

    def hook(module: nn.Module, inputs: object, output: torch.Tensor) -> torch.Tensor:
        look()
        return output * 2

    net.register_forward_hook(hook)


def computes(net: nn.Module, look: Look) -> None:
    """The forward pass itself, next to a hook; another function than ``forward``, too."""
    forward = net.forward

    def own(x: torch.Tensor) -> torch.Tensor:
        look()
        out: torch.Tensor = forward(x)
        return out

    net.forward = own
    net.register_forward_hook(lambda *_: None)


class Doubled(torch.autograd.Function):
    looks: ClassVar[list[Look]] = []

    @staticmethod
    def forward(ctx: object, x: torch.Tensor) -> torch.Tensor:
        return 2 * x

    @staticmethod
    def backward(ctx: object, gradient: torch.Tensor) -> torch.Tensor:
        for look in Doubled.looks:
            look()
        return 2 * gradient


def own_backward(net: nn.Module, look: Look) -> None:
    Doubled.looks.append(look)


def seen(way: Callable[[nn.Module, Look], None]) -> list[bool]:
    """Of each look: was it in a hook?"""
    found: list[bool] = []

    def look() -> None:
        stack = users_stack(threading.get_ident())
        assert is_in_pass(stack)
        found.append(in_hook(stack) is not None)

    Doubled.looks.clear()
    net = nn.Linear(3, 2)
    way(net, look)
    Doubled.apply(net(torch.ones(4, 3, requires_grad=True))).sum().backward()  # type: ignore[no-untyped-call]
    return found


@pytest.mark.parametrize("way", [by_hook, by_object, by_gradient, by_parameter])
def test_a_hook_that_only_looks_is_seen(way: Callable[[nn.Module, Look], None]) -> None:
    assert seen(way) == [True]


@pytest.mark.parametrize("way", [adapts, computes, own_backward])
def test_what_is_a_part_of_the_model_is_no_hook(way: Callable[[nn.Module, Look], None]) -> None:
    assert seen(way) == [False]


class Spy:
    """A file that looks when it is written to."""

    def __init__(self) -> None:
        self.found: list[bool] = []

    def write(self, text: str) -> None:
        self.found.append(waits_in_pass(users_stack(threading.get_ident())))


@pytest.mark.parametrize("prints", [True, False])
def test_a_line_of_the_model_that_logs_is_seen(prints: bool) -> None:
    """And none that computes."""
    spy = Spy()

    class Net(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            if prints:
                print(1, file=spy, end="")
            else:
                spy.found.append(waits_in_pass(users_stack(threading.get_ident())))
            return x

    Net()(torch.ones(2))
    assert spy.found[:1] == [prints]
