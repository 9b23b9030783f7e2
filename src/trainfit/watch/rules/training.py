"""Rules about the training itself: its loss and its loss scale, its checkpoints, its evaluation."""

from __future__ import annotations

import dataclasses
import math
from collections import Counter
from collections.abc import Iterator
from typing import Final

import numpy as np

from trainfit.findings.habits import UNSCALED
from trainfit.findings.training.learning import KINDS as LEARNING_KINDS
from trainfit.findings.training.learning import of_learning
from trainfit.findings.training.losses import not_finite
from trainfit.results.findings import Evidence, Finding, Fix, Place, Unknown
from trainfit.results.runs.learning import Misuse
from trainfit.results.runs.step_cycle import NEVER_STEPS
from trainfit.results.runs.tables import LOSS_FINITE, LOSS_NOT_FINITE, STEP_SKIPPED
from trainfit.results.runs.watched import WatchedLoader
from trainfit.results.text import count as plural
from trainfit.watch import checks, thresholds
from trainfit.watch.rules.main_thread import MainThread
from trainfit.watch.rules.rule import Rule, severity
from trainfit.watch.view import RankView, RunView, known, median

#: Skipped steps at the least: the scale starts too high and is halved to its level.
_LEAST_SKIPPED: Final = 3


def _loss(run: RunView) -> Iterator[Finding | Unknown]:
    """A loss that is NaN or infinite, from the first step on: the warm-up counts, too."""
    for view in run.ranks:
        steps = view.record.steps
        looked = (steps["flags"] & (LOSS_FINITE | LOSS_NOT_FINITE)) != 0
        if not looked.any():
            if len(steps):
                needs = "a backward() of a single number"
                yield Unknown("loss_not_finite", "no loss was seen", needs)
            continue
        bad = steps[(steps["flags"] & LOSS_NOT_FINITE) != 0]
        if not len(bad):
            continue
        misuse = view.header.learning.not_finite or _bad_sample(view, float(bad["end_s"][0]))
        why = not_finite(misuse)
        half = view.header.autocast == "float16" or view.header.precision == "float16"
        yield Finding(
            "loss_not_finite",
            "critical",
            (
                f"The loss is NaN or infinite from step {int(bad['step'][0])} on"
                if len(bad) > len(steps) // 2 or bad["step"][-1] == steps["step"][-1]
                else "The loss was NaN or infinite"
            )
            + (why[0] if why else ""),
            (
                Evidence("first step", float(bad["step"][0])),
                Evidence("steps", len(bad)),
                Evidence("of", int(looked.sum())),
            ),
            why[1]
            if why
            else UNSCALED.cause
            if half
            else "a number overflowed or was divided by 0",
            (
                why[2]
                if why
                else Fix(
                    UNSCALED.action
                    if half
                    else "find the operator with torch.autograd.set_detect_anomaly(True); lower "
                    "the learning rate or clip gradients"
                ),
            ),
            "certain",
            place=Place.parse(
                (misuse.place if misuse is not None else None) or view.header.loss_at
            ),
            rank=view.rank,
            first_step=int(bad["step"][0]),
            last_step=int(bad["step"][-1]),
        )


#: Seconds after which a batch that a worker has made was certainly used, in addition to the steps
#: that those before it need: the loss of short steps is looked at now and then.
_USED_S: Final = 1.0
#: Batches that a worker makes in advance (torch.utils.data.DataLoader).
_PREFETCHED: Final = 2


def _bad_sample(view: RankView, since_s: float) -> Misuse | None:
    """The first sample that workers saw a number in which is not finite; ``None``: none, or some
    long before the loss was not (missing labels that the script leaves out)."""
    samples, loader = view.header.bad_samples, checks.training_loader(view.header)
    if not samples or loader is None:
        return None
    ahead = (loader.prefetch_factor or _PREFETCHED) * max(1, loader.num_workers) + 1
    slack = _USED_S + ahead * (median(view.record.steps["step_s"]) or 0.0)
    name = min(samples, key=lambda each: samples[each])
    return None if samples[name] < since_s - slack else Misuse("sample_not_finite", (name,))


