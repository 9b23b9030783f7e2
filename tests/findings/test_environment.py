"""Exceptions of an environment, in the words of the loader, of PyTorch, torchvision and NumPy."""

from __future__ import annotations

from pathlib import Path

import pytest

from trainfit.findings.failure import KINDS, of_exception

SITE = "/opt/env/lib/python3.11/site-packages"


def raised(text: str, *paths: str) -> str:
    frames = "".join(f'  File "{path}", line 3, in <module>\n    import it\n' for path in paths)
    return f"Traceback (most recent call last):\n{frames}{text}\n"


@pytest.mark.parametrize(
    ("said", "paths", "title", "fix"),
    [
        (
            "RuntimeError: operator torchvision::nms does not exist",
            ("train.py", f"{SITE}/torchvision/_meta_registrations.py", f"{SITE}/torch/library.py"),
            "torchvision does not match",
            "trainfit doctor --only torchvision",
        ),
        (
            f"ImportError: {SITE}/flash_attn_2_cuda.cpython-311-x86_64-linux-gnu.so: undefined "
            "symbol: _ZN3c105ErrorC2ENS_14SourceLocationENSt7__cxx1112basic_stringE",
            ("train.py", f"{SITE}/flash_attn/__init__.py"),
            "flash_attn was compiled for another version of PyTorch",
            "the build of flash_attn",
        ),
        (
            "OSError: libcudart.so.11.0: cannot open shared object file: No such file or directory",
            ("train.py", f"{SITE}/apex/__init__.py", f"{SITE}/torch/_ops.py"),
            "apex was compiled for CUDA 11",
            "torch.version.cuda",
        ),
        (
            "OSError: libc10_cuda.so: cannot open shared object file: No such file or directory",
            ("train.py", f"{SITE}/torchaudio/__init__.py", f"{SITE}/torch/_ops.py"),
            "torchaudio was compiled for a PyTorch with CUDA",
            "the build of torchaudio for this PyTorch",
        ),
        (
            f"OSError: Could not load this library: {SITE}/torchaudio/lib/_torchaudio.so",
            ("train.py", f"{SITE}/torchaudio/__init__.py", f"{SITE}/torch/_ops.py"),
            "A library of torchaudio cannot be loaded",
            f"ldd {SITE}/torchaudio/lib/_torchaudio.so",
        ),
        (
            "ValueError: numpy.dtype size changed, may indicate binary incompatibility. Expected "
            "96 from C header, got 88 from PyObject",
            ("train.py", f"{SITE}/pycocotools/mask.py"),
            "pycocotools was compiled for another major version of NumPy",
            "a newer pycocotools",
        ),
        (
            "ImportError: numpy.core.multiarray failed to import",
            ("train.py",),
            "a package",
            "numpy",
        ),
    ],
)
def test_a_package_that_does_not_match(
    said: str, paths: tuple[str, ...], title: str, fix: str
) -> None:
    fault = of_exception(raised(said, *paths))
    assert fault is not None and fault.kind == "package_mismatch" and fault.kind in KINDS
    assert fault.title.startswith(title) and fix in fault.fix.action
    assert said.partition(": ")[2] in fault.cause


def test_deepspeed_without_a_launcher() -> None:
    said = "ModuleNotFoundError: No module named 'mpi4py'"
    fault = of_exception(raised(said, "train.py", f"{SITE}/deepspeed/comm/comm.py"))
    assert fault is not None and "torchrun --nproc-per-node=1" in fault.fix.action
    other = of_exception(raised(said, "train.py"))
    assert other is not None and "pip install mpi4py" in other.fix.action


@pytest.mark.parametrize(
    "said",
    [
        "AssertionError: Torch not compiled with CUDA enabled",
        "RuntimeError: Found no NVIDIA driver on your system. Please check that you have an NVIDIA "
        "GPU and installed a driver from http://www.nvidia.com/Download/index.aspx",
        "RuntimeError: No CUDA GPUs are available",
        "torch.AcceleratorError: CUDA error: no kernel image is available for execution on the "
        "device",
    ],
)
def test_a_gpu_that_pytorch_does_not_see(said: str) -> None:
    fault = of_exception(raised(said, "train.py", f"{SITE}/torch/cuda/__init__.py"))
    assert fault is not None and fault.kind == "gpu_not_seen" and fault.kind in KINDS
    assert "trainfit doctor --only gpu" in fault.fix.action


def test_a_checkpoint_of_a_gpu() -> None:
    said = (
        "RuntimeError: Attempting to deserialize object on a CUDA device but "
        "torch.cuda.is_available() is False. If you are running on a CPU-only machine, please use "
        "torch.load with map_location=torch.device('cpu') to map your storages to the CPU."
    )
    fault = of_exception(raised(said, "train.py", f"{SITE}/torch/serialization.py"))
    assert fault is not None and fault.kind == "gpu_not_seen"
    assert "map_location" in fault.fix.action


@pytest.mark.parametrize(
    "said",
    [
        "ImportError: /opt/lib/other.so: undefined symbol: PyUnicode_Other",
        "OSError: libsndfile.so.1: cannot open shared object file: No such file or directory",
        "RuntimeError: operator mine::nms does not exist",
        "ValueError: size changed",
    ],
)
def test_what_is_not_known_is_not_explained(said: str) -> None:
    assert of_exception(raised(said, "train.py", f"{SITE}/other/__init__.py")) is None


@pytest.mark.parametrize(
    ("line", "said"),
    [
        (
            "_, width = os.popen('stty size', 'r').read().split()",
            "ValueError: not enough values to unpack (expected 2, got 0)",
        ),
        (
            "width = os.get_terminal_size().columns",
            "OSError: [Errno 25] Inappropriate ioctl for device",
        ),
    ],
)
def test_a_terminal_that_is_not_there(line: str, said: str) -> None:
    trace = f'Traceback (most recent call last):\n  File "a.py", line 3, in f\n    {line}\n{said}\n'
    fault = of_exception(trace)
    assert fault is not None and fault.kind == "no_terminal" and fault.kind in KINDS
    assert "shutil.get_terminal_size()" in fault.fix.action
    other = of_exception(trace.replace(line, "a, b = ''.split()"))
    assert other is None or other.kind == "parts_unpacked"


def test_nvidia_smi_that_a_shell_does_not_find(tmp_path: Path) -> None:
    """Its output is empty, and is taken apart some lines on; a function that asks nothing of it
    says the same of a batch."""
    script = tmp_path / "memory.py"
    script.write_text(
        "import os\n\n\ndef memory():\n"
        "    asked = os.popen('nvidia-smi --query-gpu=memory.total,memory.used')\n"
        "    lines = asked.read().strip().split(chr(10))\n"
        "    total, used = lines[0].split(',')\n\n\n"
        "def parts(batch):\n    x, y = batch\n"
    )
    said = "ValueError: not enough values to unpack (expected 2, got 1)"
    kinds = []
    for line, name, code in ((7, "memory", "total, used = lines[0].split(',')"),
                             (11, "parts", "x, y = batch")):  # fmt: skip
        trace = "Traceback (most recent call last):\n"
        trace += f'  File "{script}", line {line}, in {name}\n    {code}\n{said}\n'
        fault = of_exception(trace)
        assert fault is not None and fault.kind in KINDS
        kinds.append(fault.kind)
    assert kinds == ["no_nvidia_smi", "parts_unpacked"]
