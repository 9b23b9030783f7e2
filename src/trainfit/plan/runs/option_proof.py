"""Do a command's options mean what their names say?

A detected tunable (:mod:`trainfit.plan.runs.options`) is used only where a run with another
value of it shows that value in the DataLoader, in autocast or in the makeup of an optimizer step.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping
from typing import Final

from trainfit.hardware import GpuSpec
from trainfit.plan.command.parsing import Command
from trainfit.plan.command.precision import other_value
from trainfit.plan.command.tunables import LOADER_TUNABLES, as_switch
from trainfit.plan.runs.batches import most_full, pairs_of
from trainfit.plan.runs.failures import NotSimulated, what_happened
from trainfit.plan.runs.options import (
    BatchSource,
    CommandOptions,
    ObservedSettings,
    is_part_of_rows,
    observed_settings,
)
from trainfit.plan.runs.processes import WarmProcesses
from trainfit.plan.runs.runs import Runs
from trainfit.plan.runs.tracing import Trace, Tracer
from trainfit.results.runs.spec import AS_WRITTEN, RunSpec
from trainfit.simgpu.device.settling import LEAST_STEPS

#: Dtypes of autocast that a value for ``{amp}`` names; others only switch it.
_DTYPES: Final = {
    **dict.fromkeys(("bf16", "bfloat16", "bf16-mixed", "amp_bf16"), "bfloat16"),
    **dict.fromkeys(("fp16", "float16", "16-mixed", "amp_fp16", "16"), "float16"),
}
#: Values that switch it off, in addition to those that mean off.
_OFF: Final = ("no", "none", "None", "fp32", "float32", "32-true", "32")


@dataclasses.dataclass(frozen=True)
class Effect:
    """Whether a tunable's value had its effect in a run; ``None``: the run cannot tell. ``seen`` is
    what it had instead, in words."""

    name: str
    value: str
    had: bool | None
    seen: str = ""


def check(command: Command, values: Mapping[str, str], tracer: Tracer) -> tuple[Effect, ...]:
    """The effects of ``values``, by one simulated run of ``command`` with all of them.

    ``tracer`` is one of ``command``. A run that comes to no optimizer step tells nothing of any.
    """
    trace = tracer.trace(RunSpec(values=values))
    if not trace.outcome.steps:
        why = what_happened(trace.outcome)
        return tuple(Effect(name, value, None, why) for name, value in values.items())
    seen = observed_settings(trace)
    return tuple(_effect(name, value, seen) for name, value in values.items())


def _effect(name: str, value: str, observed: ObservedSettings) -> Effect:
    if name == "batch_size":
        shown = observed.loader_batch if observed.loader_batch is not None else observed.call_batch
        shows = observed.loader_batch, observed.batch_of_all, observed.call_batch
        had: bool | None = value in map(str, shows)
        if not had and observed.loader_batch in (None, 1) and is_part_of_rows(value, observed):
            had = None
        return Effect(name, value, had, f"batch size {shown}")
    if name == "grad_accum":
        known = observed.accumulation
        follows = None if known is None else value == str(known)
        return Effect(name, value, follows, f"{known} micro-batches a step")
    if name == "amp":
        return Effect(name, value, _has_precision(value, observed.autocast), _autocast(observed))
    if observed.loader is None:
        return Effect(name, value, None, "no DataLoader fed the first step")
    if name in ("prefetch_factor", "persistent_workers") and not observed.loader.num_workers:
        return Effect(name, value, None, "it has no effect without workers")
    now = getattr(observed.loader, name)
    shown_now = f"the DataLoader has {name}={now}"
    if name in ("pin_memory", "persistent_workers"):
        return Effect(name, value, as_switch(value) == now, shown_now)
    if value.lower() in ("none", "null"):  # left to PyTorch
        return Effect(name, value, None, shown_now)
    return Effect(name, value, value == str(now), shown_now)


def _has_precision(value: str, autocast: str | None) -> bool:
    if value in _OFF or as_switch(value) is False:
        return autocast is None
    dtype = _DTYPES.get(value)
    return autocast is not None if dtype is None else autocast == dtype


def _autocast(observed: ObservedSettings) -> str:
    return f"autocast is {observed.autocast or 'off'}"


def proven_settings(
    options: CommandOptions,
    values: Mapping[str, str],
    gpu: GpuSpec,
    time_limit_s: float,
    warm: WarmProcesses | None = None,
) -> CommandOptions:
    """``options``, with those of the DataLoader as proven that have their effect at ``values``.

    A simulated run of one step is made where there is something to prove.
    """
    command = options.command
    supposed = {name: command.present[name] for name in command.supposed & set(LOADER_TUNABLES)}
    wanted = {
        name: values[name]
        for name, present in supposed.items()
        if values.get(name, present) != present
    }
    if not wanted:
        return options
    with Tracer(command, gpu, steps=1, time_limit_s=time_limit_s, warm=warm) as tracer:
        effects = check(command, wanted, tracer)
    return options.proven([effect.name for effect in effects if effect.had])


# -- what a plan needs -------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class _Proof:
    """A run that shows whether the tunable ``name`` is what it seems, at ``value``."""

    name: str
    value: str
    batch: int | None
    spec: RunSpec


def proven(
    options: CommandOptions, runs: Runs, first: Trace, batch: int | None, gpu: GpuSpec
) -> CommandOptions:
    """``options`` without those whose runs show no effect; ``runs`` make the command with them.

    The runs are those that a plan needs in any case, but for an accumulation's. Options of the
    DataLoader stay as they are: nothing but :func:`check` varies them.
    """
    runs.use(options.command)
    proofs = list(_proofs(options, first, batch, gpu))
    for proof in proofs:
        runs.start(proof.batch, proof.spec)
    refused: dict[str, str] = {}
    for proof in proofs:
        why = _refusal(options, proof, runs, observed_settings(first))
        if why:
            refused[proof.name] = why
            runs.drop(proof.batch, proof.spec)
    options = options.proven([each.name for each in proofs])
    if refused:
        options = options.without(refused)
        runs.use(options.command)
    return options


def _proofs(
    options: CommandOptions, first: Trace, batch: int | None, gpu: GpuSpec
) -> Iterator[_Proof]:
    if options.option("batch_size") is not None and batch is not None:
        other = _other_batch(batch, most_full(first, batch))
        yield _Proof("batch_size", str(other), other, AS_WRITTEN)
    if options.option("amp") is not None:
        is_on = first.outcome.half is not None
        value = other_value(options.command, gpu, is_on=is_on)
        if value is not None:
            yield _Proof("amp", value, batch, RunSpec(values={"amp": value}))
    accumulation = options.option("grad_accum")
    if accumulation is not None and accumulation.present != "1":
        # One that is 1 limits nothing; it is proven when it is to become something else.
        values, title = {"grad_accum": "1"}, f"{accumulation.shown} 1"
        spec = RunSpec(values=values, steps=LEAST_STEPS, title=title)
        yield _Proof("grad_accum", "1", batch, spec)


def _other_batch(batch: int, limit: int | None) -> int:
    """The other batch size of the pair that a rule is derived from."""
    for pair in pairs_of(batch, limit):
        return next(size for size in reversed(pair) if size != batch)
    return max(1, batch // 2) if batch > 1 else 2


def _refusal(options: CommandOptions, proof: _Proof, runs: Runs, before: ObservedSettings) -> str:
    """Why an option is not what it seems; empty where it is."""
    option = options.option(proof.name)
    assert option is not None
    text = f"with {option.shown} {proof.value}"
    try:
        trace = runs.attempt(proof.batch, proof.spec)
    except NotSimulated:
        return "no run has shown its effect"
    if not trace.outcome.steps:
        return f"{text} {what_happened(trace.outcome)}"
    seen = observed_settings(trace)
    if proof.name == "batch_size":
        if option.source == "rows":
            return _rows_refusal(text, int(proof.value), seen, int(option.present), before)
        return _batch_refusal(text, int(proof.value), seen, option.source)
    if proof.name == "amp":
        same = (seen.autocast is None) == (before.autocast is None)
        return f"{text} {_autocast(seen)}, as before" if same else ""
    known = seen.accumulation
    return "" if known == int(proof.value) else f"{text} a step has {known} micro-batches"


def _batch_refusal(text: str, wanted: int, observed: ObservedSettings, source: BatchSource) -> str:
    shown = observed.batch(source)
    whose = {"loader": "the DataLoader's is", "loaders": "that of all ranks' DataLoaders is"}
    what = whose.get(source, "the model is called with")
    return "" if shown == wanted else f"{text} {what} {shown}"


def _rows_refusal(
    text: str, wanted: int, observed: ObservedSettings, present: int, before: ObservedSettings
) -> str:
    """A step's rows follow in proportion, also where its calls come in pieces of a fixed size."""
    now, then = observed.call_rows or 0, before.call_rows or 0
    if now * present == then * wanted:
        return ""
    return f"{text} a step's calls of the model have {now} rows, not {then * wanted // present}"


def accumulates(runs: Runs, batch: int, value: str, amp: str | None, *, by_framework: bool) -> str:
    """Why the option for accumulation does not keep what is learned at a batch size; empty where
    it does: a step has so many micro-batches, and their losses are divided by that number, which
    a framework's loop (``by_framework``) does by itself."""
    values = {"grad_accum": value} if amp is None else {"grad_accum": value, "amp": amp}
    try:
        trace = runs.attempt(batch, RunSpec(values=values))
    except NotSimulated:
        return "no run has shown its effect"
    if not trace.outcome.steps:
        return what_happened(trace.outcome)
    known = observed_settings(trace).accumulation
    if known != int(value):
        return f"a step has {known} micro-batches"
    if by_framework or int(value) == 1 or trace.outcome.learning.is_divided:
        return ""
    if trace.outcome.learning.is_divided is None:
        return "it cannot be told whether the loss is divided by the number of micro-batches"
    return "the losses of micro-batches are added, not averaged"
