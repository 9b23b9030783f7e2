"""Launches of Triton kernels with simulated tensors.

Most tests use the stand-in for Triton; where Triton is installed, it is launched for real too.
"""

from __future__ import annotations

import importlib
import importlib.util
import itertools
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import trainfit
from helpers_cli import trainfit as command
from trainfit.results.runs.recording import Recording
from trainfit.results.runs.script import STAND_INS_VARIABLE
from trainfit.results.runs.steps import DTYPES, KINDS
from trainfit.simgpu.operators.triton_kernels import access_of
from trainfit.simgpu.session import STAND_INS
from trainfit.simgpu.stand_ins.absent import AbsentPackages

# It would import the stand-in.
importlib.import_module("torch._dynamo")

HAS_TRITON = importlib.util.find_spec("triton") is not None
MIB = 1 << 20


@pytest.fixture
def stand_in(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """``import triton`` finds the stand-in."""
    monkeypatch.setenv(STAND_INS_VARIABLE, "triton")
    # First of all finders: also where Triton is installed.
    finder = AbsentPackages(STAND_INS, lambda text: None)
    monkeypatch.setattr(sys, "meta_path", [finder, *sys.meta_path])
    before = {name: module for name, module in sys.modules.items() if _is_triton(name)}
    for name in before:
        del sys.modules[name]
    yield
    for name in [name for name in sys.modules if _is_triton(name)]:
        del sys.modules[name]
    sys.modules.update(before)


def _is_triton(name: str) -> bool:
    return name.partition(".")[0] == "triton"


@pytest.fixture
def triton(stand_in: None) -> Iterator[Any]:
    """Triton, imported by a script on a simulated GPU."""
    with trainfit.simulate("RTX 4090") as simulation:
        module = importlib.import_module("triton")
        module.simulation = simulation
        yield module


def add(x_ptr, y_ptr, out_ptr, n, BLOCK: int = 128):  # type: ignore[no-untyped-def]
    offsets = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)  # type: ignore[name-defined] # noqa: F821
    mask = offsets < n
    left = tl.load(x_ptr + offsets, mask=mask)  # type: ignore[name-defined] # noqa: F821
    right = tl.load(y_ptr + offsets, mask=mask)  # type: ignore[name-defined] # noqa: F821
    tl.store(out_ptr + offsets, left + right, mask=mask)  # type: ignore[name-defined] # noqa: F821


def rows(recording: Recording) -> list[tuple[str, str, int, int]]:
    """Kind, dtype, bytes read and written of kernels."""
    kinds = [KINDS[code] for code in recording.kernel_kind.tolist()]
    dtypes = [DTYPES[code] for code in recording.kernel_dtype.tolist()]
    moved = recording.kernel_read.tolist(), recording.kernel_written.tolist()
    return list(zip(kinds, dtypes, *moved, strict=True))


