"""Rows of the decision table whose cause lies in PyTorch, its environment or its process."""

from __future__ import annotations

from typing import Final

from trainfit.doctor.masking import visible
from trainfit.doctor.stack import LEAST_DRIVER, Stack, version_text
from trainfit.doctor.verdicts import bad, evidence, unsure
from trainfit.results.doctor import Check, Remedy

NAME: Final = "gpu"


def forked(stack: Stack) -> Check | None:
    """The process was forked after its parent had started CUDA."""
    if stack.cuda.bad_fork.value is not True:
        return None
    return bad(
        NAME,
        "forked_after_cuda",
        "this process was forked after its parent had started CUDA",
        "CUDA's state does not survive a fork: 'Cannot re-initialize CUDA in forked subprocess'. "
        "A fresh process on this machine is not concerned.",
        [evidence("forked after CUDA's start", stack.cuda.bad_fork), *stack.torch_evidence()],
        [
            Remedy(
                'torch.multiprocessing.set_start_method("spawn")',
                "remove the line again",
                "workers start slower (each imports the script anew) and must be able to "
                "pickle what they are given",
            ),
            Remedy(
                "keep CUDA out of what runs before the fork and in the workers: return CPU "
                "tensors from the Dataset, call .to(device) in the training loop",
                "none needed",
                "none",
            ),
        ],
    )


def no_torch(stack: Stack) -> Check | None:
    """There is no PyTorch in this environment."""
    if not stack.cuda.torch.is_absent:
        return None
    return bad(
        NAME,
        "no_torch",
        "PyTorch is not installed in this environment",
        "Nothing can be said of what it would see.",
        [evidence("PyTorch", stack.cuda.torch), *stack.driver_evidence()],
        [Remedy("pip install torch", "pip uninstall torch", "about 3 GB of disk with CUDA")],
    )


def cpu_only(stack: Stack) -> Check | None:
    """The build has neither CUDA nor ROCm."""
    build = stack.torch
    if build is None or build.cuda is not None:
        return None
    if build.hip is not None:
        if stack.sees_gpu:
            return None
        return unsure(
            NAME,
            f"PyTorch {build.version} is built for ROCm",
            "AMD's driver stack is not examined here; `rocminfo` shows what it sees",
            stack.torch_evidence(),
        )
    without = stack.pci == () and not stack.gpus and not stack.in_wsl and not stack.is_jetson
    if without:
        why = (
            "This machine shows no NVIDIA GPU either, so the build suits it: to train on a GPU, "
            "the job has to move to a machine that has one."
        )
    else:
        why = (
            "A build without CUDA sees no GPU, whatever the driver does. pip takes it where "
            "PyTorch's CPU index is configured, conda where the CUDA variant did not resolve."
        )
    return bad(
        NAME,
        "cpu_only_torch",
        f"PyTorch {build.version} is a CPU-only build",
        why,
        [*stack.torch_evidence(), *stack.driver_evidence()],
        () if without else (_install(stack, build.version),),
    )


def _install(stack: Stack, version: str) -> Remedy:
    """A wheel with the newest CUDA that the driver serves."""
    plain = version.partition("+")[0]
    branch = stack.driver_branch
    index = "https://download.pytorch.org/whl/" + _wheel(branch)
    return Remedy(
        f"pip install --force-reinstall torch=={plain} --index-url {index}",
        f"pip install --force-reinstall torch=={version} "
        "--index-url https://download.pytorch.org/whl/cpu",
        "about 3 GB of disk; torchvision and torchaudio must come from the same index. Where "
        "this version has no such wheel, pip says so: take the CUDA that pytorch.org names",
    )


#: CUDA wheels of PyTorch by the major version of CUDA: pytorch.org/get-started.
_WHEELS: Final = {13: "cu130", 12: "cu126", 11: "cu118"}


def _wheel(branch: int | None) -> str:
    for major in sorted(LEAST_DRIVER, reverse=True):
        if branch is not None and branch >= LEAST_DRIVER[major]:
            return _WHEELS[major]
    return _WHEELS[12]


def masked(stack: Stack) -> Check | None:
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
    there = f"the machine has {stack.gpu_count}" if stack.gpu_count else "which names none"
    what = f"{unknown!r} is none of its GPUs" if unknown else "it is empty"
    return bad(
        NAME,
        "masked",
        f"CUDA_VISIBLE_DEVICES={value!r} hides every GPU",
        f"CUDA takes the entries before the first that it does not know: {what} ({there}).",
        [
            evidence("CUDA_VISIBLE_DEVICES", stack.cuda.visible_devices, repr),
            evidence("GPUs by NVML", stack.machine.gpus, lambda gpus: str(len(gpus))),
            *stack.torch_evidence(),
        ],
        [
            Remedy(
                "unset CUDA_VISIBLE_DEVICES",
                f"export CUDA_VISIBLE_DEVICES={value!r}",
                "none; where a scheduler (Slurm, Kubernetes) set it, ask for a GPU instead",
            )
        ],
    )


def no_kernel_image(stack: Stack) -> Check | None:
    """The build has no machine code for this GPU's capability, nor PTX to make it from."""
    probe = stack.probe
    if probe is None or not stack.sees_gpu or not stack.has_no_image:
        return None
    capability = ", ".join(sorted({version_text(each) for each in probe.capabilities}))
    kinds = ", ".join(probe.architectures)
    version = stack.torch.version if stack.torch is not None else "this PyTorch"
    newer = any(
        each > _highest(probe.architectures) for each in probe.capabilities
    )  # else the wheels have dropped it
    if newer:
        advice = Remedy(
            "pip install --upgrade torch --index-url https://download.pytorch.org/whl/cu130",
            f"pip install torch=={version}",
            "about 3 GB of disk; needs driver 580 or newer",
        )
    else:
        advice = Remedy(
            "pip install --force-reinstall torch --index-url https://download.pytorch.org/whl/cu126",
            f"pip install --force-reinstall torch=={version}",
            "perhaps an older PyTorch: wheels for CUDA 12.6 are the last with code for "
            "Maxwell, Pascal and Volta (5.0 to 7.0)",
        )
    return bad(
        NAME,
        "no_kernel_image",
        f"PyTorch {version} has no kernels for this GPU (compute capability {capability})",
        "is_available() is True and every real operation fails: the build holds machine code "
        f"for {kinds} only, and no PTX that this GPU could use.",
        [*stack.torch_evidence(), *stack.driver_evidence()],
        [advice],
    )


def _highest(architectures: tuple[str, ...]) -> tuple[int, int]:
    """The newest capability that a build has: "sm_90" is (9, 0), "sm_100a" (10, 0)."""
    highest = (0, 0)
    for name in architectures:
        digits = "".join(filter(str.isdigit, name.partition("_")[2]))
        if name.startswith("sm_") and len(digits) >= 2:
            highest = max(highest, (int(digits[:-1]), int(digits[-1])))
    return highest
