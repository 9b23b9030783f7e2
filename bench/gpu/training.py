"""A training job as people write it, for a case of the campaign; the same code everywhere."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn

from gpu.cases import Case
from gpu.models import MODELS, Batch

_DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}
_OPTIMIZERS: dict[str, tuple[type[torch.optim.Optimizer], dict[str, float]]] = {
    "sgd": (torch.optim.SGD, {"lr": 1e-4}),
    "momentum": (torch.optim.SGD, {"lr": 1e-4, "momentum": 0.9}),
    "adam": (torch.optim.Adam, {"lr": 1e-5}),
    "adamw": (torch.optim.AdamW, {"lr": 1e-5}),
}
_KINDS: dict[str, dict[str, bool]] = {
    "default": {},
    "foreach": {"foreach": True},
    "fused": {"fused": True},
    "loop": {"foreach": False, "fused": False},
}


def prepared(case: Case) -> Any:
    """The job of a case, prepared on the CPU: of ``models.py`` or of ``families.py``."""
    if case.model in MODELS:
        return TrainingJob(case)
    from gpu.families import FamilyJob

    return FamilyJob(case)


class TrainingJob:
    """One case, prepared on the CPU; :meth:`run` trains on the GPU.

    ``mark(name)`` is called after each part of a step; ``around_last`` is a context manager
    for the last step.
    """

    def __init__(self, case: Case) -> None:
        torch.manual_seed(0)
        self.case = case
        self.model = MODELS[case.model]
        given = {"attention": case.attention, "checkpointing": case.checkpointing}
        options = {name: given[name] for name in self.model.options}
        self.module = self.model.build(**options)
        self.batch = self.model.batch(case.batch)
        self.step_seconds: list[float] = []

    def run(
        self,
        mark: Callable[[str], None] = lambda name: None,
        around_last: Callable[[], Any] = contextlib.nullcontext,
    ) -> None:
        """Train; what is on the GPU is kept until the job is dropped."""
        self.begin(mark)
        steps = self.case.steps
        for step in range(steps):
            with around_last() if step == steps - 1 else contextlib.nullcontext():
                self.step_seconds.append(self.step(mark))

    def begin(self, mark: Callable[[str], None] = lambda name: None) -> None:
        """Everything before the first step."""
        case = self.case
        torch.backends.cudnn.benchmark = case.benchmark
        if case.tf32 != "default":
            torch.backends.cudnn.allow_tf32 = case.tf32 == "on"
            torch.backends.cuda.matmul.allow_tf32 = case.tf32 == "on"
        self.module.to("cuda")
        if case.precision == "bf16_weights":
            self.module.to(torch.bfloat16)
        if case.channels_last:
            self.module.to(memory_format=torch.channels_last)
        self.module.train(case.mode == "training")
        mark("moved")
        self.optimizer = make_optimizer(case, self.module)
        # No loss scale above 1: with random data it could overflow, and steps would be skipped.
        self.scaler = torch.amp.GradScaler("cuda", enabled=case.precision == "fp16", init_scale=1.0)

    def step(self, mark: Callable[[str], None] = lambda name: None) -> float:
        """One step; its seconds, to the GPU's end of it."""
        started = time.perf_counter()
        self._step(mark)
        torch.cuda.synchronize()
        return time.perf_counter() - started

    def _step(self, mark: Callable[[str], None]) -> None:
        case = self.case
        if case.mode != "training":
            with torch.no_grad(), autocast(case.precision):
                self.model.loss(self.module, to_device(self.batch, case.channels_last))
            mark("step")
            return
        for _ in range(case.accumulation):
            batch = to_device(self.batch, case.channels_last)
            with autocast(case.precision):
                loss = self.model.loss(self.module, batch) / case.accumulation
            mark("forward")
            self.scaler.scale(loss).backward()
            mark("backward")
        if case.clip:
            self.scaler.unscale_(self.optimizer)
            nn.utils.clip_grad_norm_(self.module.parameters(), 10.0)
        self.scaler.step(self.optimizer)
        self.scaler.update()
        mark("optimizer")
        self.optimizer.zero_grad(set_to_none=case.set_to_none)
        mark("step")


def make_optimizer(case: Case, module: nn.Module) -> torch.optim.Optimizer:
    kind, options = _OPTIMIZERS[case.optimizer]
    return kind(module.parameters(), **options, **_KINDS[case.kind])  # type: ignore[arg-type]


@contextlib.contextmanager
def autocast(precision: str) -> Iterator[None]:
    """Autocast on the GPU, none for float32 and for weights in half precision."""
    if precision not in _DTYPES:
        yield
        return
    with torch.autocast("cuda", dtype=_DTYPES[precision]):
        yield


def to_device(batch: Batch, channels_last: bool) -> Batch:
    """A copy on the GPU; images in channels_last where asked for."""
    if isinstance(batch, torch.Tensor):
        if channels_last and batch.dim() == 4:
            return batch.to("cuda", memory_format=torch.channels_last)
        return batch.to("cuda")
    if isinstance(batch, dict):
        return {name: to_device(value, channels_last) for name, value in batch.items()}
    return type(batch)(to_device(value, channels_last) for value in batch)
