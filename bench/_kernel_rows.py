"""Measured kernels, modules and steps, and what the speed model says of each, for
kernel_accuracy.py.

Matmuls and attention are rows of :data:`trainfit.speed.work.COLUMNS` as the simulated GPU records
them (tests/bench/test_kernel_accuracy.py compares); modules and steps are run on it. All are costed
by ``speed.step.TimedWork``, as a plan costs them.
"""

from __future__ import annotations

import csv
import dataclasses
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from trainfit.hardware import find_gpu
from trainfit.plan.sizing.costing import machine_of
from trainfit.results.runs.recording import PHASES, IntArray, Recording
from trainfit.results.runs.steps import DTYPES, KINDS
from trainfit.speed.step import TimedWork
from trainfit.speed.work import COLUMNS, Work

Floats = NDArray[np.float64]
HALF: Final = 2


@dataclasses.dataclass(frozen=True)
class ComparedRows:
    """Rows of one class on one GPU: seconds measured and predicted."""

    gpu: str
    kind: str
    measured_s: Floats
    predicted_s: Floats
    at_most: bool = False
    """Are those of a kernel that takes longer than the predicted one?"""

    @property
    def errors(self) -> Floats:
        """Predicted over measured less one, in percent; 0 where it may be less."""
        found: Floats = 100 * (self.predicted_s / self.measured_s - 1)
        return np.maximum(found, 0.0) if self.at_most else found


# --- Single kernels -------------------------------------------------------------------------------


def products(folder: Path, every: int = 1) -> Iterator[ComparedRows]:
    """``kernels_gemm_bf16.csv``: (m, k) times (k, n), by their size."""
    for gpu, rows in _by_gpu(folder / "kernels_gemm_bf16.csv", every):
        m, n, k = (_column(rows, name).astype(np.int64) for name in ("m", "n", "k"))
        read, written = HALF * (m * k + k * n), HALF * m * n
        flops = 2 * m * n * k
        table = _table("matmul", len(rows), flops=flops, read=read, written=written,
                       rows=m, columns=n, depth=k)  # fmt: skip
        measured, predicted = _column(rows, "ms") / 1e3, kernel_seconds(table, gpu)
        wide = m > 64
        for name, chosen in (
            ("GEMM from 10 GFLOP", wide & (flops >= 1e10)),
            ("GEMM 1-10 GFLOP", wide & (flops >= 1e9) & (flops < 1e10)),
            ("GEMM below 1 GFLOP", wide & (flops < 1e9)),
            ("GEMM m <= 64", ~wide),
        ):
            yield ComparedRows(gpu, name, measured[chosen], predicted[chosen])


def attention(folder: Path, every: int = 1) -> Iterator[ComparedRows]:
    """``kernels_attention_bf16.csv``: causal, keys for several queries' heads, by length."""
    for gpu, rows in _by_gpu(folder / "kernels_attention_bf16.csv", every):
        batch, tokens, heads, shared, size = (
            _column(rows, name).astype(np.int64)
            for name in ("batch_size", "sequence", "num_heads", "num_key_value_heads", "head_dim")
        )
        pairs = tokens * (tokens + 1) // 2
        read = HALF * batch * tokens * size * (heads + 2 * shared)
        written = (HALF * size + 4) * batch * tokens * heads
        table = _table("attention", len(rows), flops=4 * batch * heads * pairs * size, read=read,
                       written=written, rows=tokens, columns=tokens, depth=size,
                       batches=batch * heads)  # fmt: skip
        measured, predicted = _column(rows, "ms") / 1e3, kernel_seconds(table, gpu)
        # SDPA has no kernel of heads above 256. Paged keys of lengths that vary take longer than
        # those that lie as SDPA has them, the more so the fewer they are.
        usual = size <= 256
        for name, chosen in (
            ("attention from 2,048 tokens", tokens >= 2048),
            ("paged attention, 512-2,047 tokens, at most", (tokens >= 512) & (tokens < 2048)),
            ("paged attention below 512 tokens, at most", tokens < 512),
        ):
            of_class = chosen & usual
            bound = name.endswith("at most")
            yield ComparedRows(gpu, name, measured[of_class], predicted[of_class], bound)


def kernel_seconds(table: IntArray, gpu: str) -> Floats:
    """Of kernels that a CUDA graph launches."""
    count = np.zeros(len(table), np.int64)
    phase = np.full(1, PHASES.index("forward"))
    seconds: Floats = TimedWork(Work(table, count, count, phase), machine_of(find_gpu(gpu))).seconds
    return seconds


def _table(kind: str, count: int, **columns: Any) -> IntArray:
    values = {"kind": KINDS.index(kind), "dtype": DTYPES.index("bfloat16")}
    values |= {"batches": 1, "launches": 1, **columns}
    table = np.zeros((count, len(COLUMNS)), np.int64)
    for place, name in enumerate(COLUMNS):
        table[:, place] = values[name]
    return table