def _loss_scale(run: RunView) -> Iterator[Finding | Unknown]:
    """Steps that GradScaler skips after the warm-up, in which the scale finds its level."""
    view = run.judged
    scales = known(view.steps["loss_scale"])
    if not len(scales):
        return  # no GradScaler
    skipped = (view.steps["flags"] & STEP_SKIPPED) != 0
    half = len(skipped) // 2
    share = float(skipped.mean())
    if skipped.sum() < _LEAST_SKIPPED or share < thresholds.SKIPPED or not skipped[half:].any():
        return
    yield Finding(
        "skipped_steps",
        "critical" if share >= thresholds.CRITICAL_SHARE else "warning",
        "GradScaler keeps skipping optimizer steps",
        (
            Evidence("skipped", share),
            Evidence("loss scale at the end", float(scales[-1])),
            Evidence("largest loss scale", float(np.max(scales))),
        ),
        "gradients overflow in float16: skipped steps do not update the weights",
        (
            Fix(
                "use bfloat16 where the GPU has it (Ampere and newer); else lower the learning "
                "rate, clip gradients, or lower GradScaler's growth"
            ),
        ),
        "certain",
        share,
    )


def _learning(run: RunView) -> Iterator[Finding | Unknown]:
    """Findings of the first rank that looked: all have the same model."""
    for view in run.ranks:
        if view.header.learning.steps:
            yield from (_costs(view, finding) for finding in of_learning(view.header.learning))
            yield from _fading(view)
            return


def _costs(view: RankView, finding: Finding) -> Finding:
    """A finding with the share of the time that it costs, where the phases tell it."""
    if finding.kind == "tracing_on" and not checks.are_few(view):
        return _of_python(view, finding)
    if finding.kind != "rows_untouched" or checks.are_few(view):
        return finding
    told = next(e.told for e in view.header.learning.misuses if e.kind == finding.kind)
    share = float(told[-1]) * (view.share("optimizer") or 0.0)
    if share < thresholds.NOTICEABLE:
        return dataclasses.replace(finding, severity="info")
    title = f"{finding.title}: {checks.in_percent(share)} of the time"
    return dataclasses.replace(finding, severity=severity(share), share=share, title=title)


def _of_python(view: RankView, finding: Finding) -> Finding:
    """What slows Python down, with the share of the time that the training is in the script's."""
    loader = checks.training_loader(view.header)
    makes_batches = loader is not None and not loader.num_workers
    share = (MainThread(view).other or 0.0) + makes_batches * (view.share("input") or 0.0)
    if checks.has_gpu(view):
        share = min(share, MainThread(view).unexplained_idle or 0.0)
    if share < thresholds.NOTICEABLE:
        return dataclasses.replace(finding, severity="info", share=share)
    title = f"{finding.title}: {checks.in_percent(share)} of the time are in it"
    return dataclasses.replace(finding, severity=severity(share), share=share, title=title)


#: Epochs within which a rate that falls to nothing is not meant to: one, or where it falls in few
#: large steps (which are made for some tens of epochs) some.
_AT_ONCE: Final = 1.0
_SOON: Final = 5.0
_LARGE_STEP: Final = 0.2


def _fading(view: RankView) -> Iterator[Finding | Unknown]:
    """A schedule in epochs that is stepped with each batch."""
    fades, loader = view.header.learning.schedule_fades, checks.training_loader(view.header)
    if fades is None or loader is None or not loader.batches:
        return
    if view.header.learning.vanished_rate is not None:
        return  # it is there
    batches = max(1.0, float(np.median(view.steps["batches"])) if len(view.steps) else 1.0)
    epochs = fades.step * batches / loader.batches
    if epochs > (_SOON if fades.factor <= _LARGE_STEP else _AT_ONCE):
        return
    is_there = int(view.record.steps["step"].max(initial=-1)) >= fades.step
    yield Finding(
        "rate_vanishes",
        "critical" if epochs <= _AT_ONCE or is_there else "warning",
        f"{fades.name} is stepped with each optimizer step: the learning rate is multiplied by "
        f"{fades.factor:g} every {plural(fades.every_steps, 'step')}, and next to nothing after "
        f"{plural(fades.step, 'step')}, in epoch {math.ceil(epochs)}",
        (
            Evidence("steps of an epoch", loader.batches / batches),
            Evidence("nothing is learned from step", float(fades.step)),
        ),
        "a schedule whose lengths are epochs is stepped with each batch",
        (Fix("scheduler.step() once an epoch, or give the schedule its lengths in steps"),),
        "likely",
        place=Place.parse(fades.place),
    )


def _no_batch(run: RunView) -> Iterator[Finding | Unknown]:
    """Nothing trains, and a DataLoader that was gone through has no batch."""
    if any(len(view.record.steps) for view in run.ranks):
        return
    loaders = [loader for view in run.ranks for loader in view.header.loaders]
    if not loaders or any(loader.batches != 0 for loader in loaders):
        return
    size = loaders[0].batch_size
    yield Finding(
        "no_batch",
        "critical",
        "The DataLoader gives no batch, so that no step is made",
        (Evidence("batches of an epoch", 0.0),),
        "its data set is empty, or has fewer samples than the batch size"
        + (f" ({size})" if size else "")
        + ", and drop_last=True leaves them out",
        (
            Fix(
                "a batch_size of at most as many samples as there are, or drop_last=False; where "
                "the data set is empty, check its path and what filters it"
            ),
        ),
        "certain",
        place=Place.parse(loaders[0].place),
    )


