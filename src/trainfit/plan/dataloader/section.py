"""The DataLoader's part of a plan: settings at the recommended batch size, the bottleneck.

Here is also at which batch size it is measured, and what its speed means for the batch size.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable, Iterable
from typing import Final

from trainfit.hardware import GpuSpec
from trainfit.plan.command.parsing import Command, parse_command
from trainfit.plan.command.tunables import LOADER_TUNABLES, literal, present_settings
from trainfit.plan.dataloader.measurement import call_on_loader, tune_command
from trainfit.plan.dataloader.other_cpu import (
    CoreHere,
    OtherInput,
    is_another,
    other_input,
    settings_there,
)
from trainfit.plan.launch_line import launch_values, launched_loader
from trainfit.plan.runs.option_proof import proven_settings
from trainfit.plan.runs.options import CommandOptions
from trainfit.plan.runs.processes import WarmProcesses
from trainfit.plan.runs.progress import MAY_CHANGE, Notes
from trainfit.plan.sizing.recommendation import CURVE_ERROR, accumulation_for
from trainfit.plan.sizing.speed import fast_end
from trainfit.results.configuration import BatchLimits, Configuration
from trainfit.results.dataloader import LoaderSettings
from trainfit.results.files.contents import complete
from trainfit.results.files.errors import TrainfitError
from trainfit.results.findings import Finding
from trainfit.results.loader import BUSY, LoaderResult
from trainfit.results.plan import KEEPS_UP, HostCpu, PlanResult
from trainfit.results.runs.measurement import Consumer
from trainfit.results.runs.spec import LoaderSpec, RunSpec, TuningSpec
from trainfit.results.speed import Bottleneck, DataLoading
from trainfit.results.text import duration, rate

# ---
# A larger batch gains nothing where the DataLoader gives fewer samples/s than the GPU uses
# at the current one.


#: By how much the GPU must be faster: a loader's rate is good to some percent.
_CLEARLY: Final = 1.1
#: The same where the loader's rate is predicted, from runs that other processes disturbed.
_PREDICTED: Final = 2.0


def kept_batch(plan: PlanResult) -> PlanResult:
    """``plan`` with the current batch size instead of a larger one, where the DataLoader with the
    recommended settings is clearly the limit at both; as it is where that cannot be told."""
    present, best = plan.now.batch_size, plan.chosen.recommended_batch
    given, wanted = _given(plan), _taken(plan)
    if not present or not best or best <= present or not plan.now.fits:
        return plan
    evidence = plan.loading.evidence if plan.loading is not None else ""
    least = _PREDICTED if evidence == "busy" else _CLEARLY
    if given is None or wanted is None or wanted < least * given:
        return plan
    marked = f" ({BUSY})" if evidence == "busy" else ""
    reason = (
        f"the DataLoader gives {rate(given)} samples/s{marked}, the GPU at least "
        f"{rate(wanted)} at batch size {present}: a larger batch gains nothing"
    )
    kept = _kept(plan.chosen, present, reason)
    memory = plan.chosen.memory
    changed = dataclasses.replace(plan, recommended=memory, batch_check=None)
    return _with_chosen(changed, kept)


def with_reachable_option(plan: PlanResult) -> PlanResult:
    """``plan`` with no more of a gain by another batch size than its DataLoader's rate allows; with
    no such option where that is none."""
    chosen, limits = plan.chosen, plan.chosen.limits
    option, given = limits.option if limits is not None else None, _given(plan)
    best = chosen.recommended_batch
    step = plan.speed.at(best) if plan.speed is not None and best else None
    if limits is None or option is None or given is None or not step or not step.samples_per_s:
        return plan
    is_busy = plan.loading is not None and plan.loading.evidence == "busy"
    gain = min(option.gain, given * (_PREDICTED if is_busy else 1.0) / step.samples_per_s)
    if gain > 1 + CURVE_ERROR:
        limits = dataclasses.replace(limits, option=dataclasses.replace(option, gain=gain))
    else:
        marked = f" ({BUSY})" if is_busy else ""
        given_text = f"the DataLoader gives {rate(given)} samples/s{marked}"
        reason = f"{given_text}: a larger batch gains nothing"
        limits = dataclasses.replace(limits, option=None, reason=f"{limits.reason}; {reason}")
    return _with_chosen(plan, dataclasses.replace(chosen, limits=limits))


def _with_chosen(plan: PlanResult, chosen: Configuration) -> PlanResult:
    """``plan`` with another :attr:`~trainfit.results.plan.PlanResult.chosen`."""
    choice = plan.amp_choice
    if choice is None or choice.configuration is None:
        return dataclasses.replace(plan, now=chosen)
    choice = dataclasses.replace(choice, configuration=chosen)
    return dataclasses.replace(plan, amp_choice=choice)


def _kept(configuration: Configuration, present: int, reason: str) -> Configuration:
    limits = configuration.limits or BatchLimits(None, None)
    limits = dataclasses.replace(limits, reason=reason, epoch_steps=None, option=None)
    return dataclasses.replace(configuration, recommended_batch=present, limits=limits)


def _given(plan: PlanResult) -> float | None:
    """Samples a second of the DataLoader with the recommended settings."""
    found = plan.loading.result if plan.loading is not None else None
    if found is None or not found.probe.batch_size:
        return None
    batches = found.rate(found.recommended)
    return batches * found.probe.batch_size if batches else None


def _taken(plan: PlanResult) -> float | None:
    """Samples a second of the GPU at the current batch size: the slow end of what is predicted."""
    step = plan.speed.now if plan.speed is not None else None
    if not plan.batch_in_command or step is None or not step.samples_per_s:
        return None
    return step.samples_per_s * step.seconds / step.range_s[1]


# ---
# The batch size at which a command's DataLoader is measured, and its consequences for another
# one.


#: Seconds that loading one batch may take in measurements: with longer ones, runs of some batches
#: each take minutes, and say no more of a sample.
_LONGEST_S: Final = 0.25


def launched_batch(plan: PlanResult) -> int | None:
    """The recommended batch size, where the command has it and the data set fills one; else the
    present one, for that is what its DataLoader gives."""
    best = plan.chosen.recommended_batch
    if not best or not plan.batch_in_command or (plan.samples is not None and best > plan.samples):
        return plan.now.batch_size
    return best


def tuned_batch(plan: PlanResult) -> int | None:
    """The launched one; smaller if loading it is slow, but never below the current one."""
    batch, present, sample_s = launched_batch(plan), plan.now.batch_size, plan.sample_loading_s
    if not batch or not present or not sample_s or batch * sample_s <= _LONGEST_S:
        return batch
    return min(batch, max(present, int(_LONGEST_S / sample_s)))


def scaled(step: Consumer, plan: PlanResult) -> Consumer:
    """The step of the launched batch size for the batches that are measured: both have the same
    samples a second."""
    batch, tuned = launched_batch(plan), tuned_batch(plan)
    if not batch or not tuned or batch == tuned:
        return step
    share = tuned / batch
    return Consumer(
        share * step.step_s,
        share * step.work_s,
        share * step.pageable_s,
        f"{step.source}, scaled to {tuned} of {batch} samples",
    )


def within_memory(result: LoaderResult, batch: int | None) -> LoaderSettings:
    """The recommended settings, with fewer batches under way where those of ``batch`` samples do
    not fit the shared memory and the RAM that are free."""
    settings, probe = result.recommended, result.probe
    room = [
        each
        for each in (result.machine.shm_free_bytes, result.machine.available_bytes)
        if each is not None
    ]
    if not batch or not probe.batch_size or batch <= probe.batch_size or not room:
        return settings
    maximum = min(room) * probe.batch_size / (batch * max(1, probe.batch_bytes))
    while settings.tokens + 1 > maximum:
        if settings.prefetch_factor > 1:
            less = settings.prefetch_factor - 1
            settings = dataclasses.replace(settings, prefetch_factor=less)
        elif settings.num_workers > 1:
            settings = dataclasses.replace(settings, num_workers=settings.num_workers - 1)
        else:
            break
    return settings


# ---
# The DataLoader is tuned at that batch size.


#: Seconds of a probe, and real runs that confirm it; in a thorough plan.
_PROBE_S, _CONFIRM = 12.0, 2
_THOROUGH_S, _THOROUGH_CONFIRM = 20.0, 4
#: How often the probe's time all of the DataLoader's measuring may take at most.
_MEASURING: Final = 10


def plan_tuning(
    *, thorough: bool, step: Consumer | None = None, seconds: float | None = None
) -> TuningSpec:
    """How a plan tunes the DataLoader: in less time than ``trainfit loader`` takes, unless it is
    ``thorough`` or its probe gets ``seconds``."""
    usual = _THOROUGH_S if thorough else _PROBE_S
    confirm = _THOROUGH_CONFIRM if thorough else _CONFIRM
    return TuningSpec(step, step is None, seconds or usual, confirm, thorough)


def tuned(
    plan: PlanResult,
    options: CommandOptions,
    gpu: GpuSpec,
    time_limit_s: float,
    tuning: TuningSpec,
    progress: Callable[[str], None],
    warm: WarmProcesses | None = None,
) -> tuple[PlanResult, Command, KeyboardInterrupt | None]:
    """``plan`` with what real runs of the DataLoader showed, those before the user's interrupt if
    one ended them; and the command that is launched, with those options that set the DataLoader.

    The script has ``time_limit_s`` for its way to its first step.
    """
    command = options.proven_command

    def spec() -> RunSpec:
        found = dataclasses.replace(tuning, step=tuning.step or predicted_step(plan))
        probe_s = _THOROUGH_S if tuning.seconds == _PROBE_S else tuning.seconds
        limit_s = time_limit_s + _MEASURING * probe_s
        loading = LoaderSpec(found, script_limit_s=time_limit_s)
        return RunSpec(gpu=gpu, time_limit_s=limit_s, loading=loading)

    plan = with_sample_cost(
        plan,
        lambda batch: tuned_command(plan, command, batch),
        lambda filled: timed_samples(filled, spec(), progress),
    )

    interrupts: list[KeyboardInterrupt] = []

    def tune(filled: Command) -> LoaderResult:
        found = tune_command(filled, spec(), progress)
        if found.interrupt is not None:
            interrupts.append(found.interrupt)
        return without_told(found.result, plan.findings)

    here = _core_here(plan.cpu)
    plan = with_loading(plan, command, tune, step_is_bound=tuning.step is None, here=here)
    if not interrupts:
        try:
            command = with_loader_options(plan, options, gpu, time_limit_s, warm)
        except KeyboardInterrupt as error:
            interrupts.append(error)
    return plan, command, next(iter(interrupts), None)


#: What a DataLoader's check finds, and what the script's text says of it with its line.
_ALSO_TOLD: Final = {"data_changed": "samples_changed"}


def without_told(result: LoaderResult, known: Iterable[Finding]) -> LoaderResult:
    """What was found of a DataLoader without the faults that a plan tells with their lines."""
    kinds = {finding.kind for finding in known}

    def left(faults: tuple[Finding, ...]) -> tuple[Finding, ...]:
        return tuple(fault for fault in faults if _ALSO_TOLD.get(fault.kind) not in kinds)

    probe = dataclasses.replace(result.probe, faults=left(result.probe.faults))
    return dataclasses.replace(result, faults=left(result.faults), probe=probe)


def _core_here(cpu: HostCpu | None) -> CoreHere | None:
    """A core of this machine, measured where it is to be compared with another's."""
    if cpu is None or cpu.core_speed is not None:
        return None
    return CoreHere.measured() if cpu.core_hz is not None or cpu.kind else None


