"""Facts of a plan for several GPUs: how fast they are together, and what communication costs."""

from __future__ import annotations

from trainfit.report.blocks import Facts
from trainfit.report.blocks import facts as facts_of
from trainfit.report.sections.plan_facts import step_at
from trainfit.results.plan import PlanResult, run_rate
from trainfit.results.runs.steps import PEER_COPY
from trainfit.results.speed import CollectiveTime, Ranks, StepSpeed
from trainfit.results.text import count, duration, percent, rate, size


def ranks_title(result: PlanResult) -> str:
    """The title with the number of GPUs."""
    return f"{result.ranks.count} GPUs (predicted)" if result.ranks is not None else ""


def ranks_facts(result: PlanResult) -> Facts | None:
    """Efficiency, throughput and samples of all ranks; ``None`` for a job of one process."""
    ranks = result.ranks
    if ranks is None:
        return None
    batch = result.chosen.recommended_batch or result.now.batch_size
    step = step_at(result, batch) or (result.speed.now if result.speed is not None else None)
    return facts_of(
        ("efficiency", _efficiency(ranks, step), 1),
        ("ranks hold", _held(ranks), 1),
        ("they compute", _computed(ranks, step), 2),
        ("together", _of_all_ranks(result, ranks, step), 2),
        ("a step", _communication(ranks), 12),
        ("taken as equal", f"{ranks.equal} ({ranks.link})", 12),
        lines=3,
    )


def gpus_title(result: PlanResult) -> str:
    """The title with the number of GPUs that the process uses."""
    return f"{len(result.gpus.shares)} GPUs of one process (predicted)" if result.gpus else ""


def gpus_facts(result: PlanResult) -> Facts | None:
    """What each GPU holds and does, and what passes between them; ``None`` for a job of one GPU."""
    gpus = result.gpus
    if gpus is None:
        return None
    computing = [share for share in gpus.shares if share.busy_share is not None]
    return facts_of(
        ("memory", ", ".join(f"GPU {e.gpu} {size(e.device_bytes)}" for e in gpus.shares), 1),
        (
            "computing",
            ", ".join(f"GPU {e.gpu} {percent(e.busy_share)}" for e in computing)
            + (" of a step" if computing else ""),
            2,
        ),
        ("a step", ", ".join(map(_of_kind, gpus.transfers)), 3),
        ("link", gpus.link, 12),
        lines=3,
    )


def _held(ranks: Ranks) -> str:
    return ", ".join(f"rank {stage.rank} {size(stage.device_bytes)}" for stage in ranks.stages)


def _computed(ranks: Ranks, step: StepSpeed | None) -> str:
    known = [stage for stage in ranks.stages if stage.computing_s is not None]
    if step is None or not known or ranks.bubble_share is None:
        return ""
    each = ", ".join(f"rank {stage.rank} {duration(stage.computing_s or 0.0)}" for stage in known)
    waited = [collective for collective in ranks.collectives if collective.kind != "send_receive"]
    took = f" (collectives need {duration(sum(collective.seconds for collective in waited))})"
    reduced = "communication" + (took if waited else "")
    return (
        f"{each} of {duration(step.seconds)} a step: they wait "
        f"{percent(ranks.bubble_share)} of it, for each other, launches or {reduced}"
    )


def _efficiency(ranks: Ranks, step: StepSpeed | None) -> str:
    if step is None or ranks.stages:
        return ""
    if not ranks.collectives:
        return "the steps communicate nothing: each process trains a model of its own"
    total, exposed = duration(step.communication_s), duration(step.exposed_s)
    lost = (
        f"{duration(step.seconds)} a step, {exposed} wait for communication ({total} in all) and "
        f"{duration(step.slowest_s)} for the slowest rank"
    )
    if ranks.sharing > 1:  # nothing is known of a GPU that has the whole model
        return f"{ranks.sharing} GPUs share the work of each batch: of {lost}"
    return f"{percent(step.efficiency, decimals=1)} of one GPU's throughput each: of {lost}"


def _of_all_ranks(result: PlanResult, ranks: Ranks, step: StepSpeed | None) -> str:
    parts = []
    run = run_rate(result)
    if run is not None and run.samples_per_s:
        most = "at most " if run.is_bound else ""
        parts.append(f"{most}{rate(ranks.replicas * run.samples_per_s)} samples/s")
    each = _samples(result, step)
    if each and not ranks.stages:
        of_all = ranks.replicas * each
        product = f"{ranks.replicas} x {each} = " if ranks.replicas > 1 else ""
        parts.append(
            f"effective batch {product}{of_all} samples a step: the learning rate is for that"
        )
    return "; ".join(parts)


def _samples(result: PlanResult, step: StepSpeed | None) -> int | None:
    """Samples of an optimizer step of one process: of ``step``, whose accumulation may be another
    than the present one, where its samples are known."""
    if step is not None and step.samples_per_s:
        return round(step.samples_per_s * step.seconds)
    batch, makeup = result.chosen.recommended_batch or result.now.batch_size, result.step
    now = result.now.batch_size
    if batch and now and makeup is not None and makeup.effective_batch:
        return round(makeup.effective_batch * batch / now)
    return batch * (makeup.accumulation or 1) if batch and makeup is not None else batch


def _communication(ranks: Ranks) -> str:
    return ", ".join(map(_of_kind, ranks.collectives))


def _of_kind(collective: CollectiveTime) -> str:
    name = "transfer" if collective.kind == PEER_COPY else collective.kind.replace("_", "-")
    took = f" in {duration(collective.seconds)}" if collective.seconds else ""
    return f"{count(collective.calls, name)} of {size(collective.nbytes)}{took}"
