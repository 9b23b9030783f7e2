"""The DataLoader's part of a plan, in words: which part waits for which, and what would help."""

from __future__ import annotations

from trainfit.report.blocks import Facts, facts
from trainfit.results.findings import Finding
from trainfit.results.loader import LoaderResult
from trainfit.results.plan import HostCpu, PlanResult
from trainfit.results.speed import DataLoading
from trainfit.results.text import core_count, cores, ghz, percent, rate, times

#: Below this a rate that differs from another does not differ.
_SAME = 1.05


def loading_facts(loading: DataLoading, plan: PlanResult) -> Facts | None:
    """Which part is the limit, here and on the processor that the user named."""
    found = loading.result
    gpu = f"'{plan.gpu}'" if " " in plan.gpu else plan.gpu
    more = f"trainfit loader --gpu {gpu} -- {plan.command} (at the current batch size)"
    if found is None:
        return facts(("not tuned", loading.failure), ("details", more))
    most = "at most " if loading.step_is_bound else ""
    known = f"{most}{rate(1 / found.step_s)} batches/s" if found.step_s > 0 else "step time unknown"
    return facts(
        ("limit", verdict_words(loading, found)),
        ("the GPU", f"{known} ({found.step_source})"),
        ("because", found.reason),
        *_other_cpu(loading, plan),
        ("details", more),
    )


def _other_cpu(loading: DataLoading, plan: PlanResult) -> list[tuple[str, str]]:
    """The rate on the processor given by the user, with its interval and assumptions."""
    cpu = plan.cpu
    if cpu is None or cpu.cores is None:
        return []
    named = _processor(cpu)
    if loading.input_at_most is None:
        text = (
            f"with {named}: cannot tell, as the CPU time of a batch or the clock of this "
            "machine's cores is not known; run trainfit on that machine"
        )
        return [("other cores", text)]
    assumed = f"; assumed: {'; '.join(loading.input_basis)}" if loading.input_basis else ""
    return [("other cores", f"{named}: {input_text(loading)}{assumed}")]


def input_text(loading: DataLoading) -> str:
    """The highest rate on the other processor, and which part is the limit there."""
    most = loading.input_at_most
    assert most is not None
    low, high = loading.input_range or (most, most)
    text = f"at most {rate(most)} batches/s"
    if low < high:
        text += f" ({rate(low)} to {rate(high)})"
    if loading.input_workers is not None:
        text += f" with num_workers={loading.input_workers}"
    return text + _limit_there(loading, low, high)


def _processor(cpu: HostCpu) -> str:
    assert cpu.cores is not None
    words = core_count(cpu.cores)
    if cpu.core_speed is not None:
        words += " of this machine"
    if cpu.second_threads:
        words += f" ({cores(cpu.cores + cpu.second_threads)} threads)"
    if cpu.core_hz is not None:
        words += f" at {ghz(cpu.core_hz)}"
    words += f" ({cpu.kind})" if cpu.kind else ""
    return f"{cpu.name}, {words}" if cpu.name else words


def _limit_there(loading: DataLoading, low: float, high: float) -> str:
    """Which part would wait for the other there, where that is sure."""
    found = loading.result
    if found is None or found.step_s <= 0:
        return ""
    wanted = 1 / found.step_s
    if high < wanted:
        most = "up to " if loading.step_is_bound else ""
        by = times(wanted / (loading.input_at_most or high))
        return f"; the DataLoader is the limit there by {most}{by}"
    if low >= wanted:
        return "; the GPU is the limit there"
    return "; either part may be the limit there"


def verdict_words(loading: DataLoading, found: LoaderResult) -> str:
    """Which part is the limit, the DataLoader or the GPU."""
    if loading.bottleneck == "unknown":
        reason = "no step time is known; give --step-time"
        if found.step_s > 0:
            reason = "the loader's rate is not known; see the errors below"
        return f"cannot tell which part is the limit: {reason}"
    if loading.bottleneck == "loader":
        by = times(loading.factor)
        bound = (
            " if the GPU reaches the lower bound of its step time" if loading.step_is_bound else ""
        )
        most = "up to " if loading.step_is_bound else ""
        return f"the DataLoader is the limit by {most}{by}{bound}"
    feeds = "the DataLoader keeps up"
    if loading.factor is not None and loading.factor >= _SAME:
        feeds = f"the DataLoader could supply {times(loading.factor)} as much"
    best = " even at the lower bound of its step time" if loading.step_is_bound else ""
    return f"the GPU is the limit{best}: {feeds}"


def helps(advice: Finding) -> bool:
    """Is it worth a line? One whose gain is not predicted is."""
    return advice.fix.gain is None or advice.fix.gain >= _SAME


def effect_text(advice: Finding) -> str:
    """ "1.42× with", or "to reduce 46% of the time"."""
    if advice.fix.gain is not None:
        return f"{times(advice.fix.gain)} with"
    return f"to reduce {percent(advice.share)} of the time"
