"""Errors that CUDA and its libraries raise: what they mean, and the fix.

Kernels run behind the script: an error of one is raised by a later call, and its line may be later.
The address next to a text is where PyTorch (or the library) raises it.
"""

from __future__ import annotations

import re
from typing import Final

from trainfit.findings import habits
from trainfit.findings.facts import FailureContext
from trainfit.findings.tracebacks import ParsedException
from trainfit.findings.training_errors import KnownError, first_met
from trainfit.results.findings import Finding, failure_finding

#: What gives the right line of an error that comes late.
_BLOCKING: Final = "CUDA_LAUNCH_BLOCKING=1 before the command gives the right line"


def known(raised: ParsedException, seen: FailureContext) -> Finding | None:
    """What an error of the GPU means; ``None``: it is none, or not known."""
    message = raised.message
    if _MEMORY.search(message):
        return _memory(message)
    if _ASSERTED.search(message):
        return _assertion(message, seen)
    met = first_met(_KNOWN, message)
    if met is None:
        return None
    found, words = met
    return failure_finding(found.kind, found.title.format(words), "", found.fix)


# --- Memory -----------------------------------------------------------------------------------


#: `c10/cuda/CUDACachingAllocator.cpp`; the driver's; cuBLAS' and cuDNN's for their handles.
_MEMORY: Final = re.compile(
    r"(?:CUDA|HIP|XPU|MPS backend) out of memory|(?:CUDA|HIP) error: out of memory"
    r"|CUBLAS_STATUS_ALLOC_FAILED|CUDNN_STATUS_ALLOC_FAILED"
)
_BYTES: Final = r"([\d.]+) (bytes|[KMGT]iB)"
_TRIED: Final = re.compile(f"Tried to allocate {_BYTES}")
_UNUSED: Final = re.compile(f"{_BYTES} is reserved by PyTorch but unallocated")
_UNITS: Final = {"bytes": 1, "KiB": 2**10, "MiB": 2**20, "GiB": 2**30, "TiB": 2**40}
_FEWER: Final = (
    "a smaller batch (with gradient accumulation the effective batch stays); `trainfit plan` on "
    "the command gives the largest batch that fits and what else lowers memory (mixed precision, "
    "checkpointing), `trainfit memory` which tensors make up the peak; `nvidia-smi` shows "
    "other processes on the GPU"
)


def _memory(text: str) -> Finding:
    tried, unused = _amount(_TRIED, text), _amount(_UNUSED, text)
    title, fix = "Out of GPU memory", _FEWER
    if tried is not None and unused is not None and unused >= tried:
        title += ", with more reserved and unused than was requested: fragmentation"
        fix = f"{habits.FRAGMENTED.action}; {_FEWER}"
    return failure_finding("gpu_out_of_memory", title, "", fix)


def _amount(pattern: re.Pattern[str], text: str) -> float | None:
    """Bytes that an allocator's message tells."""
    found = pattern.search(text)
    return float(found[1]) * _UNITS[found[2]] if found else None


# --- Values and addresses ---------------------------------------------------------------------


#: Not "device-side assertions": every error of CUDA ends with the advice to enable those.
_ASSERTED: Final = re.compile(r"device-side assert(?!ions)|hipErrorAssert|cudaErrorAssert")


def _assertion(text: str, context: FailureContext) -> Finding:
    match = re.search(r"Assertion `+([^`']+)['`]+ failed", f"{text}\n{context.output}")
    which = f" (`{match[1].strip()}`)" if match else ""
    return failure_finding(
        "device_assert",
        f"A GPU kernel met a value that is not allowed{which}: most often an index out of range",
        "",
        "check that class labels are in 0 … classes - 1 (or ignore_index), and indices of "
        "embeddings and gathers below the table's size; the line above may be a later one: "
        f"{_BLOCKING}, and the same batch on the CPU the value",
    )


