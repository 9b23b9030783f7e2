"""The DataLoader's part of a plan: settings at the recommended batch size, the bottleneck."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import Final

from trainfit.plan.command import Command, parse_command
from trainfit.plan.effective_batch import accumulation_for
from trainfit.plan.launch import launch
from trainfit.plan.notes import MAY_CHANGE, Notes
from trainfit.plan.other_cpu import (
    CoreHere,
    OtherInput,
    is_another,
    other_input,
    settings_there,
)
from trainfit.plan.speed import fast_end
from trainfit.plan.tunables import (
    LOADER_TUNABLES,
    literal,
    loader_values,
    present_settings,
)
from trainfit.results.errors import TrainfitError
from trainfit.results.loader import LoaderResult, LoaderSettings
from trainfit.results.loading import StepTime
from trainfit.results.notes import complete
from trainfit.results.plan import Bottleneck, DataLoading, PlanResult, rate_of

#: Finds the settings of a command's DataLoader; raises ``TrainfitError`` where it cannot.
Tune = Callable[[Command], LoaderResult]

#: A loader that is slower than the GPU by less than this keeps up: the smallest settings within
#: 2% of the best are chosen, and a short run's rate is good to some percent.
_KEEPS_UP: Final = 0.05


def has_loader_tunables(command: Command) -> bool:
    """Does the command hold a placeholder that is filled by tuning its DataLoader?"""
    return any(name in command.present for name in LOADER_TUNABLES)


def with_loading(
    plan: PlanResult,
    command: Command,
    tune: Tune,
    *,
    step_is_bound: bool = True,
    here: CoreHere | None = None,
) -> PlanResult:
    """``plan`` with its ``loading``, and the launch command with the recommended settings.

    ``tune`` gets the command at the recommended batch size. Whatever goes wrong in it, the
    memory part of the plan stays, and ``loading.failure`` says what it was. ``here`` is a core of
    this machine, for another processor's input (``plan.cpu``).
    """
    batch = _batch(plan)
    amp = _amp(plan, command)
    values = dict(amp)
    if "batch_size" in command.present and batch is not None:
        values["batch_size"] = str(batch)
        values |= accumulation_for(command, plan.step, plan.now.batch_size, batch).values
    failure, found = "", None
    if not plan.can_start:
        failure = "the job does not fit; make it fit first (see above)"
    else:
        try:
            found = tune(_with(command, values))
        except TrainfitError as error:
            failure = str(error)
        except Exception as error:  # what has been planned must not be lost to it
            failure = f"{type(error).__name__}: {error}; run `trainfit loader` to see where"
    if found is None:
        loading = DataLoading(None, batch, step_is_bound, failure=" ".join(failure.split()))
        return dataclasses.replace(plan, loading=loading)
    values = dict(amp)
    best = plan.chosen.recommended_batch
    if "batch_size" in command.present and best:
        values["batch_size"] = str(best)
        values |= accumulation_for(command, plan.step, plan.now.batch_size, best).values
    loading = DataLoading(
        *(found, found.probe.batch_size or batch, step_is_bound, *bottleneck(found)),
    )
    there = other_input(found, plan.cpu, here or CoreHere(None))
    used = found
    if there is not None:
        loading = _with_input(loading, there)
        if is_another(plan.cpu):
            # Which cores suit is told of this machine alone.
            settings = settings_there(found, there)
            used = dataclasses.replace(found, recommended=settings, cores=None)
    values |= _values(command, used)
    line = launch(command, values, plan.variables, used.variables, used.cores)
    notes = _notes(plan, command, used)
    if used.recommended != found.recommended:
        notes.add(
            f"num_workers={used.recommended.num_workers} is for the processor that was named; on "
            f"this machine it is {found.recommended.num_workers}",
            MAY_CHANGE,
        )
    return dataclasses.replace(
        plan,
        launch=line.line,
        loading=loading,
        notes=(*plan.notes, *line.notes, *notes),
        structured_notes=tuple(
            complete((*plan.structured_notes, *notes.structured()), line.notes, {})
        ),
    )


def _with_input(loading: DataLoading, there: OtherInput) -> DataLoading:
    return dataclasses.replace(
        loading,
        input_at_most=there.batches_per_s,
        input_range=there.range,
        input_basis=there.basis,
        input_workers=there.num_workers,
    )


def _amp(plan: PlanResult, command: Command) -> dict[str, str]:
    """The value that was chosen for ``{amp}``, where the command has it."""
    value = plan.amp_choice.value if plan.amp_choice is not None else None
    return {"amp": value} if value is not None and "amp" in command.present else {}


def predicted_step(plan: PlanResult) -> StepTime | None:
    """The step that the loader has to keep up with; ``None`` where none is predicted.

    The fast end of the range: a loader that keeps up with that keeps up.
    """
    if plan.speed is None:
        return None
    return fast_end(plan.speed.at(_batch(plan)) or plan.speed.now, plan.gpu, plan.step)


def _values(command: Command, found: LoaderResult) -> dict[str, str]:
    """What is written into the placeholders; nothing that PyTorch refuses where the number of
    workers stays 0 because the command has no placeholder for it."""
    values = loader_values(command.present, found.recommended)
    if "num_workers" not in command.present and not found.present.num_workers:
        for name in ("prefetch_factor", "persistent_workers"):
            values.pop(name, None)
    return values


def bottleneck(found: LoaderResult) -> tuple[Bottleneck, float | None]:
    """Which part makes the other wait with the recommended settings, and by how much."""
    rate = rate_of(found, found.recommended)
    if found.step_s <= 0 or not rate:
        return "unknown", None
    ratio = 1 / found.step_s / rate
    if ratio > 1 + _KEEPS_UP:
        return "loader", ratio
    alone = _alone(found, found.recommended)
    return "gpu", max(1.0, alone * found.step_s) if alone is not None else None


def _alone(found: LoaderResult, settings: LoaderSettings) -> float | None:
    """Batches per second of the loader alone, as the model says."""
    candidate = found.candidate(settings)
    return candidate.alone_batches_per_s if candidate is not None else None


def _batch(plan: PlanResult) -> int | None:
    """The recommended batch size, where the data set fills one; else the present one."""
    best = plan.chosen.recommended_batch
    if not best or (plan.samples is not None and best > plan.samples):
        return plan.now.batch_size
    return best


def _with(command: Command, values: Mapping[str, str]) -> Command:
    """The command with ``values`` as if they had been written there."""
    return parse_command([literal(word) for word in command.fill(**values)])


def _notes(plan: PlanResult, command: Command, found: LoaderResult) -> Notes:
    notes = Notes()
    stated = present_settings(command.present)
    real = {name: getattr(found.present, name) for name in stated}
    if not found.present.num_workers:  # PyTorch takes neither then
        stated.pop("prefetch_factor", None)
    for name, value in stated.items():
        if value is not None and value != real[name]:
            notes.add(
                f"the command says {name} {command.present[name]}, the DataLoader ({found.loader}) "
                f"has {real[name]}: put {{{name}}} into the option from which it takes it",
                kind="action",
            )
    missing = _changed_without_placeholder(command, found)
    if missing:
        notes.add(
            f"set {', '.join(missing)} for the DataLoader ({found.loader}): the command has no "
            "placeholder for it",
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
    why = "write {batch_size:N} into the command"
    if plan.samples is not None and best > plan.samples:
        why = f"the data set has only {plan.samples} samples"
    elif "batch_size" in command.present:
        why = f"the DataLoader ({found.loader}) does not take it from the command"
    return [f"the DataLoader was tuned at batch size {tuned}, not at {best}: {why}"]


def _changed_without_placeholder(command: Command, found: LoaderResult) -> list[str]:
    changed = []
    for field in dataclasses.fields(LoaderSettings):
        value = getattr(found.recommended, field.name)
        if field.name == "library_threads":  # variables before the command
            continue
        if field.name in _OF_WORKERS and not found.recommended.num_workers:
            continue
        if value != getattr(found.present, field.name) and field.name not in command.present:
            changed.append(f"{_ARGUMENTS.get(field.name, field.name)}={value!r}")
    return changed


#: Settings that mean nothing without workers.
_OF_WORKERS: Final = (
    *("prefetch_factor", "persistent_workers", "start_method", "in_order", "worker_threads"),
)
#: Settings whose DataLoader argument (or call) has another name.
_ARGUMENTS: Final = {
    "start_method": "multiprocessing_context",
    "worker_threads": "torch.set_num_threads in worker_init_fn",
}
