"""State size of other optimizers for the recorded parameters, by running them.

Each runs two steps on the simulated GPU on empty parameters of the recorded shapes and
types, so its figures come from its own code, not from a rule. They are bytes as requested:
what the allocator charges on top depends on the blocks that it happens to have.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch.optim import SGD, Adafactor, Adagrad, Adam, AdamW, Optimizer, RMSprop

from trainfit.hardware import GpuSpec, find_gpu
from trainfit.memory.replay import Stream, live_at
from trainfit.results.memory import OptimizerTable, OptimizerUse
from trainfit.results.runs.recording import KINDS, Parameter, Recording, step_ends
from trainfit.simgpu.interventions.optimizers import EightBitOptimizer
from trainfit.simgpu.session import Simulation

_Make = Callable[[list[Any]], Optimizer]


#: In the order of what they keep. PyTorch's default on a GPU is the foreach implementation.
_OPTIMIZERS: Mapping[str, _Make] = {
    "SGD": lambda p: SGD(p, lr=0.1),
    "SGD(momentum=0.9)": lambda p: SGD(p, lr=0.1, momentum=0.9),
    "Adafactor": lambda p: Adafactor(p),
    "bitsandbytes AdamW8bit": lambda p: EightBitOptimizer(p, states=2),
    "RMSprop": lambda p: RMSprop(p),
    "Adagrad": lambda p: Adagrad(p),
    "Adam": lambda p: Adam(p),
    "AdamW": lambda p: AdamW(p),
    "AdamW(foreach=False)": lambda p: AdamW(p, foreach=False),
    "AdamW(fused=True)": lambda p: AdamW(p, fused=True),
    "AdamW(amsgrad=True)": lambda p: AdamW(p, amsgrad=True),
}


def optimizer_table(recording: Recording) -> OptimizerTable | None:
    """All optimizers on the recorded parameters.

    ``None`` where no parameters are known, or no optimizer step was completed.
    """
    parameters = recording.parameters() or ()
    trained = [parameter for parameter in parameters if parameter.trained]
    if not trained or not recording.steps:
        return None
    gpu = dataclasses.replace(
        find_gpu("custom:24GiB"), memory_bytes=recording.header["gpu_memory_bytes"]
    )
    rows, measured = [], 0
    for name, make in _OPTIMIZERS.items():
        row, measured = _run(name, make, trained, gpu)
        rows.append(row)
    frozen = _bytes_of(recording, [parameter for parameter in parameters if not parameter.trained])
    return OptimizerTable(
        trained_bytes=measured,
        frozen_bytes=frozen,
        present=str(recording.header.get("optimizer") or ""),
        present_bytes=_after_last_step(recording) - frozen,
        rows=tuple(rows),
    )


def _run(
    name: str, make: _Make, parameters: Sequence[Parameter], gpu: GpuSpec
) -> tuple[OptimizerUse, int]:
    """Two steps of one optimizer; also what the parameters alone take."""
    alone = 0
    with Simulation(gpu, limited=False):
        # cuBLAS's workspace, which the training step has already when the optimizer runs.
        torch.empty(2, 2, device="cuda").mm(torch.empty(2, 2, device="cuda"))
        others = _requested("current")
        try:
            tensors = [_parameter(parameter) for parameter in parameters]
            alone = _requested("current") - others
            for tensor in tensors:
                tensor.grad = torch.empty_like(tensor)
            optimizer = make(tensors)
            for _ in range(2):
                optimizer.step()
        except (RuntimeError, ValueError, TypeError, OverflowError) as error:
            reason = " ".join(str(error).split())[:200]
            return OptimizerUse(name, None, None, f"{type(error).__name__}: {reason}"), alone
        between, most = _requested("current"), _requested("peak")
    return OptimizerUse(name, between - others, most - others), alone


def _requested(which: str) -> int:
    nbytes: int = torch.cuda.memory_stats()[f"requested_bytes.all.{which}"]
    return nbytes


def _parameter(recorded: Parameter) -> Any:
    dtype = getattr(torch, recorded.dtype, None)
    if not isinstance(dtype, torch.dtype):
        raise ValueError(f"a parameter's type is {recorded.dtype!r}")
    return torch.nn.Parameter(torch.empty(recorded.shape, dtype=dtype, device="cuda"))


def _after_last_step(recording: Recording) -> int:
    """Parameters, gradients and the optimizer's state at the end of the last step."""
    stream = Stream.of(recording)
    end = int(step_ends(recording.events)[-1])
    live = live_at(stream, end)
    kinds = [KINDS.index(kind) for kind in ("parameter", "gradient", "optimizer_state")]
    return int(recording.alloc_bytes[live[np.isin(recording.alloc_kind[live], kinds)]].sum())


def _bytes_of(recording: Recording, parameters: Sequence[Parameter]) -> int:
    allocs = {
        parameter.alloc for parameter in parameters if parameter.alloc < len(recording.alloc_bytes)
    }
    return sum(int(recording.alloc_bytes[alloc]) for alloc in allocs)
