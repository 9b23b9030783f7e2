"""bitsandbytes on the simulated device: 4-bit and 8-bit weights, and paged optimizer states.

Its CUDA library is not loaded. What its operators do on a GPU is read from
``bitsandbytes/backends/cuda/ops.py`` (0.50) and done here by operators that are simulated.
"""

from __future__ import annotations

import functools
import math
import sys
from collections.abc import Mapping
from types import ModuleType
from typing import Any, Final

import torch

from trainfit.results.gpus import Kernel
from trainfit.simgpu.device.engine import Engine
from trainfit.simgpu.device.geometry import FAKES
from trainfit.simgpu.device.registry import handles_named
from trainfit.simgpu.device.values import tensors_in
from trainfit.simgpu.operators.flops import by_name
from trainfit.simgpu.operators.kernel_rules import Arguments, bytes_of, dtype_of, launched_by
from trainfit.simgpu.patching import PatchSet
from trainfit.torch_private.operators import no_dispatch

#: Rows of the activations up to which versions without a rule of their own fuse look-up and matmul.
_FUSED_ROWS: Final = 256
#: Values of the scales of nested quantization that share one of its own.
_NESTED_BLOCK: Final = 256


@handles_named("bitsandbytes::gemm_4bit")
def gemm_4bit(engine: Engine, func: Any, args: Any, kwargs: Any) -> Any:
    """A few rows meet the packed weight within one kernel; for more it becomes a dense matrix
    first, which is there as long as its matmul lasts."""
    call = by_name(func, args, kwargs)
    source, (columns, depth) = call["A"], call["shapeB"][:2]
    if _is_fused(source, columns, depth, call["blocksize"]):
        return engine.generic(engine.info(func), args, kwargs)
    with engine.mode(engine):
        dense = torch.ops.bitsandbytes.dequantize_4bit(
            call["B"], _scales(call), call["blocksize"], call["quant_type"], [columns, depth],
            source.dtype,
        )  # fmt: skip
        return torch.nn.functional.linear(source, dense, call["bias"])


@launched_by("gemm_4bit")
def _fused(call: Arguments, result: Any, flops: int) -> list[Kernel]:
    """The one kernel; those of a dense matrix are told by their own operators."""
    source, (columns, depth) = call["A"], call["shapeB"][:2]
    if not _is_fused(source, columns, depth, call["blocksize"]):
        return []
    rows = source._spec.numel // max(1, depth)
    read = bytes_of(tensors_in(list(call.values())))
    work, written = 2 * rows * columns * depth, bytes_of(tensors_in(result))
    return [Kernel("matmul", dtype_of(result), work, read, written, rows, columns, depth)]


@launched_by("int8_linear_matmul")
def _eight_bits(call: Arguments, result: Any, flops: int) -> list[Kernel]:
    """(rows, depth) times the transpose of (columns, depth), of whole numbers."""
    columns, depth = call["B"]._spec.size[-2:]
    rows = call["A"]._spec.numel // max(1, depth)
    read = bytes_of(tensors_in(list(call.values())))
    work, written = 2 * rows * columns * depth, bytes_of(tensors_in(result))
    # Tensor cores multiply them at the rate of 8-bit floats.
    return [Kernel("matmul", "float8", work, read, written, rows, columns, depth)]


@launched_by(
    *("quantize_blockwise", "dequantize_blockwise", "quantize_4bit", "int8_mm_dequant"),
    *("int8_vectorwise_quant", "int8_vectorwise_dequant"),
)
def _by_number(call: Arguments, result: Any, flops: int) -> list[Kernel]:
    """Each number is looked up or rounded, with the scale of its block or row (csrc/kernels.cu):
    memory bounds it."""
    given, made = tensors_in(list(call.values())), tensors_in(result)
    source = max([*given, *made], key=lambda each: each._spec.numel)
    numbers = source._spec.numel
    return [Kernel("pointwise", dtype_of(source), 0, bytes_of(given), bytes_of(made), numbers)]


