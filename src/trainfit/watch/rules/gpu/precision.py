"""Training in 32 bits on a GPU with Tensor cores that is the limit of the run."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

from trainfit.results.watch.result import Evidence, Finding, Unknown
from trainfit.watch.figures import gpu_time, thresholds
from trainfit.watch.figures.view import RunView
from trainfit.watch.rules.rule import Rule

#: Tensor cores begin with Volta, bfloat16 with Ampere.
_TENSOR_CORES: Final = (7, 0)
_BFLOAT16: Final = (8, 0)


def look(run: RunView) -> Iterator[Finding | Unknown]:
    """Of the judged rank."""
    view = run.judged
    gpu = view.header.gpu
    if gpu is None or gpu >= len(view.header.gpus) or not len(view.steps):
        return
    capability = view.header.gpus[gpu].capability
    if capability is None or view.header.precision == "unknown":
        yield Unknown("amp_off", "precision or GPU is not known", "a run with steps on a GPU")
        return
    if capability < _TENSOR_CORES or view.header.precision not in ("float32", "tf32"):
        return
    idle = gpu_time.idle_share(view)
    if idle is None or 1 - idle < thresholds.GPU_BOUND:
        return  # a faster GPU would wait longer
    kind = "bfloat16" if capability >= _BFLOAT16 else "float16"
    scaler = "" if kind == "bfloat16" else ", with torch.amp.GradScaler"
    yield Finding(
        "amp_off",
        "warning",
        f"The GPU is the limit and computes in {view.header.precision}",
        (Evidence("GPU busy", 1 - idle), Evidence("compute capability", _number(capability))),
        "its Tensor cores compute 16-bit matmuls and convolutions several times as fast",
        f"run the forward pass under torch.autocast('cuda', torch.{kind}){scaler}; "
        "`trainfit plan` says what it saves for this script",
        "likely",
        line=f"with torch.autocast('cuda', dtype=torch.{kind}):",
    )


def _number(capability: tuple[int, int]) -> float:
    return capability[0] + capability[1] / 10


RULE: Final = Rule(("amp_off",), look, each_rank=True)
