"""Tensors of the user's own classes on the simulated device stay what they are."""

from __future__ import annotations

import copy
import io
import pickle
from collections.abc import Iterator
from typing import Any, Self

import pytest
import torch
from torch import nn
from torch.utils._pytree import tree_map_only

import trainfit


class Tagged(torch.Tensor):
    """The least a subclass can be."""


class WithMeta(torch.Tensor):
    """Keeps what it knows in ``_meta`` and copies whole ``__dict__``s, as MONAI's does."""

    _meta: dict[str, Any]

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = super().__torch_function__(func, types, args, kwargs)
        source = next((each for each in args if isinstance(each, WithMeta)), None)
        if isinstance(out, WithMeta) and source is not None:
            out.__dict__ = dict(source.__dict__)
        return out


class Coded(nn.Parameter):
    """A parameter subclass made as bitsandbytes makes its own."""

    code: str

    def __new__(cls, data: torch.Tensor, requires_grad: bool = True, code: str = "") -> Self:
        made = torch.Tensor._make_subclass(cls, data, requires_grad)
        made.code = code
        return made


class Named(nn.Parameter):
    pass


class Held(torch.Tensor):
    """Keeps its data in another tensor, as torchao's weights do."""

    inner: torch.Tensor

    @staticmethod
    def __new__(cls, inner: torch.Tensor, requires_grad: bool = False) -> Any:
        made = torch.Tensor._make_wrapper_subclass(
            cls,
            inner.shape,
            strides=inner.stride(),
            dtype=inner.dtype,
            device=inner.device,
            requires_grad=requires_grad,
        )
        made.inner = inner
        return made

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        args, kwargs = tree_map_only(Held, lambda each: each.inner, (args, kwargs or {}))
        torch.zeros(1, device="cuda")  # what it makes for itself is on the device, too
        return tree_map_only(torch.Tensor, Held, func(*args, **kwargs))


#: Made before a simulation starts.
_EARLY = Held(torch.ones(8, 8))


@pytest.fixture(autouse=True)
def simulation() -> Iterator[trainfit.Simulation]:
    with trainfit.simulate("RTX 4090") as sim:
        yield sim
    # Tests here compare addresses.
    noted = [text for text in sim.recording.header["assumptions"] if "data_ptr()" not in text]
    assert not noted


def tagged(*shape: int) -> torch.Tensor:
    return torch.zeros(shape).as_subclass(Tagged)


def test_a_subclass_follows_its_tensor_to_the_device_and_back() -> None:
    moved = tagged(4, 5).to("cuda")
    assert isinstance(moved, Tagged) and moved.is_cuda and moved.device == torch.device("cuda:0")
    assert type(moved).__name__ == "Tagged"
    assert type(moved.cpu()) is Tagged and moved.cpu().device.type == "cpu"
    assert type(moved.as_subclass(torch.Tensor)) is type(torch.zeros(1, device="cuda"))  # type: ignore[arg-type]


def test_operators_return_the_subclass_as_torch_function_has_it() -> None:
    moved = tagged(4, 5).cuda()
    for result in (moved + 1, 2 * moved, moved[0], moved.sum(), moved @ torch.ones(5, 2).cuda()):
        assert isinstance(result, Tagged) and result.is_cuda
    assert isinstance(moved.add_(1), Tagged) and moved.add_(1) is moved
    assert moved.shape == (4, 5) and moved.max(0).values.is_cuda


def test_a_subclass_takes_no_memory_of_its_own() -> None:
    before = torch.cuda.memory_allocated()
    moved = tagged(1024).cuda()
    view = moved.as_subclass(WithMeta)
    assert torch.cuda.memory_allocated() - before == 4096
    assert view.data_ptr() == moved.data_ptr()
    del moved
    assert torch.cuda.memory_allocated() - before == 4096
    del view
    assert torch.cuda.memory_allocated() == before


def test_attributes_of_the_users_do_not_meet_those_of_the_simulation() -> None:
    host = torch.zeros(3, 4).as_subclass(WithMeta)
    host._meta = {"affine": 1}
    moved = host.to("cuda")
    assert moved._meta == {"affine": 1}
    row = moved[0]
    assert row._meta == {"affine": 1} and row.shape == (4,)
    assert (row + 1).shape == (4,) and (row + 1).cpu()._meta == {"affine": 1}


