"""The DataLoader's part of a plan: settings at the recommended batch size, the bottleneck."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

from trainfit.plan.command.parsing import Command, parse_command
from trainfit.plan.command.tunables import LOADER_TUNABLES, literal, present_settings
from trainfit.plan.dataloader.batch_limit import kept_batch
from trainfit.plan.dataloader.other_cpu import (
    CoreHere,
    OtherInput,
    is_another,
    other_input,
    settings_there,
)
from trainfit.plan.dataloader.tuned_batch import launched_batch, scaled, tuned_batch, within_memory
from trainfit.plan.launch.build import launch_values
from trainfit.plan.sizing.effective_batch import accumulation_for
from trainfit.plan.sizing.notes import MAY_CHANGE, Notes
from trainfit.plan.steps.speed import fast_end
from trainfit.results.files.errors import TrainfitError
from trainfit.results.files.notes import complete
from trainfit.results.format import duration
from trainfit.results.loader.result import LoaderResult
from trainfit.results.loader.settings import LoaderSettings
from trainfit.results.plan.loading import Bottleneck, DataLoading
from trainfit.results.plan.result import PlanResult
from trainfit.results.plan.run_rate import KEEPS_UP
from trainfit.results.runs.loading import Consumer

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
    failure, found = "", None
    if not plan.can_start:
        failure = "the job does not fit; make it fit first (see above)"
    else:
        try:
            found = tune(tuned_command(plan, command, batch))
        except TrainfitError as error:
            failure = str(error)
        except Exception as error:  # what has been planned must not be lost to it
            failure = f"{type(error).__name__}: {error}; run `trainfit loader` to see where"
    if found is None:
        loading = DataLoading(None, batch, step_is_bound, failure=" ".join(failure.split()))
        return dataclasses.replace(plan, loading=loading)
    loading = DataLoading(
        *(found, found.probe.batch_size or batch, step_is_bound, *bottleneck(found)),
    )
    if not is_another(plan.cpu):
        plan = kept_batch(dataclasses.replace(plan, loading=loading))
    settings = within_memory(found, launched_batch(plan))
    if settings != found.recommended:
        loading = dataclasses.replace(loading, launched=settings)
    there = other_input(found, plan.cpu, here or CoreHere(None))
    if there is not None:
        loading = _with_input(loading, there)
        if is_another(plan.cpu):
            loading = dataclasses.replace(loading, launched=settings_there(found, there))
    plan = dataclasses.replace(plan, loading=loading)
    notes = _notes(plan, command, found)
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
    return parse_command([literal(word) for word in command.fill(**values)])


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


def bottleneck(found: LoaderResult) -> tuple[Bottleneck, float | None]:
    """Which part makes the other wait with the recommended settings, and by how much."""
    rate = found.rate(found.recommended)
    if found.step_s <= 0 or not rate:
        return "unknown", None
    ratio = 1 / found.step_s / rate
    if ratio > 1 + KEEPS_UP:
        return "loader", ratio
    alone = _alone(found, found.recommended)
    return "gpu", max(1.0, alone * found.step_s) if alone is not None else None


def _alone(found: LoaderResult, settings: LoaderSettings) -> float | None:
    """Batches per second of the loader alone, as the model says."""
    candidate = found.candidate(settings)
    return candidate.alone_batches_per_s if candidate is not None else None


def _notes(plan: PlanResult, command: Command, found: LoaderResult) -> Notes:
    notes = Notes()
    for doubt in found.doubts:
        notes.add(f"{doubt.summary}: {doubt.meaning}", MAY_CHANGE)
    stated = present_settings(command.present)
    real = {name: getattr(found.present, name) for name in stated}
    if not found.present.num_workers:  # PyTorch accepts neither then
        stated.pop("prefetch_factor", None)
    for name, value in stated.items():
        if value is not None and value != real[name]:
            notes.add(
                f"the command says {name} {command.present[name]}, the DataLoader ({found.loader}) "
                f"has {real[name]}: put {{{name}}} into the option that sets it",
                kind="action",
            )
    if not found.recommended.num_workers and found.present.num_workers:
        notes.add(
            "without workers PyTorch refuses a prefetch_factor, persistent_workers and a "
            "multiprocessing_context: leave them out of the DataLoader",
            kind="action",
        )
    notes += _note_batch(plan, command, found)
    return notes


def _note_batch(plan: PlanResult, command: Command, found: LoaderResult) -> list[str]:
    """Where the loader was not tuned at the recommended batch size: why not."""
    best, tuned = plan.chosen.recommended_batch, found.probe.batch_size
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
        why = f"the DataLoader ({found.loader}) does not get it from the command"
    return [f"the DataLoader was tuned at batch size {tuned}, not at {best}: {why}"]
