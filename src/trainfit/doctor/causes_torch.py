"""Rows of the decision table whose cause lies in PyTorch, its environment or its process."""

from __future__ import annotations

import re
import shlex
from typing import Final

from trainfit.doctor import packages as wheels
from trainfit.doctor.driver_stack import DriverStack
from trainfit.doctor.findings import bad, evidence, good, unsure, version_text
from trainfit.hardware.local_gpu import visible
from trainfit.results.doctor import Check
from trainfit.results.findings import Fix
from trainfit.results.machine import TorchBuild

NAME: Final = "gpu"
#: How the probe says that the import failed (`hardware.probes.torch_devices`).
_IMPORT: Final = "import torch: "
_FAULTS: Final = {4: "SIGILL", 6: "SIGABRT", 7: "SIGBUS", 8: "SIGFPE", 11: "SIGSEGV"}


def forked(stack: DriverStack) -> Check | None:
    """The process was forked after its parent had started CUDA."""
    if stack.cuda.bad_fork.value is not True:
        return None
    return bad(
        NAME,
        "forked_after_cuda",
        "this process was forked after its parent had started CUDA",
        "CUDA's state does not survive a fork: 'Cannot re-initialize CUDA in forked "
        "subprocess'. A new process on this machine is not affected.",
        [evidence("forked after CUDA's start", stack.cuda.bad_fork), *stack.torch_evidence()],
        [
            Fix(
                'torch.multiprocessing.set_start_method("spawn")',
                "remove the line",
                "workers start more slowly (each imports the script), and the data set and its "
                "arguments must be picklable",
            ),
            Fix(
                "do not use CUDA before the fork or in workers: return CPU "
                "tensors from the Dataset, call .to(device) in the training loop",
                "none needed",
                "none",
            ),
        ],
    )


def no_torch(stack: DriverStack) -> Check | None:
    """There is no PyTorch in this environment."""
    if not stack.cuda.torch.is_absent:
        return None
    return bad(
        NAME,
        "no_torch",
        "PyTorch is not installed in this environment",
        "What it would see is unknown.",
        [evidence("PyTorch", stack.cuda.torch), *stack.driver_evidence()],
        [Fix("pip install torch", "pip uninstall torch", "about 3 GB of disk with CUDA")],
    )


def import_fails(stack: DriverStack) -> Check | None:
    """PyTorch is installed, and cannot be imported."""
    reason = stack.cuda.torch_probe.reason
    if stack.probe is not None or not reason.startswith(_IMPORT):
        return None
    words = reason.removeprefix(_IMPORT)
    remedies = [
        Fix(
            wheels.again(stack.torch),
            "none needed: reinstalls the same version with its dependencies",
            "a download of about 3 GB",
        )
    ]
    if any(
        word in words
        for word in (
            *("undefined symbol", "cannot open shared object", "version `"),
            *("invalid ELF header", "file too short", "wrong ELF class"),
        )
    ):
        remedies.insert(
            0,
            Fix(
                "env -u LD_LIBRARY_PATH python -c 'import torch'   # if that works, unset it",
                "changes nothing",
                "none; a CUDA toolkit in that path is found before the libraries that pip "
                "installed",
            ),
        )
    remedies[:0] = [fix for word, fix in _IMPORT_FIXES if word in words]
    return bad(
        NAME,
        "torch_import_fails",
        "PyTorch is installed, but cannot be imported",
        f"{words.strip().splitlines()[0][:300] if words.strip() else 'It said nothing'}. A library "
        "that it needs is missing, or another version of it is found first; this happens "
        "before the driver is used.",
        [*stack.torch_evidence(), *stack.driver_evidence()],
        remedies,
    )


#: What an import says, and the fix that is known for it.
_IMPORT_FIXES: Final = (
    (
        "iJIT_",
        Fix(
            "conda install 'mkl<2024.1'",
            "conda install mkl",
            "none; MKL 2024.1 has no longer what conda's PyTorch 2.4 and older were linked with",
        ),
    ),
    (
        "GLIBCXX_",
        Fix(
            'export LD_LIBRARY_PATH="$CONDA_PREFIX/lib${LD_LIBRARY_PATH:+:$LD_LIBRARY_PATH}"',
            "open a new shell",
            "none; the system's libstdc++ is older than conda's and found first. Without conda: "
            "a newer libstdc++6 of the distribution",
        ),
    ),
)