def test_gradients_pass_through() -> None:
    weight = torch.zeros(5, 3, device="cuda", requires_grad=True)
    (tagged(4, 5).cuda() @ weight).sum().backward()
    assert weight.grad is not None and weight.grad.shape == (5, 3)
    leaf = torch.zeros(3, device="cuda", requires_grad=True)
    seen = leaf.as_subclass(Tagged)
    assert seen.requires_grad and not seen.is_leaf
    (seen * 2).sum().backward()
    assert leaf.grad is not None and not isinstance(leaf.grad, Tagged)


def test_geometry_that_changes_in_place() -> None:
    moved = tagged(4, 6).cuda()
    moved.t_()
    assert moved.shape == (6, 4) and moved.stride() == (1, 6)
    before = torch.cuda.memory_allocated()
    moved.resize_(64, 64)
    assert (moved + 1).shape == (64, 64)
    assert torch.cuda.memory_allocated() - before == 64 * 64 * 4 - 512


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_without_gradients(mode: Any) -> None:
    moved = tagged(2, 2).cuda()
    with mode():
        assert isinstance(moved.as_subclass(WithMeta), WithMeta)
        assert isinstance(moved + 1, Tagged) and isinstance((moved + 1)[0], Tagged)


def test_autocast_casts_them() -> None:
    with torch.autocast("cuda", dtype=torch.bfloat16):
        assert (tagged(2, 2).cuda() @ torch.ones(2, 2).cuda()).dtype is torch.bfloat16


def test_copies_and_pickles() -> None:
    moved: Any = tagged(4).cuda()
    moved.note = ["a"]
    deep, shallow = copy.deepcopy(moved), copy.copy(moved)
    for made in (deep, shallow):
        assert isinstance(made, Tagged) and made.is_cuda and made.note == ["a"]
    assert shallow.data_ptr() == moved.data_ptr() != deep.data_ptr()
    assert deep.note is not moved.note and shallow.note is moved.note
    loaded = pickle.loads(pickle.dumps(moved))
    assert isinstance(loaded, Tagged) and loaded.is_cuda and loaded.note == ["a"]


def test_plain_tensors_copy_like_those_of_a_gpu() -> None:
    whole: Any = torch.zeros(1024, device="cuda")
    whole.note = 1
    shallow = copy.copy(whole)
    assert shallow.is_cuda and shallow.data_ptr() == whole.data_ptr() and shallow.note == 1
    before = torch.cuda.memory_allocated()
    views = copy.deepcopy([whole[:10], whole[10:20]])  # one storage, copied whole
    assert torch.cuda.memory_allocated() - before == 4096
    assert views[1].data_ptr() - views[0].data_ptr() == 40


def test_a_deep_copied_parameter_has_neither_gradient_nor_attributes() -> None:
    for parameter in (nn.Parameter(torch.zeros(4, device="cuda")), Coded(torch.zeros(4)).cuda()):
        parameter: Any  # type: ignore[no-redef]
        parameter = nn.Parameter(parameter.detach())
        parameter.sum().backward()
        made = copy.deepcopy(parameter)
        assert isinstance(made, nn.Parameter) and made.grad is None


def test_a_module_moves_its_parameters_of_a_class() -> None:
    module = nn.Module()
    module.weight = parameter = Coded(torch.zeros(8, 8), code="nf4")
    module.to("cuda")
    assert module.weight is parameter and isinstance(parameter, Coded)
    assert parameter.is_cuda and parameter.code == "nf4" and isinstance(parameter, nn.Parameter)
    (parameter * 2).sum().backward()
    assert parameter.grad is not None and parameter.grad.is_cuda
    parameter.data = torch.zeros(2, 2, device="cuda")
    assert parameter.shape == (2, 2)
    parameter.grad = None
    module.cpu()
    assert type(module.weight) is Coded and module.weight.device.type == "cpu"


def test_parameters_of_a_class_are_made_on_the_device() -> None:
    data = torch.zeros(3, device="cuda")
    for parameter in (Coded(data, code="x"), Named(data), Named(data, requires_grad=False)):
        assert isinstance(parameter, (Coded, Named)) and parameter.is_leaf and parameter.is_cuda
        assert parameter.data_ptr() == data.data_ptr()
        assert isinstance(copy.deepcopy(parameter), type(parameter).__mro__[1])
    assert not Named(data, requires_grad=False).requires_grad
    assert isinstance(nn.Parameter(data), nn.Parameter)