def random(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(*shape, device="cuda", dtype=dtype)


# Launches -----------------------------------------------------------------------------------------


def test_a_launch_is_a_kernel_with_its_arguments_bytes(triton: Any) -> None:
    x, out = random(1024, dtype=torch.bfloat16), random(1024)
    before = len(triton.simulation.recording.kernel_op)
    allocated = torch.cuda.memory_allocated()
    triton.jit(add)[(8,)](x, x, out, 1024, BLOCK=128)
    recording = triton.simulation.recording
    # x is the same tensor twice, and out is written only.
    assert rows(recording)[before:] == [("pointwise", "float32", 2 * 1024, 4 * 1024)]
    assert recording.strings[recording.op_name[-1]] == "triton.add"
    assert torch.cuda.memory_allocated() == allocated


def test_what_it_writes_is_unknown_and_what_it_reads_is_not(triton: Any) -> None:
    x = torch.arange(4).cuda()
    out = torch.arange(4).cuda()
    triton.jit(add)[(1,)](x, x, out, 4)
    assert x.tolist() == [0, 1, 2, 3]
    assert out.tolist() == [0, 0, 0, 0]  # what stands for unknown integers


def test_grids_are_given_the_arguments_and_constants(triton: Any) -> None:
    seen: list[dict[str, Any]] = []

    def grid(meta: dict[str, Any]) -> tuple[int]:
        seen.append(dict(meta))
        return (triton.cdiv(meta["n"], meta["BLOCK"]),)

    x = random(1000)
    triton.jit(add)[grid](x, x, x, n=1000, num_warps=8)
    assert (seen[0]["BLOCK"], seen[0]["n"]) == (128, 1000)
    assert "num_warps" not in seen[0]


def test_an_empty_grid_launches_nothing(triton: Any) -> None:
    x = random(16)
    before = len(triton.simulation.recording.kernel_op)
    triton.jit(add)[(0,)](x, x, x, 16)
    triton.jit(add).warmup(x, x, x, 16, grid=(1,))
    assert len(triton.simulation.recording.kernel_op) == before


def test_a_compiled_kernel_tells_its_resources_and_launches(triton: Any) -> None:
    x = random(16)
    compiled = triton.jit(add).warmup(x, x, x, 16, grid=(1,), num_warps=4)
    compiled._init_handles()
    assert compiled.n_regs > 0 and compiled.metadata.shared == 0
    before = len(triton.simulation.recording.kernel_op)
    compiled[(2, 1, 1)](x, x, x, 16)
    assert len(triton.simulation.recording.kernel_op) == before + 1


def test_autotuning_takes_the_first_configuration_and_its_buffer(triton: Any) -> None:
    hooked: list[dict[str, Any]] = []
    configs = [triton.Config({"BLOCK": each}, pre_hook=hooked.append) for each in (64, 256)]
    kernel = triton.autotune(configs, key=["n"])(
        triton.heuristics({"BLOCK": lambda named: named["BLOCK"] * 2})(triton.jit(add))
    )
    blocks: list[int] = []
    reserved = torch.cuda.memory_reserved()
    x = random(16)
    kernel[lambda meta: (blocks.append(meta["BLOCK"]) or 1,)](x, x, x, 16)
    assert blocks == [128]
    assert hooked[0]["BLOCK"] == 64
    # The buffer that the measurement clears is cached afterwards.
    assert torch.cuda.memory_reserved() - reserved >= 256 * MIB


def test_a_host_tensor_is_refused(triton: Any) -> None:
    with pytest.raises(ValueError, match="cannot be accessed from Triton"):
        triton.jit(add)[(1,)](random(4), torch.zeros(4), random(4), 4)


def test_missing_arguments_are_refused(triton: Any) -> None:
    with pytest.raises(TypeError, match="missing a required argument: 'n'"):
        triton.jit(add)[(1,)](random(4), random(4), random(4))


def test_the_driver_describes_the_gpu(triton: Any) -> None:
    active = triton.driver.active
    assert tuple(active.get_current_target()) == ("cuda", 89, 32)
    assert active.get_device_interface() is torch.cuda
    assert active.get_current_device() == 0
    properties = active.utils.get_device_properties(0)
    assert properties["multiprocessor_count"] == triton.simulation.gpu.sm_count
    bandwidth = properties["mem_clock_rate"] * 1e3 * 2 * properties["mem_bus_width"] / 8
    assert bandwidth == pytest.approx(triton.simulation.gpu.bandwidth_bytes_per_s, rel=1e-3)


def test_operators_made_of_triton_kernels_allocate_what_they_do(triton: Any) -> None:
    kernel = triton.jit(add)

    @torch.library.custom_op("trainfit_triton::add", mutates_args=())
    def combined(x: torch.Tensor) -> torch.Tensor:
        scratch = torch.empty(x.numel() * 2, device=x.device)
        out = torch.empty_like(x)
        kernel[(1,)](x, scratch, out, x.numel())
        return out

    x = random(1 << 18)
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    assert combined(x).shape == x.shape
    assert torch.cuda.max_memory_allocated() - before == 3 * MIB


def test_one_note_for_all_launches(triton: Any) -> None:
    simulation = triton.simulation
    assert not simulation.recording.header["assumptions"]
    kernel, x = triton.jit(add), random(16)
    for _ in range(3):
        kernel[(1,)](x, x, x, 16)
    simulation.end_step()
    kernel[(1,)](x, x, x, 16)
    (note,) = simulation.recording.header["assumptions"]
    assert note == (
        "1 Triton kernel was costed by the bytes of its arguments, and what it writes is unknown: "
        "add (3× a step)"
    )


def test_triton_is_left_as_it_was(stand_in: None) -> None:
    module = importlib.import_module("triton")
    run = module.JITFunction.run
    with trainfit.simulate("RTX 4090"):
        assert module.JITFunction.run is not run
        assert module.driver.active is not None
    assert module.JITFunction.run is run
    with pytest.raises(RuntimeError, match="0 active drivers"):
        _ = module.driver.active


def test_triton_is_not_imported_for_it(stand_in: None) -> None:
    with trainfit.simulate("RTX 4090"):
        random(4)
    assert "triton" not in sys.modules


# Which arguments a kernel reads and writes --------------------------------------------------------


def access(source: str, tmp_path: Path) -> tuple[set[str], set[str], bool]:
    path = tmp_path / "kernels.py"
    path.write_text(source)
    spec = importlib.util.spec_from_file_location("kernels", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    found = access_of(module.kernel)
    assert found is not None
    return set(found.reads), set(found.writes), found.products


@pytest.mark.parametrize(
    ("body", "reads", "writes"),
    [
        ("tl.store(a, tl.load(b))", {"b"}, {"a"}),
        ("p = a + 1\n    q = p\n    tl.store(q, 0)", set(), {"a"}),
        ("a += 4\n    x = tl.load(a)\n    tl.store(b + x, x)", {"a"}, {"b"}),
        ("for i in range(3):\n        p = q\n        q = a\n        tl.load(p)", {"a"}, set()),
        ("tl.atomic_add(a, tl.load(b))", {"a", "b"}, {"a"}),
        ("d = tl.make_tensor_descriptor(a, [1])\n    d.store([0], d.load([0]))", {"a"}, {"a"}),
        ("helper(a, 1)\n    tl.load(b)", {"a", "b"}, {"a"}),
        ("ops.helper(a)", {"a"}, {"a"}),
        ("x = tl.where(min(1, 2) > 1, a, b)\n    tl.load(x)", {"a", "b"}, set()),
        ("tl.load(pointer=a)", {"a"}, set()),
        ("x = tl.load(a)\n    y = tl.sum(x)\n    tl.store(b, y)", {"a"}, {"b"}),
    ],
)
def test_sources_tell_reads_and_writes(
    tmp_path: Path, body: str, reads: set[str], writes: set[str]
) -> None:
    assert access(f"def kernel(a, b, n):\n    {body}\n", tmp_path) == (reads, writes, False)


def test_sources_tell_matrix_products(tmp_path: Path) -> None:
    body = "tl.store(b, tl.dot(tl.load(a), tl.load(a)))"
    assert access(f"def kernel(a, b):\n    {body}\n", tmp_path)[2]


def test_without_a_source_nothing_is_told() -> None:
    assert access_of(len) is None
    namespace: dict[str, Any] = {}
    exec("def kernel(a):\n    tl.load(a)\n", namespace)
    assert access_of(namespace["kernel"]) is None


@given(chain=st.lists(st.sampled_from("abc"), min_size=1, max_size=6), stores=st.booleans())
def test_a_pointer_is_followed_through_any_names(
    tmp_path_factory: pytest.TempPathFactory, chain: list[str], stores: bool
) -> None:
    names = [f"v{place}" for place in range(len(chain))]
    lines = [f"v0 = {chain[0]} + 1"]
    lines += [f"{new} = {old} + n" for old, new in itertools.pairwise(names)]
    lines.append(f"tl.store({names[-1]}, 0)" if stores else f"tl.load({names[-1]})")
    source = "def kernel(a, b, c, n):\n" + "".join(f"    {line}\n" for line in lines)
    reads, writes, _ = access(source, tmp_path_factory.mktemp("source"))
    found, other = (writes, reads) if stores else (reads, writes)
    assert chain[0] in found and not other


# Triton itself ------------------------------------------------------------------------------------

SCRIPT = """
import torch, triton, triton.language as tl
from triton.language.extra import libdevice

@triton.autotune(configs=[triton.Config({"BLOCK": b}, num_warps=w) for b in (128, 256)
                          for w in (4, 8)], key=["n"], restore_value=["out_ptr"])
@triton.heuristics({"EVEN": lambda named: named["n"] % named["BLOCK"] == 0})
@triton.jit
def scale(x_ptr, out_ptr, n, BLOCK: tl.constexpr, EVEN: tl.constexpr):
    offsets = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    x = tl.load(x_ptr + offsets, mask=offsets < n)
    tl.store(out_ptr + offsets, libdevice.rsqrt(x), mask=offsets < n)

@torch.library.triton_op("script::scaled", mutates_args={})
def scaled(x: torch.Tensor) -> torch.Tensor:
    out = torch.empty_like(x)
    grid = lambda meta: (triton.cdiv(x.numel(), meta["BLOCK"]),)
    torch.library.wrap_triton(scale)[grid](x, out, x.numel())
    return out

assert triton.runtime.driver.active.get_current_target().arch == 89
assert triton.next_power_of_2(5) == 8
weight = torch.nn.Parameter(torch.ones(1 << 20, device="cuda"))
optimizer = torch.optim.SGD([weight], lr=0.1)
for _ in range(4):
    with torch.no_grad():
        out = scaled(weight)
    (weight * out).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
"""


@pytest.mark.skipif(not HAS_TRITON, reason="Triton is not installed")
def test_triton_itself(tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text(SCRIPT)
    done = command("simulate", "--gpu", "RTX 4090", "script.py", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert "1 Triton kernel was costed by the bytes of its arguments" in done.stdout
    assert "scale (1× a step)" in " ".join(done.stdout.split())