#: Of the time that a model computes, what float32 saves: half the bytes, and twice the numbers in a
#: vector register. GPUs for graphics save far more.
_SAVED: Final = 0.5


def _double(run: RunView) -> Iterator[Finding | Unknown]:
    """A model in float64 where new tensors are float32: converted for data of NumPy's type."""
    rank = run.judged
    header = rank.header
    if header.precision != "float64" or header.default_dtype != "float32" or checks.are_few(rank):
        return
    computes = sum(rank.share(name) or 0.0 for name in ("forward", "backward", "optimizer"))
    share = _SAVED * computes
    yield Finding(
        "double_precision",
        "info" if share < thresholds.WARNING_SHARE else "warning",
        "The model computes in float64: twice the memory of float32, and at most half of its speed",
        (Evidence("forward, backward, optimizer", computes, "of the time"),),
        "NumPy's and pandas' numbers are float64; a model that is converted for them (.double()) "
        "computes with twice the bytes",
        (
            Fix(
                "convert the data, not the model: np.float32 where it is loaded, "
                "torch.from_numpy(x).float(); torch.set_default_dtype(torch.float64) says that "
                "float64 is meant"
            ),
        ),
        "likely",
        share,
    )


def _never_steps(run: RunView) -> Iterator[Finding]:
    """Gradients are made and dropped, and no optimizer uses them."""
    view = run.judged
    event = next((each for each in view.record.events if each.kind == "never_steps"), None)
    if event is None:
        return
    yield Finding(
        "never_steps",
        "critical",
        "The optimizer never steps: the weights are as they were in the beginning",
        (Evidence("backward passes whose gradients were dropped, at least", float(NEVER_STEPS)),),
        "zero_grad() drops the gradients of each backward pass before anything has used them",
        (Fix("call optimizer.step() after each backward pass", line="optimizer.step()"),),
        "certain",
        place=Place.parse(event.text),
    )


RULES: Final = (
    Rule(("double_precision",), _double),
    Rule(("never_steps",), _never_steps),
    Rule(("no_batch",), _no_batch),
    Rule(LEARNING_KINDS, _learning),
    Rule(("loss_not_finite",), _loss),
    Rule(("skipped_steps",), _loss_scale, each_rank=True),
)


# ---
# The training stands still while checkpoints are written.


_CHECKPOINT_STALLS_KIND: Final = "checkpoint_stalls"


def _find_checkpoint_stalls(view: RunView) -> Iterator[Finding | Unknown]:
    rank = view.judged
    yield from (few := list(checks.too_few_steps(rank, _CHECKPOINT_STALLS_KIND)))
    if few:
        return
    lost = checks.column(rank, "checkpoint_s")
    places = np.flatnonzero(lost > 0)
    place, share = checks.event_place(rank, "checkpoint"), checks.share_of(rank, lost)
    extra, line = _next_to_saving(rank, place) if share else (0.0, None)
    share += extra
    if share < thresholds.NOTICEABLE:
        return
    if len(places) < thresholds.LEAST_EVENTS:
        yield Unknown(
            _CHECKPOINT_STALLS_KIND, "only one checkpoint was written", "watch two checkpoints"
        )
        return
    every = float(np.median(np.diff(places)))
    wanted = math.ceil(
        every
        * share
        * (1 - thresholds.CHECKPOINTS_WANTED)
        / (thresholds.CHECKPOINTS_WANTED * max(1 - share, 1e-3))
    )
    seconds = float(np.median(lost[places]))
    yield Finding(
        _CHECKPOINT_STALLS_KIND,
        severity(share),
        f"Writing checkpoints costs {checks.in_percent(share)} of the time"
        + (
            f" ({checks.in_percent(extra)} for what the script does next to it: {line})"
            if line
            else ""
        ),
        (
            Evidence("a checkpoint", seconds, "s"),
            Evidence("checkpoints", float(len(places))),
            Evidence("steps between them", every),
        ),
        "torch.save copies from the GPU and writes while the training waits",
        (
            Fix(
                f"write a checkpoint every {wanted} steps ({thresholds.CHECKPOINTS_WANTED:.0%} of "
                "the time), write to a local disk, or write in the background "
                "(torch.distributed.checkpoint.async_save)",
                settings={"checkpoint_every_steps": str(wanted)},
            ),
        ),
        "certain",
        share,
        place,
    )


