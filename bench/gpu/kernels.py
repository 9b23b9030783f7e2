"""What single kernels allocate in addition to their results: one row per call, all in kernels.json.

Each row is one operator on fresh operands, called twice: the first call may also take what a
library keeps (cuBLAS's workspace) or tries out (``cudnn.benchmark``), the second is a step's.
Of each call the blocks that the allocator was asked for, in order, as [bytes, kept]: a block
that is given back before the operator ends is a workspace or a temporary.
"""

from __future__ import annotations

import dataclasses
import itertools
import time
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn
from torch.nn import functional

from gpu import machine
from gpu.measure import read_history, start_history

aten = torch.ops.aten

Call = Callable[[], Any]

_DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


@dataclasses.dataclass(frozen=True)
class Row:
    """One measurement to make: ``make()`` prepares operands and gives the call."""

    name: str
    arguments: dict[str, Any]
    make: Callable[[], Call]


class Family:
    """The rows of one family, measured in one process."""

    def __init__(self, name: str, limit_s: float, quick: bool = False) -> None:
        """``limit_s``: seconds after which the remaining rows are left out."""
        self.name = name
        self._limit_s = limit_s
        self._quick = quick

    def measure(self, simulated: bool, save: Callable[[dict[str, Any]], None]) -> dict[str, Any]:
        """``save`` gets what there is, now and then."""
        torch.cuda.init()
        started = time.monotonic()
        rows = list(FAMILIES[self.name]())
        wanted = rows[:: max(len(rows) // 4, 1)] if self._quick else spread(rows)
        result = {
            "status": "ran",
            "simulated": simulated,
            "family": self.name,
            "machine": machine.describe(simulated),
            "rows": [],
            "left_out": len(wanted),
            "recorded_at": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        }
        measured: list[dict[str, Any]] = result["rows"]
        for row in wanted:
            if time.monotonic() - started > self._limit_s:
                break
            measured.append({"name": row.name, "arguments": row.arguments, **measure_row(row)})
            result["left_out"] = len(wanted) - len(measured)
            if len(measured) % SAVE_EVERY == 0:
                save(result)
        torch.cuda.memory._record_memory_history(None)
        return result


#: Blocks of a call that are kept; no kernel takes so many, a chain of operators may.
MOST_BLOCKS = 64

#: Rows after which what was measured is written down.
SAVE_EVERY = 40


def spread(rows: list[Row], stride: int = 11) -> list[Row]:
    """The rows in an order in which the first ones are of all kinds."""
    return [rows[i] for start in range(stride) for i in range(start, len(rows), stride)]


def measure_row(row: Row) -> dict[str, Any]:
    """Two calls of a row; what cannot run says why."""
    calls: list[dict[str, Any]] = []
    try:
        call = row.make()
        for _ in range(2):
            calls.append(measure_call(call))
        return {"calls": calls, "error": None}
    except Exception as error:
        return {"calls": calls, "error": f"{type(error).__name__}: {error}"[:300]}
    finally:
        call = None  # type: ignore[assignment]
        torch.cuda.empty_cache()


def measure_call(call: Call) -> dict[str, Any]:
    """The blocks that one call asks for, and the peak beyond what was allocated before."""
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    torch.cuda.memory._record_memory_history(None)
    start_history()
    result = call()
    torch.cuda.synchronize()
    after, peak = torch.cuda.memory_allocated(), torch.cuda.max_memory_allocated()
    traces = read_history()["device_traces"]
    del result
    found = blocks(traces[0] if traces else [])
    return {
        "blocks": found[:MOST_BLOCKS],
        "block_count": len(found),
        "kept_bytes": after - before,
        "peak_bytes": peak - before,
    }


def blocks(trace: list[dict[str, Any]]) -> list[list[Any]]:
    """[bytes asked for, kept] of every allocation of a trace, in order."""
    found: list[list[Any]] = []
    alive: dict[int, int] = {}
    for entry in trace:
        if entry["action"] == "alloc":
            alive[entry["addr"]] = len(found)
            found.append([int(entry["size"]), True])
        elif entry["action"] == "free_requested":
            place = alive.pop(entry["addr"], None)
            if place is not None:
                found[place][1] = False
    return found


# -- convolutions ----------------------------------------------------------------------------------

#: batch, inputs, outputs, side, kernel, stride, groups
_SHAPES: tuple[tuple[int, int, int, int, int, int, int], ...] = (
    (32, 3, 64, 224, 3, 1, 1), (32, 3, 64, 224, 7, 2, 1), (32, 64, 64, 224, 3, 1, 1),
    (32, 64, 64, 56, 1, 1, 1), (32, 64, 64, 56, 3, 1, 1), (32, 64, 256, 56, 1, 1, 1),
    (32, 256, 64, 56, 1, 1, 1), (32, 128, 128, 56, 3, 2, 1), (32, 128, 128, 28, 3, 1, 1),
    (32, 256, 512, 56, 1, 2, 1), (32, 256, 256, 14, 3, 1, 1), (32, 512, 512, 7, 3, 1, 1),
    (32, 512, 2048, 7, 1, 1, 1), (8, 64, 64, 112, 3, 1, 1), (128, 64, 64, 56, 3, 1, 1),
    (128, 256, 256, 14, 3, 1, 1), (1, 64, 64, 56, 3, 1, 1), (8, 512, 512, 28, 3, 1, 1),
    (32, 128, 128, 28, 3, 1, 32), (32, 96, 96, 56, 7, 1, 96), (32, 144, 144, 56, 3, 2, 144),
    (32, 64, 64, 28, 5, 1, 1), (32, 3, 768, 224, 16, 16, 1), (17, 48, 80, 31, 3, 1, 1),
    (64, 128, 128, 56, 3, 1, 1),
)  # fmt: skip

#: precision, tf32, channels_last
_WAYS = (
    ("fp32", True, False), ("fp32", False, False), ("bf16", True, False), ("fp16", True, False),
    ("bf16", True, True), ("fp32", True, True),
)  # fmt: skip


def convolutions(benchmark: bool) -> Callable[[], Iterator[Row]]:
    """Forward, data gradient and weight gradient apart, over shapes, precisions, layouts."""

    def rows() -> Iterator[Row]:
        # Trying algorithms out takes long: half of the shapes, and only the usual ways.
        shapes = _SHAPES[::2] if benchmark else _SHAPES
        ways = (_WAYS[0], _WAYS[2], _WAYS[4]) if benchmark else _WAYS
        for shape, way in itertools.product(shapes, ways):
            for part in ("forward", "data", "weight"):
                yield convolution_row(shape, way, part, benchmark)

    return rows


def convolution_row(
    shape: tuple[int, ...], way: tuple[str, bool, bool], part: str, benchmark: bool
) -> Row:
    names = ("batch", "inputs", "outputs", "side", "kernel", "stride", "groups")
    precision, tf32, channels_last = way
    arguments = {
        **dict(zip(names, shape, strict=True)),
        "precision": precision,
        "tf32": tf32,
        "channels_last": channels_last,
        "benchmark": benchmark,
        "part": part,
    }
    words = [*(f"{name}={value}" for name, value in arguments.items())]
    return Row("convolution " + " ".join(words), arguments, lambda: _convolution(arguments))


def _convolution(a: dict[str, Any]) -> Call:
    torch.backends.cudnn.benchmark = a["benchmark"]
    torch.backends.cudnn.allow_tf32 = a["tf32"]
    layout = torch.channels_last if a["channels_last"] else torch.contiguous_format
    options: dict[str, Any] = {"dtype": _DTYPES[a["precision"]], "device": "cuda"}
    padding = a["kernel"] // 2 if a["kernel"] < 16 else 0
    x = torch.zeros(a["batch"], a["inputs"], a["side"], a["side"], **options)
    w = torch.zeros(a["outputs"], a["inputs"] // a["groups"], a["kernel"], a["kernel"], **options)
    x, w = x.contiguous(memory_format=layout), w.contiguous(memory_format=layout)
    stride = [a["stride"]] * 2
    tail = (stride, [padding] * 2, [1, 1], False, [0, 0], a["groups"])
    if a["part"] == "forward":
        return lambda: aten.convolution(x, w, None, *tail)
    side = (a["side"] + 2 * padding - a["kernel"]) // a["stride"] + 1
    grad = torch.zeros(a["batch"], a["outputs"], side, side, **options)
    grad = grad.contiguous(memory_format=layout)
    mask = [a["part"] == "data", a["part"] == "weight", False]
    return lambda: aten.convolution_backward(grad, x, w, None, *tail, mask)


# -- the others ------------------------------------------------------------------------------------


def _row(operator: str, make: Callable[..., Call], /, **arguments: Any) -> Row:
    words = [operator, *(f"{key}={value}" for key, value in arguments.items())]
    return Row(" ".join(words), arguments, lambda: make(**arguments))


def _random(*shape: int, precision: str = "fp32", grad: bool = False) -> torch.Tensor:
    return torch.zeros(*shape, dtype=_DTYPES[precision], device="cuda", requires_grad=grad)


def products() -> Iterator[Row]:
    """cuBLAS and cuBLASLt: linear layers with and without bias, batched products."""
    for precision in _DTYPES:
        for rows, inputs, outputs in ((64, 512, 512), (4096, 768, 3072), (8192, 4096, 4096)):
            size = {"rows": rows, "inputs": inputs, "outputs": outputs, "precision": precision}
            for bias in (False, True):
                yield _row("linear", _linear, **size, bias=bias)
            yield _row("linear backward", _linear_backward, **size)
        for batch, rows in ((96, 197), (32, 1024)):
            yield _row("bmm", _bmm, batch=batch, rows=rows, inner=64, precision=precision)


def _linear(rows: int, inputs: int, outputs: int, precision: str, bias: bool) -> Call:
    x, w = _random(rows, inputs, precision=precision), _random(outputs, inputs, precision=precision)
    b = _random(outputs, precision=precision) if bias else None
    return lambda: functional.linear(x, w, b)


def _linear_backward(rows: int, inputs: int, outputs: int, precision: str) -> Call:
    x = _random(rows, inputs, precision=precision, grad=True)
    w = _random(outputs, inputs, precision=precision, grad=True)
    b = _random(outputs, precision=precision, grad=True)
    return backward_of(lambda: functional.linear(x, w, b), (x, w, b))


def _bmm(batch: int, rows: int, inner: int, precision: str) -> Call:
    x = _random(batch, rows, inner, precision=precision)
    y = _random(batch, inner, rows, precision=precision)
    return lambda: torch.bmm(x, y)


def backward_of(forward: Call, inputs: tuple[torch.Tensor, ...]) -> Call:
    """The backward pass alone, of a graph that is kept."""
    out = forward()
    out = out[0] if isinstance(out, tuple) else out
    grad = torch.zeros_like(out)
    return lambda: torch.autograd.grad(out, inputs, grad, retain_graph=True, allow_unused=True)


def attention() -> Iterator[Row]:
    """Every backend of scaled_dot_product_attention that takes the operands."""
    backends = ("FLASH_ATTENTION", "EFFICIENT_ATTENTION", "CUDNN_ATTENTION", "MATH")
    shapes = ((8, 12, 197, 64), (4, 12, 1024, 64), (2, 16, 512, 96), (2, 8, 842, 128))
    for backend, shape, precision in itertools.product(backends, shapes, _DTYPES):
        if precision == "fp32" and backend in ("FLASH_ATTENTION", "CUDNN_ATTENTION"):
            continue
        for causal, dropout in ((False, 0.0), (True, 0.1)):
            for part in ("forward", "backward"):
                yield _row(
                    "attention", _attention, backend=backend, shape=list(shape),
                    precision=precision, causal=causal, dropout=dropout, part=part,
                )  # fmt: skip


def _attention(
    backend: str, shape: list[int], precision: str, causal: bool, dropout: float, part: str
) -> Call:
    from torch.nn.attention import SDPBackend, sdpa_kernel

    chosen = getattr(SDPBackend, backend)
    inputs = tuple(_random(*shape, precision=precision, grad=True) for _ in range(3))

    def forward() -> torch.Tensor:
        with sdpa_kernel([chosen]):
            return functional.scaled_dot_product_attention(
                *inputs, dropout_p=dropout, is_causal=causal
            )

    return forward if part == "forward" else backward_of(forward, inputs)


def recurrent() -> Iterator[Row]:
    """cuDNN's LSTM and GRU, training and evaluation, forward and backward."""
    for cell, precision in itertools.product(("LSTM", "GRU"), _DTYPES):
        for layers, both, dropout in ((1, False, 0.0), (2, True, 0.2)):
            for batch, length, width in ((32, 128, 512), (64, 50, 256)):
                for part in ("forward", "backward", "evaluation"):
                    yield _row(
                        "recurrent", _recurrent, cell=cell, precision=precision, layers=layers,
                        both=both, dropout=dropout, batch=batch, length=length, width=width,
                        part=part,
                    )  # fmt: skip


def _recurrent(
    cell: str, precision: str, layers: int, both: bool, dropout: float, batch: int, length: int,
    width: int, part: str,
) -> Call:  # fmt: skip
    dtype = _DTYPES[precision]
    layer = getattr(nn, cell)(
        width, width, num_layers=layers, bidirectional=both, dropout=dropout
    ).to("cuda", dtype)
    x = _random(length, batch, width, precision=precision, grad=True)
    if part == "evaluation":
        layer.eval()

        def evaluate() -> Any:
            with torch.no_grad():
                return layer(x)

        return evaluate
    inputs = (x, *layer.parameters())
    return (lambda: layer(x)) if part == "forward" else backward_of(lambda: layer(x), inputs)


def norms() -> Iterator[Row]:
    """Batch norm (cuDNN's reserve), layer norm and group norm."""
    layers = ("BatchNorm2d", "GroupNorm", "LayerNorm")
    for layer, precision, channels_last in itertools.product(layers, ("fp32", "bf16"), (0, 1)):
        for shape in ((32, 64, 112, 112), (32, 256, 14, 14)):
            for part in ("forward", "backward", "evaluation"):
                yield _row(
                    "norm", _norm, layer=layer, precision=precision, shape=list(shape),
                    channels_last=bool(channels_last), part=part,
                )  # fmt: skip


def _norm(layer: str, precision: str, shape: list[int], channels_last: bool, part: str) -> Call:
    made: nn.Module
    if layer == "BatchNorm2d":
        made = nn.BatchNorm2d(shape[1])
    elif layer == "GroupNorm":
        made = nn.GroupNorm(8, shape[1])
    else:
        made = nn.LayerNorm(shape[1:])
    # Under autocast a norm keeps float32 parameters next to half-precision images.
    made = made.cuda() if layer == "BatchNorm2d" else made.to("cuda", _DTYPES[precision])
    x = _random(*shape, precision=precision)
    if channels_last:
        x = x.contiguous(memory_format=torch.channels_last)
    x.requires_grad_()
    if part == "evaluation":
        made.eval()
        return lambda: made(x)
    inputs = (x, *made.parameters())
    return (lambda: made(x)) if part == "forward" else backward_of(lambda: made(x), inputs)


def selections() -> Iterator[Row]:
    """Sorting, selecting, indexing, embedding and dropout, with their backward passes."""
    for name in _SELECTIONS:
        for size in (10_000, 4_000_000):
            yield _row(name, _SELECTIONS[name], size=size)


def _values(size: int) -> torch.Tensor:
    return torch.arange(size, device="cuda", dtype=torch.float32)


def _sort(size: int) -> Call:
    x = _values(size)
    return lambda: x.sort()


def _sort_rows(size: int) -> Call:
    x = _values(size).view(100, -1)
    return lambda: x.sort(dim=-1)


def _argsort_int(size: int) -> Call:
    x = torch.arange(size, device="cuda")
    return lambda: x.argsort()


def _topk(size: int) -> Call:
    x = _values(size).view(10, -1)
    return lambda: x.topk(50, dim=-1)


def _unique(size: int) -> Call:
    x = torch.arange(size, device="cuda")
    return lambda: x.unique()


def _cumsum(size: int) -> Call:
    x = _values(size)
    return lambda: x.cumsum(0)


def _nonzero(size: int) -> Call:
    x = torch.ones(size, device="cuda", dtype=torch.bool)
    return lambda: x.nonzero()


def _index(size: int) -> Call:
    x, places = _values(size), torch.arange(size, device="cuda")
    return lambda: x[places]


def _index_backward(size: int) -> Call:
    x, places = _values(size).requires_grad_(), torch.arange(size, device="cuda")
    return backward_of(lambda: x[places], (x,))


def _scatter_add(size: int) -> Call:
    x, places = _values(size), torch.arange(size, device="cuda")
    return lambda: torch.zeros_like(x).scatter_add_(0, places, x)


def _embedding_backward(size: int) -> Call:
    table = torch.zeros(30_000, 64, device="cuda", requires_grad=True)
    words = torch.arange(size // 64, device="cuda") % 30_000
    return backward_of(lambda: functional.embedding(words, table), (table,))


def _gather(size: int) -> Call:
    x, places = _values(size), torch.arange(size, device="cuda")
    return lambda: x.gather(0, places)


def _dropout(size: int) -> Call:
    x = _values(size).requires_grad_()
    return lambda: functional.dropout(x, 0.1, training=True)


def _dropout_backward(size: int) -> Call:
    x = _values(size).requires_grad_()
    return backward_of(lambda: functional.dropout(x, 0.1, training=True), (x,))


def _cross_entropy(size: int) -> Call:
    x = _values(size).view(10, -1).requires_grad_()
    target = torch.zeros(10, dtype=torch.long, device="cuda")
    return lambda: functional.cross_entropy(x, target)


def _cross_entropy_backward(size: int) -> Call:
    x = _values(size).view(10, -1).requires_grad_()
    target = torch.zeros(10, dtype=torch.long, device="cuda")
    return backward_of(lambda: functional.cross_entropy(x, target), (x,))


def _reduction(size: int) -> Call:
    x = _values(size)
    return lambda: x.sum()


def _column_sums(size: int) -> Call:
    x = _values(size).view(-1, 100)
    return lambda: x.sum(0)


def _randperm(size: int) -> Call:
    return lambda: torch.randperm(size, device="cuda")


def _multinomial(size: int) -> Call:
    x = torch.ones(min(size, 1 << 20), device="cuda")
    return lambda: torch.multinomial(x, 16)


_SELECTIONS: dict[str, Callable[..., Call]] = {
    "sort": _sort, "sort rows": _sort_rows, "argsort int64": _argsort_int, "topk": _topk,
    "unique": _unique, "cumsum": _cumsum, "nonzero": _nonzero, "index": _index,
    "index backward": _index_backward, "scatter_add": _scatter_add, "gather": _gather,
    "embedding backward": _embedding_backward, "dropout": _dropout,
    "dropout backward": _dropout_backward, "cross_entropy": _cross_entropy,
    "cross_entropy backward": _cross_entropy_backward, "sum": _reduction,
    "column sums": _column_sums, "randperm": _randperm, "multinomial": _multinomial,
}  # fmt: skip


def optimizers() -> Iterator[Row]:
    """One step of each optimizer in each implementation, and gradient clipping."""
    names = ("SGD", "momentum", "Adam", "AdamW", "RMSprop", "Adagrad", "NAdam", "RAdam")
    for name, kind in itertools.product(names, ("foreach", "fused", "loop")):
        if kind == "fused" and name not in ("SGD", "momentum", "Adam", "AdamW", "Adagrad"):
            continue
        for precision in ("fp32", "bf16"):
            yield _row("optimizer", _optimizer, name=name, kind=kind, precision=precision)
    for kind in ("foreach", "loop"):
        yield _row("clip_grad_norm", _clip, foreach=kind == "foreach")
    yield _row("grad scaler unscale", _unscale)


def _parameters(precision: str) -> list[nn.Parameter]:
    shapes = ((1024, 1024), (1024,), (4096, 1024), (4096,), (7, 3))
    parameters = [nn.Parameter(_random(*shape, precision=precision)) for shape in shapes]
    for parameter in parameters:
        parameter.grad = torch.zeros_like(parameter)
    return parameters


def _optimizer(name: str, kind: str, precision: str) -> Call:
    parameters = _parameters(precision)
    options: dict[str, Any] = {"lr": 1e-4, "foreach": kind == "foreach"}
    if kind == "fused":
        options["fused"] = True
    if name == "momentum":
        name, options["momentum"] = "SGD", 0.9
    optimizer = getattr(torch.optim, name)(parameters, **options)
    return lambda: optimizer.step()


def _clip(foreach: bool) -> Call:
    parameters = _parameters("fp32")
    return lambda: nn.utils.clip_grad_norm_(parameters, 1.0, foreach=foreach)


def _unscale() -> Call:
    parameters = _parameters("fp32")
    optimizer = torch.optim.SGD(parameters, lr=1e-4)

    def call() -> None:
        scaler = torch.amp.GradScaler("cuda", init_scale=1.0)
        scaler.scale(torch.zeros((), device="cuda"))
        scaler.unscale_(optimizer)

    return call


FAMILIES: dict[str, Callable[[], Iterator[Row]]] = {
    "convolutions": convolutions(False),
    "products": products,
    "attention": attention,
    "selections": selections,
    "optimizers": optimizers,
    "norms": norms,
    "recurrent": recurrent,
    "convolutions-benchmark": convolutions(True),
}
