"""Modules that learn their shapes from the first batch, moved to the device in every order."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import nn

import trainfit

IMAGES = (4, 3, 16, 16)


def lazy() -> nn.Sequential:
    layers = (nn.LazyConv2d(8, 3), nn.LazyBatchNorm2d(), nn.ReLU(), nn.Flatten(), nn.LazyLinear(10))
    return nn.Sequential(*layers)


def eager() -> nn.Sequential:
    layers = (nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.Flatten(), nn.Linear(1568, 10))
    return nn.Sequential(*layers)


def run(model: nn.Module) -> None:
    model(torch.randn(IMAGES, device="cuda"))


def train(model: nn.Module, optimizer: torch.optim.Optimizer | None = None) -> None:
    optimizer = optimizer or torch.optim.Adam(model.parameters())
    for _ in range(2):
        optimizer.zero_grad()
        run_loss = model(torch.randn(IMAGES, device="cuda")).sum()
        run_loss.backward()
        optimizer.step()


def moved_by_to() -> nn.Module:
    model = lazy().to("cuda")
    run(model)
    return model


def moved_by_cuda() -> nn.Module:
    model = lazy().cuda()
    run(model)
    return model


def made_in_a_context() -> nn.Module:
    with torch.device("cuda"):
        model = lazy()
    run(model)
    return model


def made_on_a_default_device() -> nn.Module:
    torch.set_default_device("cuda")
    model = lazy()
    run(model)
    return model


def moved_after_the_dry_run() -> nn.Module:
    model = lazy()
    model(torch.randn(IMAGES))
    return model.cuda()


def there_and_back_and_there() -> nn.Module:
    model = lazy().cuda().cpu()
    assert isinstance(model[0].weight, nn.UninitializedParameter)
    model.to("cuda")
    run(model)
    return model


def loaded_before_the_first_batch() -> nn.Module:
    model = lazy().cuda()
    model.load_state_dict(eager().state_dict())
    return model


def without_a_dry_run() -> nn.Module:
    return lazy().cuda()


WAYS = (
    moved_by_to, moved_by_cuda, made_in_a_context, made_on_a_default_device,
    moved_after_the_dry_run, there_and_back_and_there, loaded_before_the_first_batch,
    without_a_dry_run,
)  # fmt: skip


def peaks(model_of: Callable[[], nn.Module]) -> tuple[int, int]:
    with trainfit.simulate("RTX 4090"):
        model = model_of()
        train(model)
        return torch.cuda.memory_allocated(), torch.cuda.max_memory_allocated()


@pytest.mark.parametrize("way", WAYS, ids=lambda way: way.__name__)
def test_it_trains_in_the_memory_of_the_same_model_with_given_shapes(
    way: Callable[[], nn.Module],
) -> None:
    def given_shapes() -> nn.Module:
        if way is made_on_a_default_device:  # where temporary tensors are then, too
            torch.set_default_device("cuda")
        return eager().cuda()

    assert peaks(way) == peaks(given_shapes)


def test_the_objects_stay_so_that_an_optimizer_made_before_trains_them() -> None:
    with trainfit.simulate("RTX 4090"):
        model = lazy().cuda()
        before = list(model.parameters())
        train(model, torch.optim.SGD(model.parameters(), momentum=0.9))
        assert [id(each) for each in model.parameters()] == [id(each) for each in before]
        assert all(type(each) is type(eager().cuda()[0].weight) for each in before)
        assert all(isinstance(each, nn.Parameter) and each.grad is not None for each in before)
        assert not nn.parameter.is_lazy(before[0])


def test_dtype_and_device_are_those_that_it_was_moved_to() -> None:
    with trainfit.simulate("RTX 4090"):
        model = lazy().cuda().half()
        model(torch.randn(IMAGES, device="cuda").half())
        assert {each.dtype for each in model.parameters()} == {torch.float16}
        assert {str(each.device) for each in model.parameters()} == {"cuda:0"}
        alone = nn.LazyLinear(10, device="cuda", dtype=torch.bfloat16)
        alone(torch.randn(4, 3, device="cuda", dtype=torch.bfloat16))
        assert (str(alone.weight.device), alone.weight.dtype) == ("cuda:0", torch.bfloat16)


def test_what_refuses_to_tell_its_shape_on_a_gpu_refuses_here() -> None:
    with trainfit.simulate("RTX 4090"):
        model = lazy().cuda()
        with pytest.raises(RuntimeError, match="uninitialized"):
            _ = model[0].weight.shape
        with pytest.raises(ValueError, match="uninitialized"):
            _ = model[0].weight + 1
        assert torch.cuda.memory_allocated() < 2048  # the batch norm's counter


def test_its_memory_is_recorded_as_parameters() -> None:
    def parameters(model_of: Callable[[], nn.Module]) -> int:
        with trainfit.simulate("RTX 4090") as simulation:
            model = model_of()
            run(model)
        header = simulation.recording.header
        return sum(torch.Size(shape).numel() for _, shape, _, _ in header["parameters"] if shape)

    assert parameters(without_a_dry_run) == parameters(lambda: eager().cuda()) > 0
