"""Notes of a plan, other than those of the step that finds them."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Final

from trainfit.batch.advice import family, learning_rate
from trainfit.hardware.gpu_topology import assumed_count
from trainfit.memory.capacity import LARGEST
from trainfit.memory.replay import Stream
from trainfit.plan.changes.amp import AmpSetting
from trainfit.plan.changes.trials import allocator_variable
from trainfit.plan.command.parsing import Command
from trainfit.plan.runs.batches import is_full
from trainfit.plan.runs.failures import INTERRUPTED, absent_kernels, cause_of, shortfall, with_cause
from trainfit.plan.runs.options import CommandOptions
from trainfit.plan.runs.progress import CHANGES, MAY_CHANGE, Notes
from trainfit.plan.runs.tracing import Trace, recording_of
from trainfit.plan.sizing.memory_model import Batches, MemoryModel
from trainfit.plan.sizing.planned_job import PlannedJob
from trainfit.plan.sizing.recommendation import Accumulation, EffectiveBatch
from trainfit.plan.sizing.speed import replicas_of
from trainfit.results.changes import Remedies
from trainfit.results.runs.trace import ContextSeen, Counted
from trainfit.results.text import count, size
from trainfit.simgpu.device.settling import LEAST_STEPS

#: Twice as much, and more, is far more.
_FAR = 2


def note_first_run(
    notes: Notes, memory_model: MemoryModel, first: Trace, whole: Trace | None, counted: Counted
) -> None:
    """What was ``counted`` as steps where it is no optimizer's (calls of the model: ``whole`` is
    the run with all of them), and what the run itself says."""
    if counted == "backwards":
        notes.add(
            "the script uses no optimizer of torch.optim: a backward pass counts as a step",
            CHANGES,
        )
    if whole is not None:
        calls = count(first.outcome.steps, "call")
        notes.append(f"the script does not train: figures are of {calls} of the model")
        peaks = [memory_model.shown(Stream.of(recording_of(t)))[0] for t in (first, whole)]
        if peaks[1].peak_allocated > peaks[0].peak_allocated:
            all_calls = count(whole.outcome.forward.calls, "call")
            notes.add(
                f"over {all_calls} the peak is larger: {size(peaks[1].peak_allocated)} allocated, "
                f"{size(peaks[1].peak_reserved)} reserved",
                CHANGES,
            )
    for text in recording_of(first).header.get("notes") or ():
        notes.add(str(text), MAY_CHANGE)


def note_absent(notes: Notes, first: Trace) -> None:
    """Packages of kernels that the script imports where they are, and that are not here."""
    if text := absent_kernels(first.outcome):
        notes.add(text, MAY_CHANGE)


def note_steps(job: PlannedJob, asked: int | None) -> None:
    """Note that the first run made fewer steps than were ``asked`` for, and why."""
    first = job.first
    what = shortfall(first, job.command)
    if what is not None:
        text = f"{what}; planned from what it did before that"
        cause = cause_of(first.outcome, first.output)
        job.notes.add(with_cause(text, cause), CHANGES, first=True)
        return
    wanted = asked or LEAST_STEPS
    if first.outcome.status == "ended" and first.outcome.steps < wanted:
        what = "call" if job.infers else "optimizer step"
        steps = count(first.outcome.steps, what)
        more = "; a second step may need more" if first.outcome.steps == 1 else ""
        job.notes.add(
            f"the script ended after {steps} of the {wanted} requested{more}",
            MAY_CHANGE,
            first=True,
        )


#: What a script that is meant for a process on each GPU reads or calls.
_OF_RANKS: Final = re.compile(r"\b(?:LOCAL_RANK|WORLD_SIZE|init_process_group)\b")


def note_unused_gpus(job: PlannedJob) -> None:
    """Note that one process uses fewer GPUs than are named, and how to start one for each; or that
    there is one for each, and they have nothing to do with one another."""
    count_of, used = job.gpu.count, Stream.of(job.recording).gpus
    if job.recording.ranks > 1:
        return
    if job.command.processes > 1:
        if not job.infers:
            job.notes.add(
                f"the {job.command.processes} processes train a model each, as they make no "
                "process group: wrap it in DistributedDataParallel, on the GPU of LOCAL_RANK; "
                "figures are of one process that has a GPU to itself",
                kind="action",
                first=True,
            )
        return
    if len(used) >= count_of or assumed_count(job.gpu):
        return
    text = f"of the {count_of} GPUs the script uses {len(used)}"
    if (found := _read_of_ranks(job.command)) is not None:
        text += (
            f": it has {found}, so begin the command with `torchrun "
            f"--nproc_per_node={count_of}` in place of `python`: a process for each GPU"
        )
    job.notes.add(text, kind="action", first=True)


def _read_of_ranks(command: Command) -> str | None:
    """The name by which a script shows that it is meant for several processes."""
    if command.kind != "script":
        return None
    try:
        match = _OF_RANKS.search(Path(command.name).read_text())
    except (OSError, UnicodeDecodeError):
        return None
    return match[0] if match else None


def note_batches(job: PlannedJob, batches: Batches) -> None:
    """What is odd about the batch sizes."""
    notes, batch = job.notes, job.batch
    data_set = batches.limits.data_set if batches.limits is not None else None
    if batches.largest is not None and batches.largest >= LARGEST:
        unknown = "" if data_set is not None else ", and the number of samples is not known"
        notes.append(f"memory sets no limit up to batch size {LARGEST}{unknown}")
    note_cached_blocks(job, batches)
    if data_set is not None and not is_full(job.first, batch):
        notes.append(
            f"the data set has {data_set} samples: batches of {batch} were requested, "
            f"{data_set} samples were returned"
        )
    if job.noise_scale is not None and (batches.limits is None or batches.limits.trains is None):
        step = EffectiveBatch(job.command, job.makeup, batch)
        notes.append(
            _not_chosen_by_noise(step, job.noise_scale)
            if batches.limits is not None and batches.limits.knee is not None and step.is_kept
            else "--noise-scale has no effect here: it needs gradients, a batch size that fits, "
            "the samples of a step, and step times that are predicted for several"
        )


def note_cached_blocks(job: PlannedJob, batches: Batches) -> None:
    """Note that memory is full of blocks that nothing uses any more, which a cache that grows by
    copies leaves; or that far larger batch sizes fit than leave the margin, as steps need such
    blocks."""
    largest, law, model = batches.largest, batches.law, job.memory_model
    here = batches.recommended_peak
    if here is not None and here.retries:
        job.notes.append(
            f"batch size {batches.recommended} reserves {size(here.peak_reserved)} for "
            f"{size(here.peak_allocated)} of tensors: PyTorch keeps blocks until memory is full, "
            f"then releases those that nothing uses ({count(here.retries, 'time')}); with "
            f"{allocator_variable(job.command)[0]}=expandable_segments:True it needs fewer"
        )
        return
    most = batches.limits.memory if batches.limits is not None else None
    if not most or not largest or law is None or largest < _FAR * most:
        return
    peak = model.limited(law.at(most))
    if peak.peak_reserved < _FAR * peak.peak_allocated:
        return
    why = (
        f"{most} reserves {size(peak.peak_reserved)} for {size(peak.peak_allocated)} of tensors; "
        f"larger ones, up to {largest}, fit because PyTorch frees cached blocks before it fails"
    )
    settings = dataclasses.replace(model.settings, expandable_segments=True)
    other = model.with_settings(settings).limited(law.at(most)).peak_reserved
    if _FAR * other > peak.peak_reserved:
        job.notes.append(f"batch size {why}")
        return
    name, _ = allocator_variable(job.command)
    job.notes.add(
        f"plan with {name}=expandable_segments:True for a larger batch size: {why} "
        f"({size(other)} with the variable)",
        kind="action" if batches.recommended == most else "note",
    )


def _not_chosen_by_noise(step: EffectiveBatch, noise_scale: float) -> str:
    """A sentence on a command whose accumulation keeps the samples of a step."""
    now, other = step.samples_at(step.present or 1), max(1, round(noise_scale))
    if other == now:
        return f"{step.keeper} keeps the {now} samples of a step, as many as the noise scale"
    return (
        f"--noise-scale has no effect on the micro-batch: {step.keeper} keeps the {now} samples of "
        f"a step; whether {other} learn faster: `trainfit batch explain --batch-size {now} --to "
        f"{other} --noise-scale {noise_scale:g}`"
    )


def note_options(notes: Notes, options: CommandOptions) -> None:
    """Why an option that is named like the batch size is not used for it."""
    for each in options.left:
        if each.name == "batch_size":
            verb = "are" if ", " in each.shown else "is"
            notes.append(f"{each.shown} {verb} not used for the batch size: {each.reason}")


def note_interrupt(
    job: PlannedJob,
    present: AmpSetting,
    others: Sequence[AmpSetting],
    remedies: Remedies | None,
) -> None:
    """Parts missing in a plan that the user interrupted."""
    here = present.batches
    missing = {
        "other batch sizes": not here.pair and here.basis == "one trace",
        "the opposite AMP setting": not others,
        "remedies": remedies is not None and _is_interrupted(remedies),
    }
    names = ", ".join(name for name, is_missing in missing.items() if is_missing)
    if job.runs.is_over and names:
        job.notes.add(f"interrupted: {names} not simulated", CHANGES, first=True)


def note_accumulation(notes: Notes, kept: Accumulation) -> None:
    """What becomes of the effective batch size."""
    if kept.action:
        notes.add(kept.action, kind="action")
    if kept.note:
        notes.append(kept.note)


def note_learning(job: PlannedJob, batches: Batches) -> None:
    """Note that the recommended batch size changes the samples of a step, and what explains
    that."""
    best = batches.recommended
    if job.infers or not best or not job.batch or best == job.batch:
        return
    step = EffectiveBatch(job.command, job.makeup, job.batch, batches.by_noise)
    replicas = replicas_of(job.first)
    before, after = (replicas * step.samples_at(batch) for batch in (job.batch, best))
    if before == after:
        return
    given = "" if job.noise_scale is None else f" --noise-scale {job.noise_scale:g}"
    measure = "" if given else " (`trainfit watch --noise-scale` measures the noise scale)"
    name = str(job.recording.header.get("optimizer") or "")
    rate = learning_rate(family(name), before, after, None)
    rule = ""
    if rate.factor is not None and not given:
        source = rate.sources[0].work
        rule = f"learning rate × {rate.factor:.3g} by the {rate.rule} rule for {name} ({source}); "
    job.notes.append(
        f"{rule}`trainfit batch explain --batch-size {before} --to {after}{given}` says what "
        f"{after} samples a step instead of {before} do to learning{measure}"
    )


def note_context(notes: Notes, context: ContextSeen) -> None:
    """Note that sequences are longer than the model is made for."""
    if context.too_long:
        notes.add(context.warning(), CHANGES, first=True)


def _is_interrupted(remedies: Remedies) -> bool:
    return INTERRUPTED in (remedies.failure, *(item.reason for item in remedies.items))