def crashes(stack: DriverStack) -> Check | None:
    """PyTorch dies of a fault of its own, not of a kill from outside."""
    match = re.match(r"killed by signal (\d+)", stack.cuda.torch_probe.reason, re.ASCII)
    name = _FAULTS.get(int(match[1])) if match and stack.probe is None else None
    if name is None:
        return None
    if name == "SIGILL":
        why = "SIGILL: this build uses instructions that this CPU does not support."
    else:
        why = "A library crashes the process: a broken installation, or the driver's libraries."
    return bad(
        NAME,
        "torch_crashes",
        f"PyTorch crashes when querying its GPUs ({name})",
        why,
        [*stack.torch_evidence(), *stack.driver_evidence()],
        [
            Fix(
                "python -X faulthandler -c 'import torch; torch.cuda.init()'",
                "changes nothing",
                "none; it prints the call that crashes",
            ),
            Fix(
                wheels.again(stack.torch),
                "none needed: reinstalls the same version",
                "a download of about 3 GB",
            ),
        ],
    )


def cpu_only(stack: DriverStack) -> Check | None:
    """The build has neither CUDA nor ROCm; without a GPU there is nothing wrong with that."""
    build = stack.torch
    if build is None or build.cuda is not None:
        return None
    if _is_of_others(stack, build):
        return _of_others(stack, build)
    if build.hip is not None:
        fails = stack.sees_gpu
        return unsure(
            NAME,
            f"PyTorch {build.version} is built for ROCm"
            + (", sees a GPU but fails to run a kernel on it" if fails else ""),
            "AMD's driver stack is not checked; `rocminfo` shows what it sees",
            stack.torch_evidence(),
        )
    if (crashed := crashes(stack)) is not None:
        return crashed
    found = [*stack.torch_evidence(), *stack.driver_evidence()]
    if stack.pci == () and not stack.gpus and not stack.in_wsl and not stack.is_jetson:
        return good(
            NAME,
            f"no NVIDIA GPU in this machine; PyTorch {build.version} is the build for the CPU",
            found,
            "To train on a GPU, use a machine that has one.",
        )
    return bad(
        NAME,
        "cpu_only_torch",
        f"PyTorch {build.version} is a CPU-only build",
        "A build without CUDA sees no GPU, regardless of the driver. pip installs "
        "it if PyTorch's CPU index is configured, conda if the CUDA variant did not resolve.",
        found,
        (_install(stack, build),),
    )


def _is_of_others(stack: DriverStack, build: TorchBuild) -> bool:
    """Is it a build for AMD's or Intel's GPUs on a machine with an NVIDIA GPU, and sees none?"""
    is_there = bool(stack.pci or stack.gpus or stack.drives_gpu)
    return (build.hip is not None or "+xpu" in build.version) and is_there and not stack.sees_gpu


def _of_others(stack: DriverStack, build: TorchBuild) -> Check:
    whose = "AMD's GPUs (ROCm)" if build.hip is not None else "Intel's GPUs (XPU)"
    return bad(
        NAME,
        "torch_for_other_gpus",
        f"PyTorch {build.version} is built for {whose}, and this machine has an NVIDIA GPU",
        "A build has the code of one maker's GPUs: this one never uses an NVIDIA GPU, whatever "
        "driver is installed. The index that pip was given decides which build is installed.",
        [*stack.torch_evidence(), *stack.driver_evidence()],
        (_install(stack, build),),
    )


def for_jetson(build: TorchBuild | None) -> Fix:
    """NVIDIA's own wheel."""
    return Fix(
        "pip install --force-reinstall with NVIDIA's wheel for this JetPack "
        "(docs.nvidia.com/deeplearning/frameworks/install-pytorch-jetson-platform)",
        wheels.again(build),
        "PyTorch's own wheels for Arm are built for servers, not for a Jetson's GPU",
    )


def _install(stack: DriverStack, build: TorchBuild) -> Fix:
    """A wheel with the newest CUDA that the driver and the GPUs are served by."""
    undo = wheels.again(build)
    if stack.is_jetson:
        return for_jetson(build)
    version: str | None = build.version.partition("+")[0]
    index = wheels.index_for(stack.driver_branch, stack.capabilities, version)
    if index is None or not re.fullmatch(r"[\d.]+", version or "", re.ASCII):
        version = None  # a nightly or an own build: the newest release instead
        index = wheels.index_for(stack.driver_branch, stack.capabilities)
    return Fix(
        wheels.install(index or f"{wheels.INDEX}/cu126", version),
        undo,
        "about 3 GB of disk; torchvision and torchaudio must come from the same index. If this "
        "version has no such wheel, pip says so: use the CUDA version that pytorch.org lists",
    )


