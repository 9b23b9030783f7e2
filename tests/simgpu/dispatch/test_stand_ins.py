"""Packages of kernels for GPUs that are not installed, and what takes their place."""

from __future__ import annotations

import importlib
import importlib.metadata
import importlib.util
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from helpers_cli import trainfit as command
from trainfit.results.runs import script
from trainfit.results.runs.steps import KINDS
from trainfit.simgpu.session import STAND_INS, Simulation, simulate


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> Iterator[Simulation]:
    """A simulated A100 with all stand-ins."""
    monkeypatch.setenv(script.STAND_INS_VARIABLE, ",".join(script.STAND_INS))
    with simulate("A100-80GB") as simulation:
        yield simulation


def halves(*shape: int, grad: bool = True) -> torch.Tensor:
    return torch.randn(*shape, device="cuda", dtype=torch.bfloat16, requires_grad=grad)


def allocated() -> int:
    return torch.cuda.memory_allocated()


def kernels(simulation: Simulation, kind: str) -> list[int]:
    """FLOPs of the kernels of a kind."""
    recording = simulation.recording
    codes = recording.kernel_kind.tolist()
    flops = recording.kernel_flops.tolist()
    return [each for code, each in zip(codes, flops, strict=True) if KINDS[code] == kind]


def test_every_name_has_its_stand_in() -> None:
    assert tuple(STAND_INS) == script.STAND_INS


def test_a_package_is_absent_unless_it_was_asked_for() -> None:
    with simulate("RTX 4090") as simulation:
        assert importlib.util.find_spec("flash_attn") is None
        assert list(simulation.absent.asked) == ["flash_attn"] and not simulation.absent.imported
        with pytest.raises(ModuleNotFoundError, match="flash_attn"):
            importlib.import_module("flash_attn")
        assert list(simulation.absent.imported) == ["flash_attn"]


FILE = """
import torch
try:
    import flash_attn
except ImportError:
    flash_attn = None
class {}(torch.nn.Linear):
    pass
"""