#: Lines of a function around its torch.save that are of the same checkpoint: a hash, a copy, an
#: upload, the list of those that are deleted.
_NEAR_SAVING: Final = 12


def _next_to_saving(rank: RankView, at: Place | None) -> tuple[float, str | None]:
    """The share of the time that a function that saves spends otherwise, and the line where most of
    that is."""
    looks, main = rank.header.other_code, MainThread(rank)
    near = [
        each
        for each in looks.lines
        if at is not None and (found := Place.parse(each.place)) is not None
        if found.file == at.file and abs(found.line - at.line) <= _NEAR_SAVING
        if each.function not in ("", "<module>") and each.callers
    ]
    counts: Counter[str] = Counter()
    for line in near:
        name = line.calls or line.inner
        counts[f"{line.place} `{name}`" if name else line.place] += line.count
    every = sum(each.count for each in looks.lines)
    if not near or sum(counts.values()) < thresholds.LOOKS_AT_LINE:
        return 0.0, None
    # What the loop itself has near the line that saves is none of it.
    share = (main.other or 0.0) * sum(counts.values()) / every
    if checks.has_gpu(rank):
        share = min(share, main.unexplained_idle or 0.0)
    if share < thresholds.NOTICEABLE:
        return 0.0, None
    return share, counts.most_common(1)[0][0]


CHECKPOINT_STALLS: Final = Rule((_CHECKPOINT_STALLS_KIND,), _find_checkpoint_stalls, each_rank=True)


# ---
# torch.compile compiles in step after step.


_RECOMPILES_KIND: Final = "recompiles"
#: Steps after the warm-up that compile, at least, and of the second half of them: shapes that
#: change once, an evaluation, a last batch need a program each, and then no more.
_LEAST_COMPILED: Final = 5
_LATE: Final = 2


