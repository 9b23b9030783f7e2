"""``causal_conv1d`` and the selective scan of ``mamba_ssm`` (Mamba 1) where they are not installed.

What their autograd functions save and allocate is read from ``causal_conv1d_interface.py`` (1.6),
``mamba_ssm/ops/selective_scan_interface.py`` and ``csrc/selective_scan/selective_scan.cpp`` (2.3).
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, Final

import torch
from torch.nn import functional as F

from trainfit.results.gpus import Kernel
from trainfit.simgpu.device.values import tensors_in
from trainfit.simgpu.operators.kernel_rules import RULES, Arguments, bytes_of, dtype_of
from trainfit.simgpu.stand_ins.absent import AbsentPackage

# ---
# Launches of kernels that a stand-in's package has: each is an operator of the package's name.


_SCHEMA: Final = (
    "(str kind, Tensor[] reads, Tensor(a!)[] writes, int flops, int rows, int columns, int depth, "
    "int batches) -> ()"
)
#: Of packages whose kernels were launched: PyTorch keeps an operator as long as its library.
_LIBRARIES: Final[dict[str, torch.library.Library]] = {}


def launch(
    name: str,
    kind: str,
    reads: Sequence[Any],
    writes: Sequence[Any],
    flops: int = 0,
    sizes: tuple[int, int, int, int] = (0, 0, 0, 1),
) -> None:
    """Launch the kernel ``name`` ("package::kernel"), which reads and writes tensors (``None``
    among them stands for none); ``sizes`` of a matmul are rows, columns, depth and batches."""
    read, written = ([each for each in some if each is not None] for some in (reads, writes))
    _operator(name)(kind, read, written, flops, *sizes)


def _operator(name: str) -> Any:
    package, _, kernel = name.partition("::")
    library = _LIBRARIES.get(package)
    if library is None:
        library = _LIBRARIES[package] = torch.library.Library(package, "FRAGMENT")
    if kernel not in RULES:
        library.define(f"{kernel}{_SCHEMA}")
        library.impl(kernel, lambda *_: None, "Meta")
        RULES[kernel] = _launched
    return getattr(getattr(torch.ops, package), kernel)


def _launched(call: Arguments, result: Any, flops: int) -> list[Kernel]:
    read, written = tensors_in(list(call["reads"])), tensors_in(list(call["writes"]))
    sizes = (call[name] for name in ("rows", "columns", "depth", "batches"))
    dtype = dtype_of((read or written)[0])
    return [Kernel(call["kind"], dtype, call["flops"], bytes_of(read), bytes_of(written), *sizes)]


#: Positions of a chunk, of which each leaves its state for the backward pass.
_CHUNK: Final = 2048
#: FLOPs of the scan for each element of the state at each position (Mamba's paper, appendix).
_SCAN_FLOPS: Final = 9
_SILU: Final = ("silu", "swish")


# --- causal_conv1d --------------------------------------------------------------------------------


def causal_conv1d_fn(
    x: Any,
    weight: Any,
    bias: Any = None,
    seq_idx: Any = None,
    initial_states: Any = None,
    return_final_states: bool = False,
    final_states_out: Any = None,
    activation: str | None = None,
) -> Any:
    """Causal convolution of ``x`` (batch, channels, length) with ``weight`` (channels, width)."""
    if activation not in (None, *_SILU):
        raise NotImplementedError("activation must be None, silu, or swish")
    out = _CausalConvolution.apply(x, weight, bias, initial_states)  # type: ignore[no-untyped-call]
    if not return_final_states:
        return out
    if final_states_out is None:
        batch, channels, _ = x.shape
        shape = batch, weight.shape[1] - 1, channels
        final_states_out = torch.empty(shape, device=x.device, dtype=x.dtype).transpose(1, 2)
    return out, final_states_out


def causal_conv1d_update(
    x: Any,
    conv_state: Any,
    weight: Any,
    bias: Any = None,
    activation: Any = None,
    *_: Any,
    **__: Any,
) -> Any:
    """One more position: ``conv_state`` (batch, channels, width) moves on."""
    out = torch.empty_like(x)
    launch("causal_conv1d::update", "pointwise", [x, conv_state, weight, bias], [conv_state, out])
    return out


class _CausalConvolution(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Any, weight: Any, bias: Any, initial_states: Any) -> Any:
        if x.stride(2) != 1 and x.stride(1) != 1:
            x = x.contiguous()
        ctx.save_for_backward(x, weight, bias, initial_states)
        return convolve(x, weight, bias)

    @staticmethod
    def backward(ctx: Any, gradient: Any) -> Any:
        x, weight, bias, initial_states = ctx.saved_tensors
        if gradient.stride(2) != 1 and gradient.stride(1) != 1:
            gradient = gradient.contiguous()
        dx, dweight, dbias = convolve_backward(x, weight, bias, gradient)
        states = None if initial_states is None else torch.empty_like(initial_states)
        return dx, dweight, dbias, states


def convolve(x: Any, weight: Any, bias: Any) -> Any:
    """``causal_conv1d_fwd_function``: a result as ``x``."""
    out = torch.empty_like(x)
    flops = 2 * x.numel() * weight.shape[1]
    launch("causal_conv1d::forward", "pointwise", [x, weight, bias], [out], flops)
    return out


def convolve_backward(x: Any, weight: Any, bias: Any, gradient: Any, dx: Any = None) -> Any:
    """``causal_conv1d_bwd_function``: weights' gradients are summed in float32 first."""
    dx = torch.empty_like(x) if dx is None else dx
    sums = torch.zeros(weight.shape, dtype=torch.float32, device=x.device)
    of_bias = None if bias is None else torch.zeros(bias.shape, device=x.device)
    flops = 4 * x.numel() * weight.shape[1]
    reads, writes = [x, weight, bias, gradient], [dx, sums, of_bias]
    launch("causal_conv1d::backward", "pointwise", reads, writes, flops)
    return dx, sums.to(weight.dtype), None if of_bias is None else of_bias.to(bias.dtype)


