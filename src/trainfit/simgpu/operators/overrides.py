"""Kernels registered with PyTorch's dispatcher for the time of a simulation.

Three reasons to register: autocast's C++ kernels do not know simulated tensors
(:mod:`trainfit.simgpu.operators.autocast`); some composite operators ask ``is_cuda()`` in C++
before they choose CUDA's path; and the dispatcher decomposes an operator that has a CUDA kernel
and a composite fallback where no CUDA kernel is built in.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import torch

from trainfit.hardware import GpuSpec
from trainfit.simgpu.device.engine import Engine
from trainfit.simgpu.device.registry import HANDLERS, Handler
from trainfit.simgpu.device.tensor import DeviceTensor
from trainfit.simgpu.operators import rnn, torchvision_operators
from trainfit.simgpu.operators.autocast import Autocast
from trainfit.simgpu.operators.convolution import by_cudnn, in_its_format
from trainfit.simgpu.operators.sdpa import attention
from trainfit.simgpu.operators.torchvision_operators import define_torchvision_operators
from trainfit.torch_private import operators as private
from trainfit.torch_private.operators import COMPOSITE, has_kernel, local_part

aten = torch.ops.aten


#: Operators with a CUDA kernel in addition to a CompositeImplicitAutograd one: without a kernel
#: under the CUDA key they would arrive in pieces. Derived from native_functions.yaml; a test
#: compares this list with the installed PyTorch's. That of RMSNorm was Apple's alone in PyTorch
#: 2.8, and got a gradient of its own together with CUDA's kernel.
WHOLE_ON_CUDA = (
    "silu_backward",
    "mish_backward",
    *(["_fused_rms_norm"] if hasattr(aten, "_fused_rms_norm_backward") else []),
)


class Overrides:
    """Registers on construction, takes everything back on :meth:`remove`."""

    def __init__(self, gpu: GpuSpec, autocast: Autocast) -> None:
        self._libraries: list[torch.library.Library] = []
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            library = torch.library.Library("aten", "IMPL")
            self._libraries.append(library)
            autocast.install(library)
            _composites(library, gpu)
            for name in WHOLE_ON_CUDA:
                if _exists(name) and not _has_cuda(name):
                    library.impl(name, _never_reached, "CUDA")
            define_torchvision_operators()
            rules = torchvision_operators.autocast_rules(autocast)
            if rules is not None:
                self._libraries.append(rules)
        torchvision_operators.install()

    def remove(self) -> None:
        for library in self._libraries:
            private.destroy(library)
        self._libraries.clear()


def _exists(name: str) -> bool:
    return hasattr(aten, name)


def _has_cuda(name: str) -> bool:
    return has_kernel(f"aten::{name}", "CUDA")


def _never_reached(*_: Any, **__: Any) -> Any:
    raise AssertionError("simulated tensors are handled before the CUDA key")


def _ctc_loss(
    log_probs: torch.Tensor,
    targets: torch.Tensor,
    input_lengths: torch.Tensor,
    target_lengths: torch.Tensor,
    *args: Any,
    **kwargs: Any,
) -> torch.Tensor:
    """Lengths are read on the host, as for any plain tensor (LossCTC.cpp)."""
    lengths = [each.cpu().tolist() for each in (input_lengths, target_lengths)]
    return torch.ops.aten.ctc_loss.IntList(log_probs, targets, *lengths, *args, **kwargs)  # type: ignore[no-any-return]


def _batch_norm(
    source: torch.Tensor,
    weight: torch.Tensor | None,
    bias: Any,
    mean: Any,
    var: Any,
    training: bool,
    *args: Any,
) -> Any:
    """cuDNN's input is made dense first, and that is what the backward pass keeps."""
    if by_cudnn(source, weight, training):
        source = in_its_format(source)
    whole = private.batch_norm_impl_index.default
    return private.call_for(whole)(COMPOSITE, source, weight, bias, mean, var, training, *args)


def _composites(library: torch.library.Library, gpu: GpuSpec) -> None:
    """CUDA's path of composite operators that ask ``is_cuda()`` in C++."""

    def dropout(tensor: torch.Tensor, p: float, train: bool) -> torch.Tensor:
        # is_fused_kernel_acceptable in ATen/native/Dropout.cpp
        if train and 0 < p < 1 and tensor.numel():
            return torch.native_dropout(tensor, p, train)[0]
        whole = private.call_for(aten.dropout.default)
        return whole(COMPOSITE, tensor, p, train)  # type: ignore[no-any-return]

    def half_to_float(whole: Any, fused: Any) -> Any:
        # ATen/native/SoftMax.cpp: the kernel reads halves and writes floats by itself.
        def kernel(tensor: torch.Tensor, dim: int, dtype: torch.dtype | None = None) -> Any:
            if tensor.dtype is torch.float16 and dtype is torch.float32:
                return fused(tensor, dim, True)
            return private.call_for(whole)(COMPOSITE, tensor, dim, dtype)

        return kernel

    def sdpa(
        query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *args: Any, **kwargs: Any
    ) -> torch.Tensor:
        return attention(gpu, query, key, value, *args, **kwargs)

    for op, kernel in (
        (aten.dropout.default, dropout),
        (aten.scaled_dot_product_attention.default, sdpa),
        (aten.ctc_loss.Tensor, _ctc_loss),
        (private.batch_norm_impl_index.default, _batch_norm),
        (aten.softmax.int, half_to_float(aten.softmax.int, private.softmax.default)),
        (aten.log_softmax.int, half_to_float(aten.log_softmax.int, private.log_softmax.default)),
        *rnn.composites(),
    ):
        library.impl(op, kernel, "AutogradCUDA")
        library.impl(op, _of_dtensors(op, kernel), "AutogradMeta")
        HANDLERS[op] = _without_autograd(kernel)


def _of_dtensors(op: Any, kernel: Callable[..., Any]) -> Callable[..., Any]:
    """``kernel`` for DTensors of the GPU, which C++ takes for meta tensors; what ``op`` does else
    for all others."""
    whole = private.call_for(op)

    def choose(first: Any, *args: Any, **kwargs: Any) -> Any:
        if isinstance(local_part(first), DeviceTensor):
            return kernel(first, *args, **kwargs)
        return whole(COMPOSITE, first, *args, **kwargs)

    return choose


def _without_autograd(kernel: Callable[..., Any]) -> Handler:
    """A handler of the same kernel where the autograd key is off, as in inference mode."""

    def handler(engine: Engine, func: Any, args: Any, kwargs: Any) -> Any:
        with engine.mode(engine):
            return kernel(*args, **kwargs)

    return handler