def _find_recompiles(view: RunView) -> Iterator[Finding | Unknown]:
    rank = view.judged
    steps = rank.after_warm_up
    events = [event for event in rank.record.events if event.kind == "compiled"]
    compiled = np.isin(steps["step"], [event.step for event in events])
    count, late = int(compiled.sum()), int(compiled[len(steps) // 2 :].sum())
    if count < _LEAST_COMPILED or late < _LATE:
        return
    seconds = np.asarray(steps["step_s"], dtype=np.float64)
    usual = float(np.median(seconds[~compiled])) if not compiled.all() else 0.0
    share = max(0.0, float(seconds[compiled].sum()) - count * usual) / float(seconds.sum())
    if share < thresholds.WARNING_SHARE:
        return
    yield Finding(
        _RECOMPILES_KIND,
        severity(share),
        f"torch.compile compiles in {count} of {len(steps)} steps, {checks.in_percent(share)} of "
        "the time",
        (
            Evidence("a step with a compilation", float(np.median(seconds[compiled])), "s"),
            Evidence("a step without", usual, "s"),
            Evidence("in the second half of the steps", float(late)),
        ),
        "A program is for the shapes and Python values that it was compiled with: other ones (a "
        "length, a counter, a flag of the model) need another program",
        (
            Fix(
                "pad batches to a few lengths, or mark what changes: torch.compile(model, "
                "dynamic=True); keep numbers that change out of the model, or in tensors. "
                "TORCH_LOGS=recompiles names what changed"
            ),
        ),
        "certain",
        share,
        checks.event_place(rank, "compiled"),
    )


RECOMPILES: Final = Rule((_RECOMPILES_KIND,), _find_recompiles, each_rank=True)


# ---
# How much of the time evaluation takes: no fault, but often a surprise.


_EVALUATION_SHARE_KIND: Final = "evaluation_share"
#: Steps between evaluations up to which they are hardly any: nobody evaluates after each step.
_NEARLY_EACH: Final = 3


def _find_evaluation_share(view: RunView) -> Iterator[Finding | Unknown]:
    rank = view.judged
    yield from (few := list(checks.too_few_steps(rank, _EVALUATION_SHARE_KIND)))
    if few:
        return
    spent = checks.column(rank, "evaluation_s")
    share = checks.share_of(rank, spent)
    places = np.flatnonzero(spent > 0)
    if share < thresholds.WARNING_SHARE:
        return
    small = _small_batches(rank)
    # Of one alone the share depends on when the watch ends; that its batches are small does not.
    if len(places) < (thresholds.LEAST_EVENTS if small is None else 1):
        yield Unknown(_EVALUATION_SHARE_KIND, "only one evaluation ran", "watch two evaluations")
        return
    between = float(np.median(np.diff(places))) if len(places) > 1 else float(len(rank.steps))
    each = between <= _NEARLY_EACH
    if each and not _is_gone_over(rank, len(places)):
        yield _within_training(share, spent[places], between)
        return
    yield Finding(
        _EVALUATION_SHARE_KIND,
        "warning",
        f"Evaluation uses {checks.in_percent(share)} of the time"
        + (", after nearly each step" if each else "")
        + ("" if small is None else f", in batches of {small[0].batch_size}"),
        (
            Evidence("an evaluation", float(np.median(spent[places])), "s"),
            Evidence("evaluations", float(len(places))),
            Evidence("steps between them", between),
        ),
        "The training waits while the model is evaluated",
        (
            Fix(
                _started_each_time(rank, float(np.median(spent[places])))
                + _on_one_rank(view, share)
                + "evaluate less often or on fewer samples, if that is more than you want, and "
                "under torch.no_grad(), where a larger batch fits"
            )
            if small is None
            else Fix(
                f"batch_size={small[1]} as in the training, or more, for the DataLoader at "
                f"{small[0].place}: without gradients at least as many samples fit, and a call "
                "costs little more for them"
            ),
        ),
        "certain",
        share,
        checks.event_place(rank, "evaluation"),
    )


#: Of a rank's evaluation, that of the others up to which it evaluates alone.
_ALONE: Final = 0.25


def _on_one_rank(view: RunView, share: float) -> str:
    """What to do where one of several ranks evaluates; empty: all do, or there is one."""
    others = [rank for rank in view.ranks if rank is not view.judged]
    theirs = (checks.share_of(rank, checks.column(rank, "evaluation_s")) for rank in others)
    if not others or max(theirs) > _ALONE * share:
        return ""
    return (
        "let all ranks evaluate, each its part of the samples (DistributedSampler, all_reduce of "
        "the sums): the others wait for this one; or "
    )


#: Seconds of an evaluation up to which the start of its workers is a good part of it.
_SHORT_S: Final = 1.0


def _started_each_time(rank: RankView, seconds: float) -> str:
    """What to do about workers that are started for each short evaluation; empty: none are."""
    for loader in rank.header.loaders:
        begins = loader.num_workers and not loader.persistent_workers
        if loader.role == "evaluation" and begins and seconds < _SHORT_S:
            workers = plural(loader.num_workers, "worker")
            return (
                f"set persistent_workers=True for the DataLoader at {loader.place}, which starts "
                f"{workers} for each evaluation; "
            )
    return ""


def _is_gone_over(rank: RankView, evaluations: int) -> bool:
    """Does each of them go over a whole DataLoader? What a rollout, a teacher or a target computes
    is of no data set, or of the training's batches."""
    passes = (loader.passes for loader in rank.header.loaders if loader.role == "evaluation")
    return max(passes, default=0) >= _MOSTLY_WHOLE * evaluations


#: Of evaluations, those that go over a whole DataLoader, from which it is that and not a part of
#: the method.
_MOSTLY_WHOLE: Final = 0.5
#: Of the training's batch size, what an evaluation's is at most that was not chosen: a DataLoader's
#: own is 1.
_SMALL_BATCH: Final = 0.25


def _small_batches(rank: RankView) -> tuple[WatchedLoader, int] | None:
    """The DataLoader of the evaluation, where its batches are much smaller than the training's, and
    the size of these."""
    training = checks.training_loader(rank.header)
    size = None if training is None else training.batch_size
    for loader in rank.header.loaders:
        own = loader.batch_size
        if loader.role == "evaluation" and own and size and own <= _SMALL_BATCH * size:
            return loader, size
    return None


def _within_training(share: float, seconds: checks.Seconds, between: float) -> Finding:
    """Rollouts of reinforcement learning, or a teacher's or target network's outputs."""
    return Finding(
        _EVALUATION_SHARE_KIND,
        "info",
        f"Forward passes without gradients use {checks.in_percent(share)} of the time",
        (
            Evidence("those between two training steps", float(np.median(seconds)), "s"),
            Evidence("steps between them", between),
        ),
        "Nearly every training step waits for a model in evaluation mode, and for what follows "
        "from its outputs: a rollout, a teacher's or a target's outputs, or an evaluation",
        (
            Fix(
                "run more samples in each such pass, or train more steps between them if the "
                "method allows"
            ),
        ),
        "likely",
        share,
    )


EVALUATION_SHARE: Final = Rule((_EVALUATION_SHARE_KIND,), _find_evaluation_share, each_rank=True)