def test_an_optimizer_steps_them_and_they_count_as_parameters(
    simulation: trainfit.Simulation,
) -> None:
    model = nn.Linear(64, 64, device="cuda", bias=False)
    model.weight = Named(torch.zeros(64, 64, device="cuda"))
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.zeros(2, 64, device="cuda")).sum().backward()
    optimizer.step()
    assert optimizer.state[model.weight]["exp_avg"].is_cuda
    parameters = simulation.recording.parameters() or ()
    assert [tuple(each.shape) for each in parameters] == [(64, 64)]


def test_a_state_dict_with_them_goes_through_a_file() -> None:
    module = nn.Module()
    module.weight = Named(torch.zeros(8, device="cuda"))
    file = io.BytesIO()
    torch.save(module.state_dict(), file)
    file.seek(0)
    loaded = torch.load(file, weights_only=True)["weight"]
    assert loaded.is_cuda and loaded.shape == (8,)


def test_swapped_tensors_stay_on_the_device() -> None:
    one, two = tagged(2).cuda(), torch.zeros(3, device="cuda").as_subclass(WithMeta)
    torch.utils.swap_tensors(one, two)
    assert isinstance(one, WithMeta) and one.shape == (3,) and (one + 1).is_cuda


def test_plain_tensors_that_share_or_swap_their_attributes_keep_their_own() -> None:
    """fastai gives what it computes the ``__dict__`` of what it was computed of."""
    one, two = torch.zeros(2, device="cuda"), torch.zeros(3, 5, device="cuda").double()
    one.note = "of one"  # type: ignore[attr-defined]
    tagged_two = two.as_subclass(WithMeta)
    for given in (two, tagged_two):
        given.__dict__ = one.__dict__
        assert given.note == "of one" and given.new_ones(4).dtype is torch.float64  # type: ignore[attr-defined]
        assert (given + 1).shape == (3, 5)
    plain_two = tagged_two.as_subclass(torch.Tensor)
    plain_two.__dict__ = tagged_two.__dict__
    assert plain_two.sum().dtype is torch.float64
    torch.utils.swap_tensors(one, plain_two)
    assert (one + 1).shape == (3, 5) and (plain_two + 1).shape == (2,)


class Image(WithMeta):
    """A class below the other, as fastai's TensorImage is below TensorBase."""


def test_classes_are_of_each_other_on_the_device_as_well() -> None:
    image, other = (torch.zeros(3, device="cuda").as_subclass(kind) for kind in (Image, WithMeta))
    assert issubclass(type(image), type(other)) and isinstance(image, Image)
    for found in (image - other, other - image, torch.stack([other, image])):
        assert found.is_cuda and isinstance(found, WithMeta)
    assert type(image).__mro__.index(Image) < type(image).__mro__.index(WithMeta)


@pytest.mark.parametrize("early", [False, True])
def test_a_class_that_keeps_its_data_elsewhere_is_where_it_says(
    simulation: trainfit.Simulation, early: bool
) -> None:
    """Autograd asked CUDA for a stream, which ends the process where there is no GPU."""
    model = nn.Linear(8, 8)
    model.weight = nn.Parameter(_EARLY if early else Held(torch.ones(8, 8)))
    assert not model.weight.is_cuda and not model.weight.is_meta
    model.cuda()
    assert isinstance(model.weight, Held) and model.weight.inner.is_cuda
    assert model.weight.is_cuda and model.weight.device == torch.device("cuda", 0)
    assert not model.weight.is_meta and not model.weight.is_cpu
    optimizer = torch.optim.AdamW(model.parameters())
    with torch.autocast("cuda", dtype=torch.bfloat16):
        out = model(torch.zeros(2, 8, device="cuda"))
    assert out.dtype is torch.bfloat16 and out.is_cuda
    out.sum().backward()
    assert model.weight.grad is not None and model.weight.grad.dtype is torch.float32
    optimizer.step()
    assert Held(torch.ones(2)).device.type == "cpu"
    assert Held(torch.ones(2, device="meta")).is_meta
