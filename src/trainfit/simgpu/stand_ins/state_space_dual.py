"""Mamba 2's state space dual of ``mamba_ssm`` where that is not installed, and its modules' names.

What is allocated and saved is read from ``mamba_ssm/ops/triton/ssd_combined.py`` (2.3) and what it
calls; its kernels are matmuls over chunks of a sequence.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

import torch
from torch.nn import functional as F

from trainfit.simgpu.stand_ins.absent import AbsentPackage
from trainfit.simgpu.stand_ins.selective_scan import (
    Mamba,
    convolve,
    convolve_backward,
    launch,
    mamba_inner_fn,
    selective_scan_fn,
    selective_state_update,
)

_FLOAT: Final = torch.float32


def mamba_chunk_scan_combined(
    x: Any, dt: Any, A: Any, B: Any, C: Any, chunk_size: int, D: Any = None, z: Any = None,
    dt_bias: Any = None, initial_states: Any = None, seq_idx: Any = None, cu_seqlens: Any = None,
    dt_softplus: bool = False, dt_limit: Any = (0.0, float("inf")),
    return_final_states: bool = False, return_varlen_states: bool = False, state_dtype: Any = None,
) -> Any:  # fmt: skip
    """A chunked scan of ``x`` (batch, length, heads, size), ``dt`` (batch, length, heads), ``A``
    (heads), ``B`` and ``C`` (batch, length, groups, state)."""
    given = x, dt, A, B, C, D, z, dt_bias, initial_states
    out, final = _ChunkScan.apply(chunk_size, *given)  # type: ignore[no-untyped-call]
    return (out, final) if return_final_states else out


class _ChunkScan(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, chunk: int, x: Any, dt: Any, A: Any, B: Any, C: Any, D: Any, z: Any,
        dt_bias: Any, initial: Any,
    ) -> Any:  # fmt: skip
        B, C = (each if each.stride(-1) == 1 else each.contiguous() for each in (B, C))
        out, ungated, sums, final = _scan(x, dt, A, B, C, chunk, D, z, dt_bias)
        kept = out if z is None else ungated
        ctx.save_for_backward(kept, x, dt, sums, A, B, C, D, z, dt_bias, initial)
        ctx.chunk = chunk
        ctx.mark_non_differentiable(final)
        return out, final

    @staticmethod
    def backward(ctx: Any, gradient: Any, _: Any) -> Any:
        out, x, dt, _, A, B, C, D, z, dt_bias, initial = ctx.saved_tensors
        found = _scan_backward(gradient, x, dt, A, B, C, out, ctx.chunk, D, z, dt_bias)
        dx, ddt, dA, dB, dC, dD, dz, dbias = found
        start = None if initial is None else torch.empty_like(initial)
        return None, dx, ddt, dA, dB, dC, dD, dz, dbias, start


def _scan(
    x: Any, dt: Any, A: Any, B: Any, C: Any, chunk: int, D: Any, z: Any, dt_bias: Any
) -> tuple[Any, Any, Any, Any]:
    """``_mamba_chunk_scan_combined_fwd``: result, the same before the gate, sums of the decays,
    the last state."""
    sizes = _Sizes(x, B, chunk)
    sums, steps = _cumulative(dt, A, dt_bias, sizes)
    states = _states(B, x, steps, sums, sizes)
    states, final = _passed(states, sums, sizes, C.dtype)
    products = _within(C, B, sizes)
    out = torch.empty_like(x, memory_format=torch.contiguous_format)
    ungated = torch.empty_like(out) if z is not None else None
    reads = [products, x, steps, sums, C, states, D, z]
    _matmul("chunk_scan", reads, [out, ungated], sizes.scanned)
    return out, ungated, sums, final


def _scan_backward(
    gradient: Any, x: Any, dt: Any, A: Any, B: Any, C: Any, out: Any, chunk: int, D: Any, z: Any,
    dt_bias: Any,
) -> Any:  # fmt: skip
    """``_mamba_chunk_scan_combined_bwd``: what the forward pass made is made again."""
    sizes = _Sizes(x, B, chunk)
    dB, dC, ddt = torch.empty_like(B), torch.empty_like(C), torch.empty_like(dt)
    sums, steps = _cumulative(dt.clone(), A, dt_bias, sizes)
    products = _within(C, B, sizes)
    states, _ = _passed(_states(B, x, steps, sums, sizes), sums, sizes, _FLOAT)
    dz = None
    if z is not None:
        dz, turned = torch.empty_like(z), torch.empty_like(gradient)
        launch("mamba_ssm::chunk_scan_bwd_dz", "pointwise", [x, z, out, gradient, D], [dz, turned])
        gradient = turned
    dstates = torch.empty(sizes.states, device=x.device)
    _matmul("chunk_scan_bwd_dstates", [C, sums, gradient], [dstates], sizes.state)
    halved = torch.empty_like(dstates, dtype=x.dtype)
    states = torch.empty_like(states, dtype=x.dtype)
    reads = [states, sums, dstates]
    launch("mamba_ssm::state_passing_bwd", "pointwise", reads, [halved, states])
    dx = torch.empty_like(x)
    reads = [x, steps, sums, B, products, gradient, halved, D]
    _matmul("chunk_scan_chunk_state_bwd_dx", reads, [dx], sizes.scanned)
    halves = [torch.empty(B.shape, dtype=_FLOAT, device=x.device) for _ in range(2)]
    _matmul("chunk_state_bwd_db", [x, steps, sums, halved, B], halves[:1], sizes.state)
    _matmul("chunk_scan_bwd_dc", [states, sums, gradient, C], halves[1:], sizes.state)
    dproducts = torch.empty_like(products)
    _matmul("chunk_scan_bwd_dcb", [x, steps, sums, gradient], [dproducts], sizes.inner)
    _matmul("bmm_chunk_bwd", [C, dproducts, halves[0]], [dB], sizes.grouped)
    _matmul("bmm_chunk_bwd", [B, dproducts, halves[1]], [dC], sizes.grouped)
    decays = torch.empty_like(sums)
    reads = [x, steps, sums, gradient, products]
    _matmul("chunk_scan_bwd_ddacs", reads, [decays], sizes.inner)
    dA = torch.empty_like(A, dtype=_FLOAT)
    dbias = None if dt_bias is None else torch.empty_like(dt_bias)
    launch("mamba_ssm::chunk_cumsum_bwd", "pointwise", [decays, dt, A], [ddt, dA, dbias])
    return dx, ddt, dA, dB, dC, None if D is None else torch.empty_like(D), dz, dbias


class _Sizes:
    """Shapes of what a scan makes, and of its matmuls: rows, columns, depth, how many."""

    def __init__(self, x: Any, B: Any, chunk: int) -> None:
        batch, length, heads, size = x.shape
        groups, state = B.shape[2:]
        chunks = -(-length // chunk)
        self.decays = batch, heads, chunks, chunk
        self.states = batch, chunks, heads, size, state
        self.final = batch, heads, size, state
        self.products = (batch, chunks, groups, chunk, chunk)
        self.state = size, state, chunk, batch * chunks * heads
        self.grouped = chunk, state, chunk, batch * chunks * groups
        self.inner = chunk, chunk, size, batch * chunks * heads
        #: Both parts: of the chunk itself, and of the state before it.
        self.scanned = chunk, size, chunk + state, batch * chunks * heads


def _cumulative(dt: Any, A: Any, bias: Any, sizes: _Sizes) -> tuple[Any, Any]:
    made = [torch.empty(sizes.decays, dtype=_FLOAT, device=dt.device) for _ in range(2)]
    launch("mamba_ssm::chunk_cumsum", "pointwise", [dt, A, bias], made)
    return made[0], made[1]


def _states(B: Any, x: Any, steps: Any, sums: Any, sizes: _Sizes) -> Any:
    made = torch.empty(sizes.states, dtype=_FLOAT, device=x.device)
    _matmul("chunk_state", [B, x, steps, sums], [made], sizes.state)
    return made


def _passed(states: Any, sums: Any, sizes: _Sizes, dtype: torch.dtype) -> tuple[Any, Any]:
    made = torch.empty(sizes.states, dtype=dtype, device=states.device)
    final = torch.empty(sizes.final, dtype=_FLOAT, device=states.device)
    launch("mamba_ssm::state_passing", "pointwise", [states, sums], [made, final])
    return made, final


def _within(C: Any, B: Any, sizes: _Sizes) -> Any:
    made = torch.empty(sizes.products, dtype=_FLOAT, device=B.device)
    _matmul("bmm_chunk", [C, B], [made], sizes.grouped)
    return made


def _matmul(name: str, reads: Any, writes: Any, sizes: tuple[int, int, int, int]) -> None:
    rows, columns, depth, count = sizes
    flops = 2 * rows * columns * depth * count
    launch(f"mamba_ssm::{name}", "matmul", reads, writes, flops, sizes)


# --- All of a Mamba 2 block but its first projection ----------------------------------------------


def mamba_split_conv1d_scan_combined(
    zxbcdt: Any, conv1d_weight: Any, conv1d_bias: Any, dt_bias: Any, A: Any, D: Any,
    chunk_size: int, initial_states: Any = None, seq_idx: Any = None,
    dt_limit: Any = (0.0, float("inf")), return_final_states: bool = False,
    activation: str = "silu", rmsnorm_weight: Any = None, rmsnorm_eps: float = 1e-6,
    outproj_weight: Any = None, outproj_bias: Any = None, headdim: int | None = None,
    ngroups: int = 1, norm_before_gate: bool = True, state_dtype: Any = None,
) -> Any:  # fmt: skip
    """A Mamba-2 block of ``zxbcdt`` (batch, length, gate + inputs + B + C + heads)."""
    heads, size = (D.shape[0], headdim) if D.dim() == 1 else D.shape
    width = heads * size
    state = (conv1d_weight.shape[0] - width) // ngroups // 2
    if zxbcdt.shape[-1] != 2 * width + 2 * ngroups * state + heads:
        raise NotImplementedError("mamba_ssm's stand-in has no MLP next to the scan (d_ssm)")
    shape = (heads, size, ngroups, state, chunk_size)
    given = zxbcdt, conv1d_weight, conv1d_bias, dt_bias, A, D, rmsnorm_weight
    found = _Block.apply(shape, *given, outproj_weight, outproj_bias)  # type: ignore[no-untyped-call]
    return found if return_final_states else found[0]


class _Block(torch.autograd.Function):
    """Convolved inputs are computed once more in the backward pass."""

    @staticmethod
    def forward(
        ctx: Any, shape: Any, zxbcdt: Any, kernel: Any, kernel_bias: Any, dt_bias: Any, A: Any,
        D: Any, norm: Any, weight: Any, bias: Any,
    ) -> Any:  # fmt: skip
        ctx.shape = shape
        z, x, B, C, dt, _ = _parts_of(zxbcdt, kernel, kernel_bias, shape)
        gate = z if norm is None else None
        out, ungated, _, final = _scan(x, dt, A, B, C, shape[4], D, gate, dt_bias)
        kept, scale = (ungated, None) if norm is None else (out, None)
        out = out.flatten(2)
        if norm is not None:
            normed = torch.empty_like(out)
            scale = torch.empty(out.shape[0] * out.shape[1] * shape[2], device=out.device)
            launch("mamba_ssm::layer_norm", "pointwise", [out, z, norm], [normed, scale])
            out = normed
        if weight is not None and torch.is_autocast_enabled("cuda"):
            dtype = torch.get_autocast_dtype("cuda")
            out, weight = out.to(dtype), weight.to(dtype)
        result = out if weight is None else F.linear(out, weight, bias)
        ctx.save_for_backward(zxbcdt, kernel, kernel_bias, kept, A, D, dt_bias, norm, scale, weight,
                              bias)  # fmt: skip
        ctx.mark_non_differentiable(final)
        return result, final

    @staticmethod
    def backward(ctx: Any, gradient: Any, _: Any) -> Any:
        (zxbcdt, kernel, kernel_bias, kept, A, D, dt_bias, norm, scale, weight,
         bias) = ctx.saved_tensors  # fmt: skip
        z, x, B, C, dt, mixed = _parts_of(zxbcdt, kernel, kernel_bias, ctx.shape)
        again: Any = None if weight is None else torch.empty_like(kept).flatten(2)
        dall, dmixed = torch.empty_like(zxbcdt), torch.empty_like(mixed)
        given = gradient
        if weight is not None:
            gradient = F.linear(gradient, weight.t())
        gradient = gradient.unflatten(2, kept.shape[2:])
        dnorm = None if norm is None else torch.empty_like(norm)
        if norm is not None:
            turned = torch.empty_like(gradient)
            reads, writes = [gradient, kept, norm, scale, z], [turned, again, dnorm]
            launch("mamba_ssm::layer_norm_bwd", "pointwise", reads, writes)
            gradient = turned
        gate = z if norm is None else None
        found = _scan_backward(gradient, x, dt, A, B, C, kept, ctx.shape[4], D, gate, dt_bias)
        _, _, dA, _, _, dD, _, dbias = found
        dweight = dof_bias = None
        if weight is not None:
            dweight = given.flatten(0, 1).t() @ again.flatten(0, 1)
            dof_bias = None if bias is None else given.sum((0, 1))
        _, dkernel, dkernel_bias = convolve_backward(
            mixed.transpose(1, 2), kernel, kernel_bias, dmixed.transpose(1, 2),
            dall[..., : mixed.shape[2]].transpose(1, 2),
        )  # fmt: skip
        return (None, dall, dkernel, dkernel_bias, dbias, dA, dD, dnorm, dweight, dof_bias)


def _parts_of(zxbcdt: Any, kernel: Any, bias: Any, shape: Any) -> tuple[Any, ...]:
    """Gate, inputs, B, C, steps, and what is convolved."""
    heads, size, groups, state, _ = shape
    width = heads * size
    z, mixed, dt = zxbcdt.split([width, width + 2 * groups * state, heads], dim=-1)
    convolved = convolve(mixed.transpose(1, 2), kernel, bias).transpose(1, 2)
    x, B, C = convolved.split([width, groups * state, groups * state], dim=-1)
    groupwise = (groups, state)
    return (
        *(z.unflatten(2, (heads, size)), x.unflatten(2, (heads, size))),
        *(B.unflatten(2, groupwise), C.unflatten(2, groupwise), dt, mixed),
    )


class Mamba2(torch.nn.Module):
    """``mamba_ssm.Mamba2``: parameters of the same names and shapes, by its fast path."""

    def __init__(
        self,
        d_model: int,
        d_state: int = 128,
        d_conv: int = 4,
        expand: int = 2,
        headdim: int = 64,
        ngroups: int = 1,
        bias: bool = False,
        conv_bias: bool = True,
        chunk_size: int = 256,
        layer_idx: int | None = None,
        device: Any = None,
        dtype: Any = None,
        **_: Any,
    ) -> None:
        super().__init__()
        made: dict[str, Any] = {"device": device, "dtype": dtype}
        inner = expand * d_model
        heads, mixed = inner // headdim, inner + 2 * ngroups * d_state
        self.headdim, self.ngroups, self.chunk_size = headdim, ngroups, chunk_size
        self.layer_idx = layer_idx
        self.in_proj = torch.nn.Linear(d_model, inner + mixed + heads, bias=bias, **made)
        self.conv1d = torch.nn.Conv1d(
            mixed, mixed, d_conv, groups=mixed, padding=d_conv - 1, bias=conv_bias, **made
        )
        self.dt_bias = torch.nn.Parameter(torch.rand(heads, **made))
        self.A_log = torch.nn.Parameter(torch.zeros(heads, **made))
        self.D = torch.nn.Parameter(torch.ones(heads, device=device))
        self.norm = torch.nn.RMSNorm(inner, eps=1e-5, **made)
        self.out_proj = torch.nn.Linear(inner, d_model, bias=bias, **made)

    def forward(self, u: Any, **_: Any) -> Any:
        """The layer's output for ``u`` of shape (batch, length, width)."""
        return mamba_split_conv1d_scan_combined(
            self.in_proj(u), self.conv1d.weight.squeeze(1), self.conv1d.bias, self.dt_bias,
            -torch.exp(self.A_log.float()), self.D, self.chunk_size,
            rmsnorm_weight=self.norm.weight, outproj_weight=self.out_proj.weight,
            outproj_bias=self.out_proj.bias, headdim=self.headdim, ngroups=self.ngroups,
        )  # fmt: skip


def _parts() -> Mapping[str, Mapping[str, Any]]:
    scan = {"selective_scan_fn": selective_scan_fn, "mamba_inner_fn": mamba_inner_fn}
    dual = {
        "mamba_chunk_scan_combined": mamba_chunk_scan_combined,
        "mamba_split_conv1d_scan_combined": mamba_split_conv1d_scan_combined,
    }
    return {
        "mamba_ssm": {**scan, "Mamba": Mamba, "Mamba2": Mamba2},
        "mamba_ssm.modules": {},
        "mamba_ssm.modules.mamba_simple": {"Mamba": Mamba},
        "mamba_ssm.modules.mamba2": {"Mamba2": Mamba2},
        "mamba_ssm.ops": {},
        "mamba_ssm.ops.selective_scan_interface": scan,
        "mamba_ssm.ops.triton": {},
        "mamba_ssm.ops.triton.selective_state_update": {
            "selective_state_update": selective_state_update
        },
        "mamba_ssm.ops.triton.ssd_combined": dual,
    }


MAMBA_SSM: Final = AbsentPackage("mamba-ssm", "2.3.2", _parts)