#: Finds the settings of a command's DataLoader; raises ``TrainfitError`` where it cannot.
Tune = Callable[[Command], LoaderResult]


def is_tuned(plan: PlanResult, command: Command, *, asked: bool) -> bool:
    """Is the DataLoader of ``command`` to be tuned: ``asked`` for it, by a placeholder of the
    command too, or because training reads batches from it?"""
    if asked or any(name in command.present for name in LOADER_TUNABLES):
        return True
    return plan.can_start and plan.loader_at is not None and plan.inference is None


def with_loading(
    plan: PlanResult,
    command: Command,
    tune: Tune,
    *,
    step_is_bound: bool = True,
    here: CoreHere | None = None,
) -> PlanResult:
    """``plan`` with its ``loading``.

    ``tune`` gets the command at the recommended batch size. Whatever goes wrong in it, the
    memory part of the plan stays, and ``loading.failure`` says what it was. ``here`` is a core of
    this machine, for another processor's input (``plan.cpu``).
    """
    batch = tuned_batch(plan)
    failure, loader_result = "", None
    if not plan.can_start:
        failure = "the job does not fit; make it fit first (see above)"
    else:
        try:
            loader_result = tune(tuned_command(plan, command, batch))
        except TrainfitError as error:
            failure = str(error)
        except Exception as error:  # what has been planned must not be lost to it
            failure = f"{type(error).__name__}: {error}; run `trainfit loader` to see where"
    if loader_result is None:
        loading = DataLoading(None, batch, step_is_bound, failure=" ".join(failure.split()))
        return dataclasses.replace(plan, loading=loading)
    loading = DataLoading(
        *(
            loader_result,
            loader_result.probe.batch_size or batch,
            step_is_bound,
            *bottleneck(loader_result),
        ),
    )
    if not is_another(plan.cpu):
        plan = with_reachable_option(kept_batch(dataclasses.replace(plan, loading=loading)))
    settings = within_memory(loader_result, launched_batch(plan))
    if settings != loader_result.recommended:
        loading = dataclasses.replace(loading, launched=settings)
    there = other_input(loader_result, plan.cpu, here or CoreHere(None))
    if there is not None:
        loading = _with_input(loading, there)
        if is_another(plan.cpu):
            loading = dataclasses.replace(loading, launched=settings_there(loader_result, there))
    plan = dataclasses.replace(plan, loading=loading)
    notes = _notes(plan, command, loader_result)
    return dataclasses.replace(
        plan,
        notes=(*plan.notes, *notes),
        structured_notes=tuple(
            complete((*plan.structured_notes, *notes.structured()), (), plan.assumptions)
        ),
    )


