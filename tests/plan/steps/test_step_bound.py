"""A lower bound of a step's time, and the work that it is computed from."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from trainfit.hardware import find_gpu
from trainfit.plan.command.parsing import parse_command
from trainfit.plan.dataloader.child import LEAST_LAUNCH_S, step_bound
from trainfit.plan.runs.tracing import Tracer
from trainfit.results.runs.trace import Compute

pytestmark = pytest.mark.usefixtures("warm")

GPU = find_gpu("A100 80GB SXM")
#: NVIDIA A100 datasheet: dense bf16 and fp16, TF32, float32.
HALF, TF32, FLOAT32 = 312e12, 156e12, 19.49e12


def work(kernels: int = 0, moved: int = 0, *, compiled: bool = False, **flops: int) -> Compute:
    of = {name.replace("_", "/"): n for name, n in flops.items()}
    return Compute(sum(flops.values()), 0, kernels, of, kernels, moved, compiled)


@pytest.mark.parametrize(
    ("kind", "rate"),
    [
        ("product_bfloat16", HALF),
        ("product_tfloat32", TF32),
        ("product_float32", FLOAT32),
        ("attention_float16", HALF),
        # Winograd's F(4x4, 3x3) multiplies a quarter of what the formula counts.
        ("convolution_float32", 4 * FLOAT32),
        ("product_float64", FLOAT32),
    ],
)
def test_arithmetic_at_the_peak_of_its_dtype(kind: str, rate: float) -> None:
    bound = step_bound(work(**{kind: 10**13}), GPU, None)
    assert bound.seconds == bound.arithmetic_s == pytest.approx(1e13 / rate)
    assert "10 TFLOP at the dense peak" in bound.why


def test_each_dtype_has_its_own_share() -> None:
    bound = step_bound(work(product_bfloat16=10**12, product_float32=10**12), GPU, "bfloat16")
    assert bound.seconds == pytest.approx(1e12 / HALF + 1e12 / FLOAT32)


def test_dtypes_that_a_gpu_has_no_tensor_cores_for() -> None:
    old = find_gpu("GTX 1080 Ti")  # 11.34 TFLOP/s in float32
    assert step_bound(work(product_tfloat32=10**12), old, None).seconds == pytest.approx(1 / 11.34)
    turing = find_gpu("T4")  # 65 TFLOP/s in float16, no bf16
    assert step_bound(work(product_bfloat16=10**12), turing, None).seconds == pytest.approx(1 / 65)


def test_arithmetic_and_memory_add_up_and_launches_go_on_meanwhile() -> None:
    launches = step_bound(work(kernels=1000, product_bfloat16=10**6), GPU, None)
    assert launches.seconds == launches.launch_s == pytest.approx(1000 * LEAST_LAUNCH_S)
    assert "1000 kernels of 2 µs at least" in launches.why
    memory = step_bound(work(kernels=10, moved=2039 * 10**6), GPU, None)
    assert memory.seconds == memory.memory_s == pytest.approx(1e-3)
    assert "2.04 GB that no cache holds" in memory.why
    both = step_bound(work(1000, 2039 * 10**6, product_bfloat16=312 * 10**9), GPU, None)
    assert both.seconds == pytest.approx(2e-3)


def test_a_compiled_script_has_fewer_kernels_and_moves_less() -> None:
    bound = step_bound(work(10**6, 10**12, compiled=True, product_bfloat16=312 * 10**9), GPU, None)
    assert bound.seconds == pytest.approx(1e-3)
    assert (bound.memory_s, bound.launch_s) == (None, None)
    nothing = step_bound(work(10**6, compiled=True), GPU, None)
    assert nothing.seconds == 0
    assert "the script is compiled; give --step-time" in nothing.why


def test_a_device_made_to_measure_has_no_rates() -> None:
    bound = step_bound(work(500, 10**12, product_bfloat16=10**15), find_gpu("custom:24GiB"), None)
    assert (bound.arithmetic_s, bound.memory_s) == (None, None)
    assert bound.seconds == pytest.approx(500 * LEAST_LAUNCH_S)
    assert "has no rates: give --step-time" in bound.why


def test_recordings_of_earlier_versions() -> None:
    """Nothing says in which dtype: the fastest that is usual."""
    assert step_bound(Compute(10**12, 10**9, 9), GPU, None).seconds == pytest.approx(1e12 / HALF)


@given(
    st.dictionaries(
        st.sampled_from(["matmul/float32", "matmul/bfloat16", "convolution/tfloat32"]),
        st.integers(0, 10**16),
    ),
    st.integers(0, 10**6),
    st.integers(0, 10**13),
    st.sampled_from(["RTX 4090", "GTX 1080 Ti", "T4", "H100 SXM", "custom:8GiB"]),
)
def test_more_work_is_never_bounded_lower(
    flops: dict[str, int], kernels: int, moved: int, name: str
) -> None:
    gpu = find_gpu(name)
    small = Compute(sum(flops.values()), 0, kernels, flops, kernels, moved)
    double = {key: 2 * n for key, n in flops.items()}
    large = Compute(2 * small.flops, 0, kernels, double, 2 * kernels, 2 * moved)
    one, two = step_bound(small, gpu, None).seconds, step_bound(large, gpu, None).seconds
    assert two == pytest.approx(2 * one)


# -- the work of a simulated step --------------------------------------------------------------

SCRIPT = """
import torch
model = torch.nn.Linear(4096, 4096, bias=False, device="cuda")
{before}
optimizer = torch.optim.AdamW(model.parameters(), fused=True)
x = torch.randn(64, 4096, device="cuda")
for _ in range(2):
    {context}:
        loss = model(x).sum()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