def test_what_files_of_models_that_do_not_run_miss_does_not_matter(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A library may import all its models: Liger's patches do."""
    monkeypatch.syspath_prepend(tmp_path)
    for name in ("Used", "Unused"):
        (tmp_path / f"file_of_{name}.py").write_text(FILE.format(name))
    with simulate("RTX 4090") as simulation:
        importlib.import_module("file_of_Unused")
        used = importlib.import_module("file_of_Used")
        assert list(simulation.absent.imported) == ["flash_attn"]
        assert simulation.missed_packages == ()
        used.Used(2, 2, device="cuda")(torch.ones(2, 2, device="cuda"))
        assert simulation.missed_packages == ("flash_attn",)


def test_a_stand_in_has_a_version_and_goes_with_the_simulation(gpu: Simulation) -> None:
    assert importlib.metadata.version("flash-attn") == "2.8.3"
    assert importlib.metadata.packages_distributions()["flash_attn"] == ["flash-attn"]
    module = importlib.import_module("flash_attn")
    assert module.__version__ == "2.8.3"
    assert any("flash_attn is not installed here" in text for text in gpu.engine.assumptions)
    with pytest.raises(ImportError, match="flash_attn"):
        importlib.import_module("flash_attn.losses.cross_entropy")
    gpu.absent.remove()
    assert "flash_attn" not in sys.modules


def test_flash_attention_saves_what_its_autograd_function_does(gpu: Simulation) -> None:
    flash: Any = importlib.import_module("flash_attn")
    q, k, v = halves(2, 1024, 8, 64), halves(2, 1024, 2, 64), halves(2, 1024, 2, 64)
    before = allocated()
    out = flash.flash_attn_func(q, k, v, causal=True)
    # The result, a float32 sum for each query and head, and the random state.
    assert allocated() - before == out.nbytes + 2 * 1024 * 8 * 4 + 2 * 512
    out.backward(torch.ones_like(out))
    assert q.grad is not None and k.grad is not None and k.grad.shape == k.shape
    pairs = 1024 * 1025 // 2
    assert kernels(gpu, "attention") == [2 * 2 * 2 * 8 * pairs * 64]
    assert kernels(gpu, "attention_gradient") == [5 * 2 * 2 * 8 * pairs * 64]


def test_the_backward_pass_takes_flash_attentions_accumulators(gpu: Simulation) -> None:
    flash: Any = importlib.import_module("flash_attn")
    q = halves(1, 4096, 16, 128)
    out = flash.flash_attn_func(q, q, q)
    gradient = torch.ones_like(out)
    torch.cuda.reset_peak_memory_stats()
    before = allocated()
    out.backward(gradient)
    # dQ in float32 and a sum a row, the gradients of queries, keys and values, and one sum of two.
    accumulators = 4096 * 16 * (128 + 1) * 4
    peak = torch.cuda.max_memory_allocated() - before
    assert peak >= accumulators + 3 * q.nbytes
    assert peak <= accumulators + 5 * q.nbytes


def test_a_window_lowers_the_flops_of_flash_attention(gpu: Simulation) -> None:
    flash: Any = importlib.import_module("flash_attn")
    q = halves(1, 1024, 1, 64, grad=False)
    flash.flash_attn_func(q, q, q, causal=True, window_size=(127, 0))
    pairs = 128 * 129 // 2 + (1024 - 128) * 128
    assert kernels(gpu, "attention") == [2 * 2 * pairs * 64]


def test_sequences_of_flash_attention_lie_one_after_the_other(gpu: Simulation) -> None:
    flash: Any = importlib.import_module("flash_attn")
    q = halves(4096, 8, 64)
    ends = torch.tensor([0, 1024, 2048, 3072, 4096], dtype=torch.int32, device="cuda")
    out = flash.flash_attn_varlen_func(q, q, q, ends, ends, 1024, 1024)
    assert out.shape == q.shape
    assert kernels(gpu, "attention") == [4 * 4 * 8 * 1024 * 1024 * 64]


@pytest.mark.parametrize(
    ("dtype", "size", "said"),
    [(torch.float32, 64, "only support fp16"), (torch.bfloat16, 512, "at most 256")],
)
def test_flash_attention_refuses_what_it_refuses(
    gpu: Simulation, dtype: torch.dtype, size: int, said: str
) -> None:
    flash: Any = importlib.import_module("flash_attn")
    q = torch.randn(1, 8, 1, size, device="cuda", dtype=dtype)
    with pytest.raises(RuntimeError, match=said):
        flash.flash_attn_func(q, q, q)


def test_xformers_takes_flash_attention_for_halves_and_cutlass_for_a_bias(gpu: Simulation) -> None:
    ops: Any = importlib.import_module("xformers.ops")
    q = halves(2, 256, 4, 64)
    bias = torch.zeros(2, 4, 256, 256, device="cuda", dtype=q.dtype)
    for each in (None, ops.LowerTriangularMask(), bias):
        out = ops.memory_efficient_attention(q, q, q, each)
        assert out.shape == q.shape
        out.sum().backward()
    names = [gpu.recording.strings[code] for code in gpu.recording.op_name.tolist()]
    assert sum("_flash_attention_forward" in name for name in names) == 2
    assert sum("efficient_attention.default" in name for name in names) == 1
    assert ops.memory_efficient_attention(q[:, :, 0], q[:, :, 0], q[:, :, 0]).shape == (2, 256, 64)


def test_a_selective_scan_keeps_states_of_chunks(gpu: Simulation) -> None:
    scan: Any = importlib.import_module("mamba_ssm.ops.selective_scan_interface")
    u, delta, z = (halves(2, 512, 4096) for _ in range(3))
    A = torch.zeros(512, 16, device="cuda", requires_grad=True)
    B = halves(2, 16, 4096)
    before = allocated()
    out = scan.selective_scan_fn(u, delta, A, B, B, z=z)
    states = 2 * 512 * 2 * 32 * 4
    assert allocated() - before == 2 * u.nbytes + states  # the result, before and after the gate
    out.sum().backward()
    assert A.grad is not None and A.grad.shape == A.shape and B.grad is not None
    assert len(kernels(gpu, "unknown")) == 2
    said = " ".join(gpu.recording.header["assumptions"])
    assert "timed by their FLOPs and bytes: mamba_ssm::selective_scan" in said
    assert "without a FLOPs rule" not in said


@pytest.mark.parametrize("kind", ["Mamba", "Mamba2"])
@pytest.mark.parametrize("autocast", [False, True])
def test_every_parameter_of_a_mamba_block_gets_its_gradient(
    gpu: Simulation, kind: str, autocast: bool
) -> None:
    block = getattr(importlib.import_module("mamba_ssm"), kind)(256).cuda()
    x = torch.randn(2, 512, 256, device="cuda", requires_grad=True)
    with torch.autocast("cuda", torch.bfloat16, enabled=autocast):
        out = block(x)
    assert out.shape == x.shape and out.dtype is (torch.bfloat16 if autocast else torch.float32)
    out.float().sum().backward()
    wrong = [n for n, p in block.named_parameters() if p.grad is None or p.grad.shape != p.shape]
    assert not wrong and x.grad is not None


def test_a_causal_convolution_saves_its_input(gpu: Simulation) -> None:
    conv: Any = importlib.import_module("causal_conv1d")
    x, weight = halves(2, 512, 4096), halves(512, 4)
    before = allocated()
    out = conv.causal_conv1d_fn(x, weight, activation="silu")
    assert allocated() - before == x.nbytes
    out.sum().backward()
    assert weight.grad is not None and weight.grad.shape == weight.shape


SCRIPT = """
import torch
{imports}
weight = torch.nn.Parameter(torch.randn(4, 128, 8, 64, device="cuda", dtype=torch.bfloat16))
optimizer = torch.optim.SGD([weight], 0.1)
for _ in range(4):
    {body}.sum().backward()
    optimizer.step()
    optimizer.zero_grad()
"""


def simulated(folder: Path, verb: str, imports: str, body: str, *options: str) -> Any:
    (folder / "train.py").write_text(SCRIPT.format(imports=imports, body=body))
    own = ("--no-loader",) if verb == "plan" else ()
    words = (*own, "--gpu", "RTX 4090", "--explain", *options, "--", "python", "train.py")
    return command(verb, *words, cwd=folder)


@pytest.mark.parametrize("verb", ["simulate", pytest.param("plan", marks=pytest.mark.slow)])
@pytest.mark.usefixtures("brief")
def test_a_script_that_fails_without_a_package_gets_its_stand_in(tmp_path: Path, verb: str) -> None:
    attend = "flash_attn_func(weight, weight, weight)"
    done = simulated(tmp_path, verb, "from flash_attn import flash_attn_func", attend)
    assert done.returncode == 0, done.stderr
    said = " ".join(done.stdout.split())
    assert "flash_attn is not installed here, a stand-in took its place" in said


FALLBACK = """
try:
    from flash_attn import flash_attn_func as attend
except ImportError:
    def attend(q, k, v):
        return torch.softmax(q @ k.transpose(-1, -2), -1) @ v
"""


@pytest.mark.slow
@pytest.mark.usefixtures("brief")
def test_a_script_that_goes_on_without_a_package_does_so_here(tmp_path: Path) -> None:
    done = simulated(tmp_path, "plan", FALLBACK, "attend(weight, weight, weight)")
    said = " ".join(done.stdout.split())
    assert "a stand-in took its place" not in said
    assert "add --assume-installed flash_attn" in said
    options = ("--assume-installed", "flash-attn")
    done = simulated(tmp_path, "plan", FALLBACK, "attend(weight, weight, weight)", *options)
    assert "a stand-in took its place" in " ".join(done.stdout.split()), done.stderr


def test_only_known_packages_can_be_assumed(tmp_path: Path) -> None:
    done = simulated(tmp_path, "plan", "", "weight", "--assume-installed", "apex")
    assert done.returncode == 2 and "there is no stand-in for 'apex'" in done.stderr