@launched_by("int8_double_quant", "int8_mixed_scaled_mm", "int8_scaled_mm")
def _composed(call: Arguments, result: Any, flops: int) -> list[Kernel]:
    """What it consists of tells its kernels."""
    return []


def _is_fused(source: Any, columns: int, depth: int, blocksize: int) -> bool:
    rows = int(source.numel()) // max(1, depth)
    if depth % blocksize:
        return False
    library = sys.modules.get("bitsandbytes.backends.cuda.ops")
    ask = getattr(library, "_gemm_4bit_use_custom_fn", None)
    if ask is None:
        return rows <= _FUSED_ROWS
    maximum = float(getattr(library, "_gemm_4bit_custom_max_m", math.inf))
    return rows <= maximum and bool(ask(source.device.index, source.dtype, rows, columns, depth))


def _scales(call: Mapping[str, Any]) -> Any:
    """The scale of each block; of nested quantization they are looked up and shifted first."""
    if call["absmax_8bit"] is None:
        return call["absmax"]
    scales = torch.ops.bitsandbytes.dequantize_blockwise(
        call["absmax_8bit"], call["absmax"], call["absmax_code"], _NESTED_BLOCK, torch.float32
    )
    return scales + call["absmax_offset"]


# ---
# LLM.int8: which columns have outliers, data tells.


def _quantized_rows(func: Any, args: Any, kwargs: Any) -> Any:
    """The result of ``int8_vectorwise_quant``: no column has an outlier, of which the list is empty
    then."""
    call = by_name(func, args, kwargs)
    source, threshold = call["A"], call["threshold"]
    with no_dispatch():
        quantized, scales, _ = func(source, 0.0)
        none = torch.empty(0, dtype=torch.int64, device=source.device)
    return quantized, scales, none if threshold else None


FAKES["bitsandbytes::int8_vectorwise_quant"] = _quantized_rows


@handles_named("bitsandbytes::int8_vectorwise_quant")
def int8_vectorwise_quant(engine: Engine, func: Any, args: Any, kwargs: Any) -> Any:
    """Quantize rows; with a threshold the magnitudes are compared first, and the host waits for the
    answer."""
    call = by_name(func, args, kwargs)
    if call["threshold"]:
        with engine.mode(engine):
            (call["A"].abs() >= call["threshold"]).any()
        engine.wait_for_device()
        engine.assume("LLM.int8: no column of the activations was assumed to have outliers")
    return engine.generic(engine.info(func), args, kwargs)


@handles_named("bitsandbytes::int8_double_quant")
def int8_double_quant(engine: Engine, func: Any, args: Any, kwargs: Any) -> Any:
    """Quantize by rows and by columns, as the CUDA backend composes it."""
    call = by_name(func, args, kwargs)
    source = call["A"]
    with engine.mode(engine):
        operators = torch.ops.bitsandbytes
        rows, scales, outliers = operators.int8_vectorwise_quant(source, call["threshold"])
        magnitudes = source.abs().view(-1, source.shape[-1])
        if call["threshold"]:
            is_outlier = magnitudes >= call["threshold"]
            magnitudes.masked_fill_(is_outlier, 0.0)
        by_column = magnitudes.amax(dim=0, keepdim=True).float()
        del magnitudes
        if call["threshold"]:
            source = source.masked_fill(is_outlier, 0.0)
        columns = torch.round(source.mul(127.0) / by_column).to(torch.int8)
        return rows, columns, scales, by_column.flatten(), outliers


@handles_named("bitsandbytes::int8_mixed_scaled_mm")
def int8_mixed_scaled_mm(engine: Engine, func: Any, args: Any, kwargs: Any) -> Any:
    """A matmul in int8; without outliers it is that of whole numbers alone."""
    call = by_name(func, args, kwargs)
    source = call["A"]
    with engine.mode(engine):
        outliers = torch.empty(0, device=source.device, dtype=source.dtype)
        result = torch.ops.bitsandbytes.int8_scaled_mm(
            call["CA"], call["CB"], call["SCA"], call["SCB"], bias=call["bias"], dtype=source.dtype
        )
    return result, outliers


