"""Measures the gradient noise scale of a plain training loop, from its own backward passes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Final

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from trainfit.batch.backward_passes import BackwardPasses, MeasuringPass
from trainfit.batch.estimate import (
    Floats,
    Log,
    Loss,
    Weights,
    first_against_all,
    of_steps,
    summarize,
)
from trainfit.batch.norms import Cost, Examples, Records, grouped
from trainfit.hooks.owners import own_name
from trainfit.results.batch import Method, NoiseResult
from trainfit.torch_private.modules import scale_of, uncompiled
from trainfit.torch_private.operators import version

_WINDOW: Final = 512
_OTHER_COUNT: Final = "its accumulation differed from that of the previous step"
_NOT_ZEROED: Final = "the gradients were not zeroed after the previous step"
_CHANGED: Final = "the gradients were changed between two backward passes"


class NoiseScale:
    """Measures the noise scale of ``model`` while its training loop runs unchanged.

        noise = trainfit.batch.NoiseScale(model, batch_size=8)
        ...                      # the training loop
        print(noise)             # noise scale 210 samples (170 to 260), batch 32

    With accumulation the gradient after the first micro-batch is compared with that after the last;
    under DDP a rank's gradient with that of all ranks. Otherwise call :meth:`measure`. Losses,
    gradients and random numbers stay the same to the last bit, nothing waits for the device, and
    nothing is ever raised into the loop: what cannot be measured is said in the result.

    Args:
        model: as it is called: wrapped in DDP, if it is.
        batch_size: samples of a micro-batch, on one rank. See :meth:`samples` for uneven ones.
        loss: is the loss of a micro-batch the mean or the sum over its samples?
        scaler: the GradScaler, so that steps of different loss scales count the same.
        window: measured steps that the estimate is over, the latest.
        every: measure each so many steps (default: so that it costs 1% of the time).
        per_example: with one micro-batch on one device, measure single samples' gradients of
            Linear, LayerNorm and GroupNorm modules (see ``per_example.py``).
    """

    def __init__(
        self,
        model: nn.Module,
        batch_size: int,
        *,
        loss: Loss = "mean",
        scaler: Any = None,
        window: int = _WINDOW,
        every: int | None = None,
        per_example: bool = False,
    ) -> None:
        if batch_size < 1 or window < 1 or (every is not None and every < 1):
            raise ValueError("batch_size, window and every must be at least 1")
        if loss not in ("mean", "sum"):
            raise ValueError(f"loss must be 'mean' or 'sum', got {loss!r}")
        named = [(name, p) for name, p in model.named_parameters() if p.requires_grad]
        self._names = [own_name(name) for name, _ in named]
        self._parameters: list[Tensor] = [p for _, p in named]
        self._places = {id(parameter): n for n, parameter in enumerate(self._parameters)}
        self._batch_size, self._loss = batch_size, loss
        self.scaler, self._fixed_every = scaler, every
        called = uncompiled(model)
        self._ddp = called if isinstance(called, DistributedDataParallel) else None
        processes: Any = getattr(self._ddp, "process_group", None)
        ranks = 1 if self._ddp is None else torch.distributed.get_world_size(processes)
        groups, self._groups = grouped(self._names)
        sizes = [0] * len(groups)
        for group, parameter in zip(self._groups, self._parameters, strict=True):
            sizes[group] += parameter.numel()
        self._log = Log(groups, tuple(sizes), batch_size, ranks, window)
        self._log.fault = _not_measurable(model, self._parameters)
        self._records: Records | None = None
        self._cost = Cost()
        self._sizes: list[int] = []
        self._next_size: int | None = None
        self._is_measured = False
        self._why_not = ""
        self._small: Weights | None = None
        self._was_reduced = False
        self._local: list[tuple[Tensor, int]] = []
        self._versions: list[int] = []
        self._pass = MeasuringPass(model, self._parameters, self._groups, self._cost)
        self._examples = (
            Examples(model, self._parameters, self._groups, self._cost) if per_example else None
        )
        self._passes: BackwardPasses | None = None
        if not self._log.fault:
            self._passes = BackwardPasses(
                self._parameters,
                on_begin=self._pass_begins,
                on_gradient=self._gradient,
                on_end=self._pass_ends,
                on_step=self._step,
                on_fault=self._fault,
                after_reduction=self._ddp is not None,
            )
            self._choose()

    # --- What a user calls ----------------------------------------------------------------------
    def samples(self, count: int) -> None:
        """Say how many samples the next micro-batch has, where that is not ``batch_size``: the last
        of an epoch. Micro-batches of several sizes are weighted by them."""
        self._next_size = count

    def measure(self, loss_of: Callable[[Any], Tensor], batch: Any) -> bool:
        """Measure on a batch without a trace in the training, every N-th call; was it measured?

        For loops without accumulation on one device. ``loss_of`` gives the mean loss of a part of
        ``batch``, forward pass included; the batch is a tensor or dicts, lists and tuples of
        tensors, samples first. Both halves are differentiated; `.grad`, buffers and random states
        stay what they were. The memory at its peak is that of half a batch and two gradients. N is
        such that it costs 2% of the time.
        """
        log = self._log
        if log.fault or log.accumulation > 1 or log.ranks > 1 or self._examples is not None:
            return False
        records = self._ring()
        squares = self._pass.squares(loss_of, batch, records, self._fixed_every)
        if squares is None:
            log.say(self._pass.fault)
            return False
        small, big, weights = squares
        records.put(log.slot, 0, small)
        records.put(log.slot, 1, big)
        log.commit("parts", weights)
        return True

    def result(self) -> NoiseResult:
        """What was measured so far. Waits for the device once."""
        read = self._records.read() if self._records is not None else None
        return summarize(self._log, read, self._cost.share)

    def steps(self) -> tuple[Floats, Floats]:
        """|G|² and tr Σ of each measured step, in order, both without bias (|G|² may be negative).

        To pool several runs: add these before anything is divided. Waits for the device once.
        """
        read = self._records.read() if self._records is not None else None
        return of_steps(self._log, read)

    def save(self, path: str | Path) -> None:
        """Write :meth:`result` to a file that `trainfit batch explain` and `trainfit show` read."""
        self.result().save(Path(path))

    def close(self) -> None:
        """Remove all hooks; the result stays."""
        if self._passes is not None:
            self._passes.close()
            self._passes = None
        if self._examples is not None:
            self._examples.close()

    def __str__(self) -> str:
        return self.result().line

    # --- Called from hooks ----------------------------------------------------------------------
    def _choose(self) -> None:
        """Is the step that begins measured?"""
        every = self._fixed_every or self._cost.every
        self._is_measured = self._log.steps_seen % every == 0
        if self._examples is not None:
            # With several micro-batches or ranks these are what is compared.
            self._examples.is_on = (
                self._is_measured and self._log.accumulation == 1 and self._log.ranks == 1
            )
        if self._passes is not None:
            # A rank's own gradient of a step with one pass exists only within that pass.
            alone = self._ddp is not None and self._log.accumulation == 1
            self._passes.wants_gradients = alone and self._is_measured

    def _pass_begins(self) -> None:
        self._local.clear()

    def _gradient(self, parameter: Tensor) -> None:
        """Before DDP's reduction, which runs in hooks after this one."""
        grad = parameter.grad
        if grad is not None and grad.layout is torch.strided:
            wide = torch.float32 if grad.dtype in (torch.float16, torch.bfloat16) else None
            place = self._place(parameter)
            norm = torch.linalg.vector_norm(grad.detach(), dtype=wide)
            self._local.append((norm, self._groups[place]))

    def _place(self, parameter: Tensor) -> int:
        return self._places[id(parameter)]

    def _pass_ends(self) -> None:
        assert self._passes is not None
        count, log = self._passes.count, self._log
        if count == 1:
            self._sizes.clear()
            self._why_not = ""
            self._small = None
            if self._passes.is_added_to_last:
                self._why_not = _NOT_ZEROED
        self._sizes.append(self._next_size or self._batch_size)
        self._next_size = None
        if not self._is_measured or self._why_not or _is_captured(self._parameters[0].device):
            return
        with torch.no_grad(), self._cost.measured():
            if count == 1:
                self._measure_small()
            if count == log.accumulation and count * log.ranks > 1:
                self._measure_big(count)

    def _measure_small(self) -> None:
        log = self._log
        if self._local:
            norms = [norm for norm, _ in self._local]
            self._ring().add(log.slot, 0, norms, [group for _, group in self._local])
            self._local.clear()
            self._was_reduced = False
        elif log.accumulation > 1:
            grads, groups = self._gradients()
            self._ring().add(log.slot, 0, grads, groups)
            self._versions = [version(grad) for grad in grads]
            self._was_reduced = self._ddp is not None and self._ddp.require_backward_grad_sync
        elif self._examples is not None and log.accumulation == log.ranks == 1:
            self._measure_examples()

    def _measure_examples(self) -> None:
        assert self._examples is not None
        found = self._examples.squares(self._ring(), self._loss)
        log = self._log
        if found is None:
            log.say(self._examples.fault)
            return
        small, big, self._small = found
        self._ring().put(log.slot, 0, small)
        self._ring().put(log.slot, 1, big)

    def _measure_big(self, count: int) -> None:
        log = self._log
        grads, groups = self._gradients()
        if self._ddp is None and _were_changed(grads, self._versions, count):
            self._why_not = _CHANGED
            return
        records = self._ring()
        records.add(log.slot, 1, grads, groups)
        scale = scale_of(self.scaler)
        if isinstance(scale, Tensor):
            records.divide(log.slot, scale)
        weights = first_against_all(self._sizes, self._loss, log.ranks)
        if self._was_reduced:
            reduced = weights.small_t / log.ranks
            weights = Weights(weights.small_g, reduced, weights.big_g, weights.big_t)
        self._small = weights

    def _gradients(self) -> tuple[list[Tensor], list[int]]:
        grads, groups = [], []
        for name, parameter, group in zip(self._names, self._parameters, self._groups, strict=True):
            grad = parameter.grad
            if grad is None:
                continue
            if grad.layout is not torch.strided:
                self._log.left_out.setdefault(name, "its gradient is sparse")
                continue
            grads.append(grad)
            groups.append(group)
        return grads, groups

    def _step(self) -> None:
        assert self._passes is not None
        count, log = self._passes.count, self._log
        if count == 0:
            return
        if self._is_measured and log.accumulation:
            if self._why_not or count != log.accumulation:
                log.leave_out(self._why_not or _OTHER_COUNT)
            elif self._small is not None and self._small.can_tell:
                single = count * log.ranks == 1
                method: Method = "ranks" if log.ranks > 1 else "accumulation"
                log.commit("examples" if single else method, self._small)
        log.accumulation = count
        log.steps_seen += 1
        self._cost.step()
        if log.steps_seen == 1:
            self._note_parameters()
        self._choose()

    def _note_parameters(self) -> None:
        without = [
            name
            for name, parameter in zip(self._names, self._parameters, strict=True)
            if parameter.grad is None
        ]
        if without and len(without) < len(self._parameters):
            self._log.say(
                f"{len(without)} parameters had no gradient in the first step and count as 0, such "
                f"as {without[0]}"
            )

    def _fault(self, reason: str) -> None:
        """Nothing is measured from here on."""
        self._log.fault = self._log.fault or reason
        if self._passes is not None:
            self._passes.is_on = False

    def _ring(self) -> Records:
        if self._records is None:
            device = self._parameters[0].device  # by now the model is where it is trained
            self._records = Records(len(self._log.groups), self._log.window, device)
            self._cost.uses_events = device.type == "cuda"
        return self._records