def tuned_command(plan: PlanResult, command: Command, batch: int | None) -> Command:
    """The command that is measured: as it is launched, at ``batch`` samples."""
    values = dict(launch_values(plan, command, None))
    if "batch_size" in command.present and batch is not None:
        values["batch_size"] = str(batch)
        present, by_noise = plan.now.batch_size, plan.chosen.by_noise
        values |= accumulation_for(command, plan.step, present, batch, by_noise).values
    words = [literal(word) for word in command.fill(**values)]
    filled = parse_command(words, several=True)
    if command.launcher is not None:
        filled = filled.on(command.launcher.gpus)
    return dataclasses.replace(filled, sandbox=command.sandbox)


def _with_input(loading: DataLoading, there: OtherInput) -> DataLoading:
    return dataclasses.replace(
        loading,
        input_at_most=there.batches_per_s,
        input_range=there.range,
        input_basis=there.basis,
        input_workers=there.num_workers,
    )


def predicted_step(plan: PlanResult) -> Consumer | None:
    """The step that the loader has to keep up with; ``None`` where none is predicted.

    The lower bound of the interval: a loader that keeps up with that keeps up.
    """
    if plan.speed is None:
        return None
    step = plan.speed.at(launched_batch(plan)) or plan.speed.now
    return scaled(fast_end(step, plan.gpu, plan.step), plan)