def _by_gpu(path: Path, every: int) -> Iterator[tuple[str, list[dict[str, str]]]]:
    with path.open(newline="") as file:
        rows = list(csv.DictReader(file))
    for gpu in dict.fromkeys(row["gpu"] for row in rows):
        yield gpu, [row for row in rows if row["gpu"] == gpu][::every]


def _column(rows: list[dict[str, str]], name: str) -> Floats:
    return np.array([float(row[name]) for row in rows])


# --- Modules of a few kernels ---------------------------------------------------------------------

#: What a step does: "forward", "backward", or both ("full").
Act = Callable[[], Any]


def modules(folder: Path, every: int = 1) -> Iterator[ComparedRows]:
    """``modules_liger.csv``: modules that memory bounds, forward, backward and both."""
    with (folder / "modules_liger.csv").open(newline="") as file:
        rows = [row for row in csv.DictReader(file) if row["metric_name"] == "speed"]
    rows = [row for row in rows if row["kernel_name"] in MODULES]
    found: dict[tuple[str, str], list[tuple[float, float]]] = {}
    for row in rows[::every]:
        config = json.loads(row["extra_benchmark_config_str"]) | {row["x_name"]: row["x_value"]}
        predicted = _module_seconds(row, {key: str(value) for key, value in config.items()})
        key = row["gpu_name"], f"module {row['kernel_name']}"
        found.setdefault(key, []).append((float(row["y_value_50"]) / 1e3, predicted))
    for (gpu, kind), pairs in found.items():
        measured, predicted_s = np.array(pairs).T
        yield ComparedRows(find_gpu(gpu).key, kind, measured, predicted_s)


def _module_seconds(row: dict[str, str], config: dict[str, str]) -> float:
    """The GPU's; the way is timed in a step of its own."""
    import trainfit

    gpu = find_gpu(row["gpu_name"])
    with trainfit.simulate(gpu.name, limited=False) as simulation:
        act = MODULES[row["kernel_name"]](row["kernel_operation_mode"], config)
        for _ in range(2):  # the second finds the gradients of what no gradient is removed of
            simulation.end_step()
            act()
        simulation.end_step()
    return _gpu_seconds(simulation.recording, gpu.name)


def _gpu_seconds(recording: Recording, gpu: str) -> float:
    work = Work.of_step(recording, recording.steps - 1)
    timed = TimedWork(work, machine_of(find_gpu(gpu)))
    return float((timed.seconds + timed.copies).sum())


def _ways(mode: str, forward: Act, grad: Any = None, source: Any = None) -> Act:
    """As Triton's do_bench repeats them: the gradient of ``source`` is gone before each call."""
    if mode == "forward":
        return forward
    results = [forward()] if mode == "backward" else []

    def act() -> None:
        if source is not None:
            source.grad = None
        result = results[0] if results else forward()
        result.backward(grad, retain_graph=True)

    return act


def _tensor(*shape: int, dtype: Any = None, grad: bool = True) -> Any:
    import torch

    dtype = dtype or torch.bfloat16
    return torch.empty(*shape, device="cuda", dtype=dtype, requires_grad=grad)


def _rms_norm(mode: str, config: dict[str, str]) -> Act:
    import torch

    shape = int(config["M"]), int(config["H"])
    x = _tensor(*shape)
    weight = _tensor(shape[1], dtype=torch.float32)

    def forward() -> Any:
        y = x.to(torch.float32)
        y = y * torch.rsqrt(y.pow(2).mean(-1, keepdim=True) + 1e-6)
        return weight * y.to(x.dtype)

    return _ways(mode, forward, _tensor(*shape, dtype=torch.float32, grad=False), x)


