"""Geometry of results, from the fake kernels of PyTorch and of whoever registered an operator."""

from __future__ import annotations

from collections.abc import Container
from typing import Any

import torch

from trainfit.simgpu.dispatch.arguments import meta_arguments, meta_keywords
from trainfit.simgpu.recording.user_location import user_frame
from trainfit.simgpu.tensors.error_messages import CHECKS, kernels_words
from trainfit.simgpu.tensors.errors import UnsupportedOperatorError
from trainfit.simgpu.tensors.layouts import LAYOUTS
from trainfit.simgpu.tensors.tensor import spec_of
from trainfit.torch_private.dispatching import no_dispatch
from trainfit.torch_private.operators import decompositions
from trainfit.torch_private.tensors import storage_key


def infer(func: Any, args: Any, kwargs: Any) -> Any:
    """Result of ``func`` as meta tensors, from its fake kernel."""
    plain, plain_kwargs = meta_arguments(args), meta_keywords(kwargs)
    check, layout = CHECKS.get(func), LAYOUTS.get(func)
    if check is not None:
        check(args, kwargs)
    try:
        with no_dispatch():
            result = func(*plain, **plain_kwargs)
            return result if layout is None else layout(plain, result)
    except NotImplementedError as error:
        return _infer_otherwise(func, plain, plain_kwargs, error)
    except RuntimeError as error:
        if "fake impl" in str(error):
            raise UnsupportedOperatorError(str(func), user_frame(), str(error)) from None
        if "as opposed to FakeTensors" in str(error):
            remedy = "its fake kernel's result shape depends on data"
            raise UnsupportedOperatorError(str(func), user_frame(), str(error), remedy) from None
        raise kernels_words(func, plain, plain_kwargs, error) from None


def _infer_otherwise(func: Any, args: Any, kwargs: Any, error: Exception) -> Any:
    """Shape functions that are not registered as meta kernels."""
    with no_dispatch():
        decomposition = decompositions.get(func)
        if decomposition is not None:
            return decomposition(*args, **kwargs)
        result = func.decompose(*args, **kwargs)
        if result is not NotImplemented:
            return result
    raise UnsupportedOperatorError(str(func), user_frame(), str(error)) from None


class Sequence:
    """Description of a list or tuple of results."""

    __slots__ = ("items", "kind")

    def __init__(self, kind: Any, items: list[Any]) -> None:
        self.kind = kind
        self.items = items


def describe(meta: Any) -> Any:
    """The geometry of results, from which `Engine.materialize` makes new ones."""
    if isinstance(meta, torch.Tensor):
        return spec_of(meta)
    if isinstance(meta, (list, tuple)):
        return Sequence(type(meta), [describe(each) for each in meta])
    return meta


def aliases(meta: Any, storages: Container[int]) -> bool:
    """Does an operator without alias annotation return an existing storage, one of those?"""
    if isinstance(meta, torch.Tensor):
        if meta.layout is not torch.strided:
            return True
        return storage_key(meta.untyped_storage()) in storages
    return isinstance(meta, (list, tuple)) and any(aliases(each, storages) for each in meta)