def bottleneck(result: LoaderResult) -> tuple[Bottleneck, float | None]:
    """The part that makes the other wait with the recommended settings, and by how much."""
    rate = result.rate(result.recommended)
    if result.step_s <= 0 or not rate:
        return "unknown", None
    ratio = 1 / result.step_s / rate
    if ratio > 1 + KEEPS_UP:
        return "loader", ratio
    alone = _alone(result, result.recommended)
    return "gpu", max(1.0, alone * result.step_s) if alone is not None else None


def _alone(result: LoaderResult, settings: LoaderSettings) -> float | None:
    """Batches per second of the loader alone, as the model says."""
    candidate = result.candidate(settings)
    return candidate.alone_batches_per_s if candidate is not None else None


def _notes(plan: PlanResult, command: Command, result: LoaderResult) -> Notes:
    notes = Notes()
    for doubt in result.doubts:
        notes.add(f"{doubt.title}: {doubt.cause}", MAY_CHANGE)
    stated = present_settings(command.present)
    real = {name: getattr(result.present, name) for name in stated}
    if not result.present.num_workers:  # PyTorch accepts neither then
        stated.pop("prefetch_factor", None)
    for name, value in stated.items():
        if value is not None and value != real[name]:
            notes.add(
                f"the command says {name} {command.present[name]}, the DataLoader "
                f"({result.loader}) has {real[name]}: put {{{name}}} into the option that sets it",
                kind="action",
            )
    if not result.recommended.num_workers and result.present.num_workers:
        notes.add(
            "without workers PyTorch refuses a prefetch_factor, persistent_workers and a "
            "multiprocessing_context: leave them out of the DataLoader",
            kind="action",
        )
    notes += _note_batch(plan, command, result)
    return notes