# --- The scan -------------------------------------------------------------------------------------


def selective_scan_fn(
    u: Any,
    delta: Any,
    A: Any,
    B: Any,
    C: Any,
    D: Any = None,
    z: Any = None,
    delta_bias: Any = None,
    delta_softplus: bool = False,
    return_last_state: bool = False,
) -> Any:
    """A selective scan of ``u`` (batch, channels, length), ``A`` (channels, state), ``B`` and ``C``
    (batch, state, length) or with groups."""
    scanned = _SelectiveScan.apply(u, delta, A, B, C, D, z, delta_bias)  # type: ignore[no-untyped-call]
    if not return_last_state:
        return scanned
    last = torch.empty(u.shape[0], *A.shape, dtype=torch.float32, device=u.device)
    return scanned, last


class _SelectiveScan(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, u: Any, delta: Any, A: Any, B: Any, C: Any, D: Any, z: Any, delta_bias: Any
    ) -> Any:
        u, delta, B, C, z = map(_dense, (u, delta, B, C, z))
        out, states, gated = scan(u, delta, A, B, C, D, z, delta_bias)
        ctx.gates = z is not None
        saved = (z, delta_bias, states, out) if ctx.gates else (delta_bias, states)
        ctx.save_for_backward(u, delta, A, B, C, D, *saved)
        return gated if ctx.gates else out

    @staticmethod
    def backward(ctx: Any, gradient: Any) -> Any:
        u, delta, A, B, C, D, *saved = ctx.saved_tensors
        z, (delta_bias, states, *_) = (saved[0], saved[1:]) if ctx.gates else (None, saved)
        found = scan_backward(u, delta, A, B, C, D, z, delta_bias, _dense(gradient), states)
        return found[:8]


def _dense(tensor: Any) -> Any:
    return tensor if tensor is None or tensor.stride(-1) == 1 else tensor.contiguous()