def _not_measurable(model: nn.Module, parameters: Sequence[Tensor]) -> str:
    """Why nothing can be measured of this model; "": it can."""
    if not parameters:
        return "no parameter of the model requires a gradient"
    kinds = {type(parameter).__name__ for parameter in parameters}
    modules = {type(module).__name__ for module in model.modules()}
    if "DTensor" in kinds or "FullyShardedDataParallel" in modules:
        return (
            "FSDP shards the gradients; measure in a run with DDP or on one device, as the noise "
            "scale is the same"
        )
    if any(hasattr(parameter, "ds_id") for parameter in parameters):
        return "ZeRO shards the gradients; measure in a run with DDP or on one device"
    if any(isinstance(parameter, nn.parameter.UninitializedParameter) for parameter in parameters):
        return "the model has uninitialized parameters; run one forward pass first"
    return ""


def _were_changed(grads: Sequence[Tensor], versions: Sequence[int], count: int) -> bool:
    """More in-place changes since the first pass than accumulation makes: clipped, unscaled.

    A parameter that gets its first gradient in a later pass makes the lists differ; then nothing is
    known, and it is no change.
    """
    if len(grads) != len(versions):
        return False
    return any(
        version(grad) - before > count - 1 for grad, before in zip(grads, versions, strict=True)
    )


def _is_captured(device: torch.device) -> bool:
    """Is a CUDA graph recorded? Its replays would all write one record."""
    return device.type == "cuda" and torch.cuda.is_current_stream_capturing()