"""
FLOAT, PLAIN = "", "if True"
AMP = 'with torch.autocast("cuda", torch.bfloat16)'


def traced(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, before: str, context: str) -> Compute:
    (tmp_path / "train.py").write_text(SCRIPT.format(before=before, context=context))
    monkeypatch.chdir(tmp_path)
    with Tracer(parse_command(["python", "train.py"]), find_gpu("RTX 3090"), steps=2) as tracer:
        outcome = tracer.trace().outcome
    assert outcome.compute is not None, outcome
    return outcome.compute


def test_the_work_of_a_linear_layer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Forward and weight gradient are products of 2·64·4096² FLOPs each; the input has none."""
    compute = traced(tmp_path, monkeypatch, FLOAT, AMP)
    assert compute.flops_of == {"matmul/bfloat16": 2 * 2 * 64 * 4096**2}
    assert compute.flops == sum(compute.flops_of.values())
    parameters = 4 * 4096**2
    # Fused AdamW reads parameter, gradient and two states and writes all but the gradient, and
    # reads the number of steps (4 bytes); the products' own bytes are not counted.
    assert compute.moved_bytes == 7 * parameters + 4 - 2 * (6 << 20)
    assert 5 <= compute.kernels <= compute.operators
    assert not compute.compiled


MIXED = """
import torch
from torch.nn import functional as F
depthwise = torch.nn.Conv2d(64, 64, 3, groups=64, bias=False, device="cuda")
network = torch.nn.LSTM(64, 32, device="cuda")
optimizer = torch.optim.SGD([*depthwise.parameters(), *network.parameters()], lr=0.1)
for _ in range(2):
    x = depthwise(torch.randn(8, 64, 10, 10, device="cuda"))   # 8 × 64 × 8 × 8
    x = network(x.flatten(2).permute(2, 0, 1))[0]              # 64 rows of 8 sequences, 32
    q = x.view(8, 1, 64, 32).half()
    F.scaled_dot_product_attention(q, q, q, is_causal=True).float().sum().backward()
    optimizer.step()
    optimizer.zero_grad()
"""


def test_the_work_of_what_pytorchs_counter_gets_wrong(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "train.py").write_text(MIXED)
    monkeypatch.chdir(tmp_path)
    with Tracer(parse_command(["python", "train.py"]), find_gpu("RTX 3090"), steps=2) as tracer:
        compute = tracer.trace().outcome.compute
    assert compute is not None
    once = 2 * 8 * 64 * 8 * 8 * 9  # the input has no gradient: forward, and that of the weights
    recurrent = 2 * 64 * 8 * (4 * 32) * (64 + 32)  # forward, and both gradients
    pairs = 8 * (64 * 65 // 2)
    assert compute.flops_of == {
        "convolution/tfloat32": 2 * once,
        "matmul/tfloat32": 3 * recurrent,
        "attention/float16": 2 * pairs * (2 + 5) * 32,
    }


@pytest.mark.slow
def test_float32_and_what_may_be_rounded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert set(traced(tmp_path, monkeypatch, FLOAT, PLAIN).flops_of) == {"matmul/float32"}
    allowed = "torch.backends.cuda.matmul.allow_tf32 = True; model = torch.compile(model)"
    compute = traced(tmp_path, monkeypatch, allowed, PLAIN)
    assert set(compute.flops_of) == {"matmul/tfloat32"}
    assert compute.compiled


def test_outcomes_of_earlier_versions_load() -> None:
    from trainfit.results.files.decoding import decode

    old = {"flops": 5, "traffic_bytes": 6, "operators": 7}
    assert decode(Compute, old) == Compute(5, 6, 7)
    assert decode(Compute, dataclasses.asdict(work(1, product_float32=2))).kernels == 1