def scan(
    u: Any, delta: Any, A: Any, B: Any, C: Any, D: Any, z: Any, delta_bias: Any
) -> tuple[Any, Any, Any]:
    """``selective_scan_cuda.fwd``: result, states of the chunks, result times the gate."""
    batch, channels, length = u.shape
    out = torch.empty_like(delta)
    shape = batch, channels, -(-length // _CHUNK), 2 * A.shape[1]
    states = torch.empty(shape, dtype=A.dtype, device=u.device)
    gated = None if z is None else torch.empty_like(z)
    reads = [u, delta, A, B, C, D, z, delta_bias]
    flops = _SCAN_FLOPS * u.numel() * A.shape[1]
    launch("mamba_ssm::selective_scan", "unknown", reads, [out, states, gated], flops)
    return out, states, gated


def scan_backward(
    u: Any, delta: Any, A: Any, B: Any, C: Any, D: Any, z: Any, delta_bias: Any, gradient: Any,
    states: Any, dz: Any = None, again: bool = False,
) -> Any:  # fmt: skip
    """``selective_scan_cuda.bwd``: gradients of the eight, and with ``again`` the result times the
    gate once more. Those of ``B`` and ``C`` are summed in float32."""
    made: list[Any] = [torch.empty_like(u), torch.empty_like(delta), torch.zeros_like(A)]
    sums = [torch.zeros(each.shape, dtype=torch.float32, device=u.device) for each in (B, C)]
    of_d = None if D is None else torch.zeros_like(D)
    of_bias = None if delta_bias is None else torch.zeros_like(delta_bias)
    if z is not None and dz is None:
        dz = torch.empty_like(z)
    gated = torch.empty_like(delta) if again else None
    reads = [u, delta, A, B, C, D, z, delta_bias, gradient, states]
    writes = [*made, *sums, of_d, dz, of_bias, gated]
    flops = 3 * _SCAN_FLOPS * u.numel() * A.shape[1]
    launch("mamba_ssm::selective_scan_backward", "unknown", reads, writes, flops)
    return (*made, *(s.to(each.dtype) for s, each in zip(sums, (B, C), strict=True)), of_d, dz,
            of_bias, gated)  # fmt: skip


def selective_state_update(
    state: Any, x: Any, dt: Any, A: Any, B: Any, C: Any, D: Any = None, z: Any = None,
    dt_bias: Any = None, dt_softplus: bool = False, state_batch_indices: Any = None, **_: Any,
) -> Any:  # fmt: skip
    """One more position: ``state`` (batch, channels, state) moves on."""
    out = torch.empty_like(x)
    reads = [state, x, dt, A, B, C, D, z, dt_bias]
    launch("mamba_ssm::selective_state_update", "pointwise", reads, [state, out])
    return out


# --- All of a Mamba block but its first projection ------------------------------------------------


def mamba_inner_fn(
    xz: Any, conv1d_weight: Any, conv1d_bias: Any, x_proj_weight: Any, delta_proj_weight: Any,
    out_proj_weight: Any, out_proj_bias: Any, A: Any, B: Any = None, C: Any = None, D: Any = None,
    delta_bias: Any = None, B_proj_bias: Any = None, C_proj_bias: Any = None,
    delta_softplus: bool = True, checkpoint_lvl: int = 1, *_: Any, **__: Any,
) -> Any:  # fmt: skip
    """A Mamba block of ``xz`` (batch, 2 · channels, length), ``B`` and ``C`` of the input: (batch,
    length, width)."""
    if B is not None or C is not None:
        raise NotImplementedError("mamba_inner_fn's stand-in computes B and C from the input alone")
    given = xz, conv1d_weight, conv1d_bias, x_proj_weight, delta_proj_weight, out_proj_weight
    return _Inner.apply(*given, out_proj_bias, A, D, delta_bias)  # type: ignore[no-untyped-call]


class _Inner(torch.autograd.Function):
    """Convolved inputs and step sizes are computed once more in the backward pass."""

    @staticmethod
    def forward(
        ctx: Any, xz: Any, kernel: Any, kernel_bias: Any, of_x: Any, of_delta: Any, of_out: Any,
        out_bias: Any, A: Any, D: Any, delta_bias: Any,
    ) -> Any:  # fmt: skip
        ctx.dtypes = [each.dtype for each in (of_x, of_delta, of_out)]
        if torch.is_autocast_enabled("cuda"):
            dtype = torch.get_autocast_dtype("cuda")
            of_x, of_delta, of_out = (each.to(dtype) for each in (of_x, of_delta, of_out))
        xz = _dense(xz)
        x, z = xz.chunk(2, dim=1)
        kernel = kernel.squeeze(1)
        convolved, projected, delta = _inputs(x, kernel, kernel_bias, of_x, of_delta, None)
        rank, width, (batch, _, length) = of_delta.shape[1], A.shape[1], x.shape
        B, C = (
            projected[:, start : start + width].unflatten(0, (batch, length)).transpose(1, 2)
            .unsqueeze(1).contiguous()
            for start in (rank, rank + width)
        )  # fmt: skip
        out, states, gated = scan(convolved, delta, A, B, C, D, z, delta_bias)
        ctx.save_for_backward(xz, kernel, kernel_bias, projected, of_x, of_delta, of_out, A, B, C,
                              D, delta_bias, states, out, out_bias)  # fmt: skip
        return F.linear(gated.transpose(1, 2), of_out, out_bias)

    @staticmethod
    def backward(ctx: Any, gradient: Any) -> Any:
        (xz, kernel, kernel_bias, projected, of_x, of_delta, of_out, A, B, C, D, delta_bias, states,
         _, out_bias) = ctx.saved_tensors  # fmt: skip
        x, z = xz.chunk(2, dim=1)
        batch, _, length = x.shape
        rank, width = of_delta.shape[1], A.shape[1]
        convolved, _, delta = _inputs(x, kernel, kernel_bias, of_x, of_delta, projected)
        dxz = torch.empty_like(xz)
        dx, dz = dxz.chunk(2, dim=1)
        flat = gradient.flatten(0, 1)
        back = (of_out.t() @ flat.t()).unflatten(1, (batch, length)).transpose(0, 1)
        dconvolved, ddelta, dA, dB, dC, dD, dz, dbias, gated = scan_backward(
            convolved, delta, A, B, C, D, z, delta_bias, back, states, dz, True
        )
        dof_out = flat.t() @ gated.transpose(1, 2).flatten(0, 1)
        dprojected = torch.empty_like(projected)
        for start, each in ((rank, dB), (rank + width, dC)):
            dprojected[:, start : start + width] = each.squeeze(1).transpose(1, 2).flatten(0, 1)
        ddelta = ddelta.transpose(0, 1).flatten(1)
        dof_delta = ddelta @ projected[:, :rank]
        dprojected[:, :rank] = ddelta.t() @ of_delta
        dof_x = dprojected.t() @ convolved.transpose(1, 2).flatten(0, 1)
        total = dconvolved.transpose(0, 1).flatten(1)
        total = torch.addmm(total, of_x.t(), dprojected.t())
        total = total.unflatten(1, (batch, length)).transpose(0, 1)
        _, dkernel, dkernel_bias = convolve_backward(x, kernel, kernel_bias, total, dx)
        weights = [each.to(dtype) for each, dtype in zip((dof_x, dof_delta, dof_out), ctx.dtypes,
                                                         strict=True)]  # fmt: skip
        of_bias = None if out_bias is None else flat.sum(0)
        return (dxz, dkernel.unsqueeze(1), dkernel_bias, *weights, of_bias, dA, dD, dbias)


def _inputs(
    x: Any, kernel: Any, bias: Any, of_x: Any, of_delta: Any, projected: Any
) -> tuple[Any, Any, Any]:
    """The convolved input, what is projected from it (rows of it), and the step sizes."""
    batch, _, length = x.shape
    convolved = convolve(x, kernel, bias)
    if projected is None:
        projected = F.linear(convolved.transpose(1, 2).flatten(0, 1), of_x)
    delta = of_delta @ projected[:, : of_delta.shape[1]].t()
    return convolved, projected, delta.unflatten(1, (batch, length)).transpose(0, 1)


class Mamba(torch.nn.Module):
    """``mamba_ssm.Mamba``: parameters of the same names and shapes, by its fast path."""

    def __init__(
        self,
        d_model: int,
        d_state: int = 16,
        d_conv: int = 4,
        expand: int = 2,
        dt_rank: Any = "auto",
        conv_bias: bool = True,
        bias: bool = False,
        layer_idx: int | None = None,
        device: Any = None,
        dtype: Any = None,
        **_: Any,
    ) -> None:
        super().__init__()
        made: dict[str, Any] = {"device": device, "dtype": dtype}
        inner = int(expand * d_model)
        rank = math.ceil(d_model / 16) if dt_rank == "auto" else dt_rank
        self.layer_idx = layer_idx
        self.in_proj = torch.nn.Linear(d_model, inner * 2, bias=bias, **made)
        self.conv1d = torch.nn.Conv1d(
            inner, inner, d_conv, groups=inner, padding=d_conv - 1, bias=conv_bias, **made
        )
        self.x_proj = torch.nn.Linear(inner, rank + d_state * 2, bias=False, **made)
        self.dt_proj = torch.nn.Linear(rank, inner, bias=True, **made)
        states = torch.arange(1, d_state + 1, dtype=torch.float32, device=device)
        self.A_log = torch.nn.Parameter(torch.log(states.repeat(inner, 1)))
        self.D = torch.nn.Parameter(torch.ones(inner, device=device))
        self.out_proj = torch.nn.Linear(inner, d_model, bias=bias, **made)

    def forward(self, hidden_states: Any, inference_params: Any = None) -> Any:
        """The layer's output for ``hidden_states`` of shape (batch, length, width)."""
        if inference_params is not None:
            raise NotImplementedError("Mamba's stand-in has no states of an inference")
        batch, length, _ = hidden_states.shape
        xz = self.in_proj.weight @ hidden_states.flatten(0, 1).t()
        xz = xz.unflatten(1, (batch, length)).transpose(0, 1)
        if self.in_proj.bias is not None:
            xz = xz + self.in_proj.bias.to(xz.dtype)[:, None]
        return mamba_inner_fn(
            xz, self.conv1d.weight, self.conv1d.bias, self.x_proj.weight, self.dt_proj.weight,
            self.out_proj.weight, self.out_proj.bias, -torch.exp(self.A_log.float()), None, None,
            self.D.float(), delta_bias=self.dt_proj.bias.float(),
        )  # fmt: skip


def _convolution_parts() -> Mapping[str, Mapping[str, Any]]:
    names = {"causal_conv1d_fn": causal_conv1d_fn, "causal_conv1d_update": causal_conv1d_update}
    return {"causal_conv1d": names, "causal_conv1d.causal_conv1d_interface": names}


CAUSAL_CONV1D: Final = AbsentPackage("causal-conv1d", "1.6.1", _convolution_parts)