def masked(stack: DriverStack) -> Check | None:
    """CUDA_VISIBLE_DEVICES leaves none of the GPUs that are there."""
    value = stack.cuda.visible_devices.value
    if value is None or stack.sees_gpu:
        return None
    uuids = [gpu.uuid.value for gpu in stack.gpus if gpu.uuid.value is not None]
    for gpu in stack.gpus:
        uuids.extend(gpu.mig_instances.value or ())
    # With no GPU to be seen, an index that is not there says nothing.
    count = stack.gpu_count if stack.gpu_count else 1 << 30
    taken, unknown = visible(value, count, uuids)
    if taken:
        return None
    there = f"the machine has {stack.gpu_count}" if stack.gpu_count else "which lists none"
    what = f"{unknown!r} is none of its GPUs" if unknown else "it is empty"
    rule = f"CUDA uses the entries before the first invalid one: {what} ({there})."
    if [part.strip() for part in value.split(",")].count(unknown or "") > 1:
        rule = f"CUDA ignores a list that names a GPU twice: {unknown!r}."
    return bad(
        NAME,
        "masked",
        f"CUDA_VISIBLE_DEVICES={value!r} hides every GPU",
        rule,
        [
            evidence("CUDA_VISIBLE_DEVICES", stack.cuda.visible_devices, repr),
            evidence("GPUs", stack.machine.gpus, lambda gpus: str(len(gpus))),
            *stack.torch_evidence(),
        ],
        _unmask(stack, value),
    )


def _unmask(stack: DriverStack, value: str) -> list[Fix]:
    unset = Fix(
        "unset CUDA_VISIBLE_DEVICES",
        f"export CUDA_VISIBLE_DEVICES={shlex.quote(value)}",
        "none; if a scheduler (Slurm, Kubernetes) set it, request a GPU instead",
    )
    return [ask_slurm(), unset] if stack.in_slurm else [unset]


def ask_slurm() -> Fix:
    """A job of Slurm gets the GPUs that it asks for, and no others."""
    return Fix(
        "#SBATCH --gres=gpu:1   # or: srun --gres=gpu:1 python train.py",
        "restore the job script's line",
        "a longer wait in the queue, and GPU hours of the account",
    )


def no_kernel_image(stack: DriverStack) -> Check | None:
    """The build has no machine code for this GPU's capability, nor PTX to make it from."""
    probe = stack.probe
    if probe is None or not stack.sees_gpu or not stack.has_no_image:
        return None
    capability = ", ".join(sorted({version_text(each) for each in probe.capabilities}))
    kinds = ", ".join(probe.architectures)
    version = stack.torch.version if stack.torch is not None else "this PyTorch"
    # Else the wheels have dropped it.
    newer = any(each > _highest(probe.architectures) for each in probe.capabilities)
    index = wheels.index_for(stack.driver_branch, probe.capabilities)
    undo = wheels.again(stack.torch)
    cost = "about 3 GB of disk; torchvision and torchaudio must come from the same index"
    if index is None:
        index = f"{wheels.INDEX}/cu128"
        cost += "; needs driver 525 or newer"
    if not newer:
        index = f"{wheels.INDEX}/cu126"
        cost = (
            "possibly an older PyTorch: wheels for CUDA 12.6 are the last with "
            "code for Maxwell, Pascal and Volta (5.0 to 7.0)"
        )
    advice = Fix(wheels.install(index), undo, cost)
    if stack.is_jetson:
        advice = for_jetson(stack.torch)
    return bad(
        NAME,
        "no_kernel_image",
        f"PyTorch {version} has no kernels for this GPU (compute capability {capability})",
        "is_available() returns True but every operation fails: the build contains machine "
        f"code for {kinds} only, and no PTX that this GPU could use.",
        [*stack.torch_evidence(), *stack.driver_evidence()],
        [advice],
    )


def cudnn_mismatch(stack: DriverStack) -> Check | None:
    """Another cuDNN than the build's own is found first."""
    if "cuDNN version incompatibility" not in stack.torch_words:
        return None
    return bad(
        NAME,
        "cudnn_mismatch",
        "PyTorch finds another cuDNN than the one it was built with",
        "The wheel brings its own cuDNN; LD_LIBRARY_PATH (a CUDA toolkit, a module of the cluster) "
        "or a package nvidia-cudnn of another version comes before it. Other operations work, "
        "convolutions do not.",
        [*stack.torch_evidence(), *stack.driver_evidence()],
        [
            Fix(
                "env -u LD_LIBRARY_PATH python train.py   # if that works, unset it",
                "changes nothing",
                "none",
            ),
            Fix(
                wheels.again(stack.torch),
                "none needed: reinstalls the same version with its dependencies",
                "a download of about 3 GB",
            ),
        ],
    )


def _highest(architectures: tuple[str, ...]) -> tuple[int, int]:
    """The newest capability that a build has: "sm_90" is (9, 0), "sm_100a" (10, 0)."""
    highest = (0, 0)
    for name in architectures:
        digits = "".join(filter(str.isdigit, name.partition("_")[2]))
        if name.startswith("sm_") and len(digits) >= 2:
            highest = max(highest, (int(digits[:-1]), int(digits[-1])))
    return highest