def _note_batch(plan: PlanResult, command: Command, result: LoaderResult) -> list[str]:
    """A note on why the loader was not tuned at the recommended batch size; empty where it was."""
    best, tuned = plan.chosen.recommended_batch, result.probe.batch_size
    if not best or tuned is None or tuned == best:
        return []
    if plan.sample_loading_s and plan.batch_in_command and tuned > best:
        return []  # what it was measured for won nothing: see batch_limit
    why = "write {batch_size:N} into the command"
    if plan.samples is not None and best > plan.samples:
        why = f"the data set has only {plan.samples} samples"
    elif tuned == tuned_batch(plan) and plan.sample_loading_s and tuned < best:
        long = duration(best * plan.sample_loading_s)
        why = f"loading it needs {long} here; rates are scaled to the same samples/s"
    elif "batch_size" in command.present:
        why = f"the DataLoader ({result.loader}) does not get it from the command"
    return [f"the DataLoader was tuned at batch size {tuned}, not at {best}: {why}"]


# ---
# Measures what a sample needs to be loaded where the simulated run made it look slow.
#
# On the simulated device a data set's own tensors are slow: each operator of PyTorch passes through
# the simulation. A loader is measured at a smaller batch size only where its samples really are
# slow.


#: Seconds that a sample of a command's DataLoader needs; ``None``: could not be measured.
TimeSamples = Callable[[Command], float | None]


def with_sample_cost(
    plan: PlanResult, command: Callable[[int | None], Command], time_samples: TimeSamples
) -> PlanResult:
    """``plan`` with a measured time to load a sample, where its DataLoader would be measured at a
    smaller batch size than is launched otherwise. ``command`` gives the one of a batch size."""
    if not plan.can_start or tuned_batch(plan) == launched_batch(plan):
        return plan
    try:
        sample_s = time_samples(command(tuned_batch(plan)))
    except Exception:  # what is wrong with it, tuning says; what has been planned must not be lost
        return plan
    return plan if sample_s is None else dataclasses.replace(plan, sample_loading_s=sample_s)


def timed_samples(command: Command, spec: RunSpec, progress: Callable[[str], None]) -> float | None:
    """:data:`TimeSamples` in a child process."""
    loading = dataclasses.replace(spec.loading or LoaderSpec(), task="time samples")
    loaded = call_on_loader(command, dataclasses.replace(spec, loading=loading), progress)
    if loaded.interrupt is not None:
        raise loaded.interrupt
    found = json.loads(loaded.result) if loaded.result else {}
    sample_s: float | None = found.get("sample_s")
    return sample_s


# ---
# Do a script's own options set its DataLoader as the launch command wants it? One run shows.


def with_loader_options(
    plan: PlanResult,
    options: CommandOptions,
    gpu: GpuSpec,
    time_limit_s: float,
    warm: WarmProcesses | None,
) -> Command:
    """The command with its proven tunables and those options of the DataLoader that have their
    effect at the recommended values; the others are left to the user.

    A simulated run of one step is made where there is something to prove, forked from a process of
    ``warm`` if that is given.
    """
    loader_result = launched_loader(plan.loading)
    values = (
        launch_values(plan, options.command, loader_result) if loader_result is not None else {}
    )
    return proven_settings(options, values, gpu, time_limit_s, warm).proven_command