def _rope(mode: str, config: dict[str, str]) -> Act:
    import torch

    heads, shared = int(config["num_q_heads"]), int(config["num_kv_heads"])
    tokens = int(config.get("seq_len") or config["T"])
    size = int(config.get("hidden_size") or config["H"]) // heads
    q, k = (_tensor(1, tokens, each, size).transpose(1, 2) for each in (heads, shared))
    cos, sin = (_tensor(1, 1, tokens, size, grad=False) for _ in range(2))

    def half_turned(x: Any) -> Any:
        return torch.cat((-x[..., size // 2 :], x[..., : size // 2]), dim=-1)

    def forward() -> Any:
        return tuple(each * cos + half_turned(each) * sin for each in (q, k))

    grads = [torch.empty_like(each) for each in (q, k)]

    def backward(results: Any) -> None:
        torch.autograd.grad(results, (q, k), grads, retain_graph=True)

    if mode == "forward":
        return forward
    if mode == "full":
        return lambda: backward(forward())
    results = forward()
    return lambda: backward(results)


def _relu_squared(mode: str, config: dict[str, str]) -> Act:
    import torch

    shape = int(config["M"]), int(config["N"])
    x = _tensor(*shape)
    return _ways(mode, lambda: torch.square(torch.relu(x)), _tensor(*shape, grad=False), x)


def _swiglu(mode: str, config: dict[str, str]) -> Act:
    """Its "backward" rows are both ways, too."""
    import torch

    x = _tensor(int(config["S"]), int(config["B"]), 2 * int(config["ffn_local"]))

    def forward() -> Any:
        one, other = torch.chunk(x, 2, -1)
        return torch.nn.functional.silu(one) * other

    def full() -> None:
        x.grad = None
        forward().sum().backward()

    return forward if mode == "forward" else full


def _variation(mode: str, config: dict[str, str]) -> Act:
    import torch

    shape = int(config["B"]) * int(config["T"]), int(config["V"])
    p, q = (_tensor(*shape, dtype=torch.float32, grad=each).softmax(-1) for each in (True, False))
    return _ways(mode, lambda: torch.sum(torch.abs(p - q) / 2.0) / p.size(0))


def _group_norm(mode: str, config: dict[str, str]) -> Act:
    import torch

    channels = int(config["C"])
    groups = channels // int(config["channels_per_group"])
    layer = torch.nn.GroupNorm(groups, channels).cuda()
    shape = int(config["M"]), channels, int(config["H"])
    x = _tensor(*shape, dtype=torch.float32)
    return _ways(mode, lambda: layer(x), _tensor(*shape, dtype=torch.float32, grad=False), x)


def _sparsemax(mode: str, config: dict[str, str]) -> Act:
    import torch

    shape = int(config["B"]) * int(config["T"]), int(config["V"])
    x = _tensor(*shape, dtype=torch.float32)

    def forward() -> Any:
        ordered, _ = torch.sort(x, dim=-1, descending=True)
        total = torch.cumsum(ordered, dim=-1)
        number = torch.arange(1, shape[1] + 1, device="cuda", dtype=x.dtype).view(1, -1)
        support = 1 + number * ordered > total
        count = support.sum(dim=-1, keepdim=True).clamp(min=1)
        tau = ((ordered * support).sum(dim=-1, keepdim=True) - 1) / count
        return torch.clamp(x - tau, min=0)

    return _ways(mode, forward, _tensor(*shape, dtype=torch.float32, grad=False), x)


MODULES: Final[dict[str, Callable[[str, dict[str, str]], Act]]] = {
    "rms_norm": _rms_norm,
    "rope": _rope,
    "relu_squared": _relu_squared,
    "megatron_swiglu": _swiglu,
    "tvd": _variation,
    "group_norm": _group_norm,
    "sparsemax": _sparsemax,
}


# --- Networks of convolutions ---------------------------------------------------------------------

#: Images a second of one GPU in training: https://github.com/NVIDIA/DeepLearningExamples, PyTorch,
#: ConvNets, resnet50v1.5 (DGX A100 with 80 GB, DGX-1 with V100 of 16 GB); batch size, and AMP in
#: channels-last.
_RESNETS: Final = (
    ("A100 80GB SXM", 256, False, 938),
    ("A100 80GB SXM", 256, True, 2470),
    ("V100 16GB SXM", 112, False, 367),
    ("V100 16GB SXM", 256, True, 1200),
)


def networks() -> Iterator[ComparedRows]:
    """NVIDIA's ResNet-50 rows: steps of convolutions."""
    for gpu, batch, amp, rate in _RESNETS:
        kind = f"ResNet-50, {'AMP channels-last' if amp else 'float32'}"
        predicted = np.array([_resnet_seconds(gpu, batch, amp)])
        yield ComparedRows(gpu, kind, np.array([batch / rate]), predicted)


def _resnet_seconds(gpu: str, batch: int, amp: bool) -> float:
    import torch

    import trainfit
    from trainfit.simgpu.operators.torchvision_operators import define_torchvision_operators

    define_torchvision_operators()  # with a torch without CUDA torchvision lacks its own
    import torchvision

    layout = torch.channels_last if amp else torch.contiguous_format
    with trainfit.simulate(gpu, limited=False) as simulation:
        torch.backends.cudnn.benchmark = True
        torch.backends.cuda.matmul.allow_tf32 = True
        model = torchvision.models.resnet50().cuda().to(memory_format=layout)
        optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)
        scaler = torch.amp.GradScaler("cuda", enabled=amp)
        images = torch.empty(batch, 3, 224, 224, device="cuda").to(memory_format=layout)
        labels = torch.zeros(batch, dtype=torch.long, device="cuda")
        for _ in range(2):
            with torch.autocast("cuda", torch.float16, enabled=amp):
                loss = torch.nn.functional.cross_entropy(model(images), labels)
            scaler.scale(loss).backward()
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
    return _gpu_seconds(simulation.recording, gpu)