@handles_named("bitsandbytes::int8_scaled_mm")
def int8_scaled_mm(engine: Engine, func: Any, args: Any, kwargs: Any) -> Any:
    """A matmul in int8: sums of 32 bits, which are there until the result is made of them
    (``bitsandbytes/backends/default/ops.py``)."""
    call = by_name(func, args, kwargs)
    with engine.mode(engine):
        operators = torch.ops.bitsandbytes
        sums = operators.int8_linear_matmul(call["A"], call["B"])
        return operators.int8_mm_dequant(
            sums, call["row_stats"], call["col_stats"], call["dtype"], call["bias"]
        )


@handles_named("bitsandbytes::int8_mm_dequant")
def int8_mm_dequant(engine: Engine, func: Any, args: Any, kwargs: Any) -> Any:
    """The kernel's result is in float16, with a bias of that type; what else is asked for is added
    and cast after it."""
    call = by_name(func, args, kwargs)
    dtype, bias = call["dtype"] or torch.float16, call["bias"]
    if dtype == torch.float16 and (bias is None or bias.dtype == dtype):
        return engine.generic(engine.info(func), args, kwargs)
    is_fused = bias is not None and bias.dtype == torch.float16
    with engine.mode(engine):
        result = torch.ops.bitsandbytes.int8_mm_dequant(
            call["A"],
            call["row_stats"],
            call["col_stats"],
            torch.float16,
            bias if is_fused else None,
        )
        if bias is not None and not is_fused:
            result.add_(bias)
        return result.to(dtype)


# ---
# Paged optimizers: their states are in managed memory, which PyTorch's allocator does not hold.


class BitsAndBytes:
    """Takes over the calls of bitsandbytes' C library that allocate managed memory."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine

    def install(self, patches: PatchSet) -> None:
        """Patch its functions when they are imported, if they ever are."""
        patches.when_imported("bitsandbytes.functional", functools.partial(self._patch, patches))

    def _patch(self, patches: PatchSet, functional: ModuleType) -> None:
        if not hasattr(functional, "get_paged"):
            return

        def get_paged(*shape: int, dtype: torch.dtype = torch.float32, device: Any = None) -> Any:
            with no_dispatch():  # nobody writes to it: the pages cost no RAM
                found: Any = torch.empty(shape, dtype=dtype, device="cpu")
            found.is_paged, found.page_deviceid = True, getattr(device, "index", 0)
            self._engine.assume(
                "states of a paged optimizer are in managed memory, outside of PyTorch's: they "
                "stay on the GPU where there is room, which was assumed, else move over PCIe"
            )
            return found

        def ignored(*_: Any, **__: Any) -> None:
            """Neither filled nor moved: the kernels that use them fetch their pages."""

        patches.set(functional, "get_paged", get_paged)
        patches.set(functional, "prefetch_tensor", ignored)
        fill = functional.fill

        def filled(tensor: Any, value: Any, *args: Any, **kwargs: Any) -> Any:
            if getattr(tensor, "is_paged", False):
                return None
            return fill(tensor, value, *args, **kwargs)

        patches.set(functional, "fill", filled)


@launched_by("optimizer_update_32bit", "optimizer_update_8bit_blockwise")
def _optimizer(call: Arguments, result: Any, flops: int) -> list[Kernel]:
    """One kernel that reads gradient, parameter and states, and writes all but the gradient."""
    tensors = tensors_in(list(call.values()))
    paged = sum(each.nbytes for each in call.values() if getattr(each, "is_paged", False))
    moved = bytes_of(tensors) + paged
    written = moved - bytes_of([call["g"]])
    return [Kernel("pointwise", dtype_of(call["p"]), 0, moved, written, call["p"]._spec.numel)]