_KNOWN: Final = (
    # cudaGetErrorString; cuBLAS and cuDNN say it of a kernel of theirs, or of one before it
    KnownError(
        "kernel_failed",
        re.compile(
            r"an illegal memory access|misaligned address|unspecified launch failure"
            r"|illegal instruction|invalid program counter|hardware stack error"
            r"|CU(?:BLAS|DNN)_STATUS_(?:EXECUTION_FAILED|INTERNAL_ERROR|MAPPING_ERROR)"
        ),
        "A GPU kernel failed ({}): it read or wrote outside of its tensors, or an earlier one did",
        f"the line above may be a later one: {_BLOCKING}, and `compute-sanitizer` before it the "
        "kernel; most often a kernel of an extension, or one of your own, with an index or sizes "
        "that are wrong, or a tensor that was freed while another stream used it "
        "(tensor.record_stream(stream))",
    ),
    # aten/src/ATen/cuda/CUDABlas.cpp and cudnn/Handle.cpp: of a library's handle
    KnownError(
        "gpu_out_of_memory",
        re.compile(r"CU(?:BLAS|DNN|SOLVER|SPARSE)_STATUS_NOT_INITIALIZED"),
        "A CUDA library could not start ({}): most often, no GPU memory is left for it",
        _FEWER,
    ),
    # torch/serialization.py
    KnownError(
        "no_such_gpu",
        re.compile(r"(?<=deserialize object on CUDA )device \d+"),
        "A checkpoint was saved from a GPU that is not here ({})",
        "torch.load(…, map_location=device) with the device that is used here",
    ),
    # c10/cuda/CUDAFunctions.cpp
    KnownError(
        "no_such_gpu",
        re.compile(r"invalid device ordinal|device id must be between 0 and \d+"),
        "The script asks for a GPU that there is not ({})",
        'device "cuda", or "cuda:0" for the first; those of CUDA_VISIBLE_DEVICES count from 0; of '
        "several ranks no more than there are GPUs (torchrun --nproc_per_node); a task of srun "
        "--gpus-per-task=1 sees one GPU, which is cuda:0",
    ),
    # nccl/src/init.cc
    KnownError(
        "gpu_of_two_ranks",
        re.compile(r"Duplicate GPU detected"),
        "Two ranks use one GPU, which NCCL refuses",
        'torch.cuda.set_device(int(os.environ["LOCAL_RANK"])) before init_process_group, and no '
        "more ranks than GPUs (torchrun --nproc_per_node)",
    ),
    # torch/csrc/distributed/c10d/ProcessGroup.hpp
    KnownError(
        "host_tensor_sent",
        re.compile(r"No backend type associated with device type cpu"),
        "A tensor in RAM is given to a process group of NCCL, which sends what is on GPUs",
        'tensor.to(device) before the collective; or init_process_group("cpu:gloo,cuda:nccl"), '
        "which sends tensors in RAM by gloo",
    ),
    # torch/csrc/distributed/c10d/ProcessGroupNCCL.cpp, Utils.hpp
    KnownError(
        "sizes_of_ranks",
        re.compile(
            r"output tensor size must be equal to world_size times input tensor size"
            r"|input tensor must be the same size as output size times world size"
            r"|Tensor list input to scatter/gather must match number of collective participants"
            r"|does not divide equally across group size|Number of tensor splits not equal to group"
        ),
        "A collective is given tensors that do not fit the number of ranks",
        "take that number from torch.distributed.get_world_size(group): all_gather_into_tensor "
        "writes world_size times its input, reduce_scatter_tensor and all_to_all_single read a "
        "multiple of it, and lists have one tensor for each rank",
    ),
    # torch/nn/parallel/distributed.py
    KnownError(
        "wrapped_on_host",
        re.compile(
            r"device_ids and output_device arguments only work with [^\n]*module parameters "
            r"\{device\(type='cpu'\)\}"
        ),
        "DistributedDataParallel is given device_ids, and a model that is still on the CPU",
        "model.to(device) before DistributedDataParallel(model, device_ids=[local_rank])",
    ),
    # torch/csrc/utils/tensor_numpy.cpp
    KnownError(
        "gpu_to_numpy",
        re.compile(r"can't convert \S+ device type tensor to numpy"),
        "A tensor on the GPU is given to NumPy, which knows RAM only",
        "tensor.detach().cpu() first; not in each step: it waits for the GPU",
    ),
    # c10/cuda/CUDAException.cpp, aten/src/ATen/cuda/CUDAGraph.cpp
    KnownError(
        "graph_capture",
        re.compile(r"when stream is capturing|due to a previous error during capture"),
        "A CUDA graph is captured, and something in it waits for the GPU or asks it for memory",
        "leave item(), cpu(), print(tensor), copies from pageable memory and conditions on GPU "
        "values out of what is captured; run it some times in a side stream before the capture",
    ),
    # cudaGetErrorString
    KnownError(
        "gpu_defect",
        re.compile(r"uncorrectable (?:ECC|NVLink) error|GPU has fallen off the bus"),
        "The GPU reports a fault of its own ({})",
        "`trainfit doctor --only gpu` and `dmesg | grep Xid` say more; a reset or a restart of the "
        "machine clears memory errors, and a GPU that reports them again has to be replaced",
    ),
)
#: Their kinds.
KINDS: Final = tuple(dict.fromkeys(error.kind for error in _KNOWN))
