"""Figures of a DataLoader: predicted and measured rates, costs, settings in words.

Whether workers persist matters between epochs, not for the rates here: settings are looked up by
what matters within one (:func:`trainfit.results.dataloader.steady`).
"""

from __future__ import annotations

from trainfit.report.blocks import Facts, Row, Table, facts, figures, rows, table
from trainfit.results.dataloader import (
    SAVE_BYTES,
    Candidate,
    Confirmed,
    LoaderMachine,
    LoaderSettings,
    Probe,
    StorageCost,
    steady,
)
from trainfit.results.findings import Finding
from trainfit.results.loader import BUSY, LoaderResult, most_helpful_first
from trainfit.results.plan import HostCpu, PlanResult
from trainfit.results.speed import DataLoading
from trainfit.results.text import (
    core_count,
    cores,
    count,
    duration,
    ghz,
    percent,
    rate,
    size,
    times,
)

# ---
# Settings of a DataLoader in words.


def switch(value: bool) -> str:
    """A setting that is on or off."""
    return "yes" if value else "no"


def settings_words(settings: LoaderSettings) -> str:
    """Settings in a line, what is usual left out."""
    if not settings.num_workers:
        return "no workers" + (", pinned" if settings.pin_memory else "")
    workers = settings.num_workers
    words = [
        count(workers, "worker"),
        f"prefetch {settings.prefetch_factor}",
    ]
    if settings.pin_memory:
        words.append("pinned")
    if settings.persistent_workers:
        words.append("persistent")
    if not settings.in_order:
        words.append("out of order")
    if settings.start_method != "fork":
        words.append(settings.start_method)
    if settings.worker_threads != 1:
        words.append(f"{settings.worker_threads} threads each")
    if settings.library_threads is not None:
        words.append(library_words(settings.library_threads))
    return ", ".join(words)


def library_words(threads: int) -> str:
    """The thread limit of libraries in a worker."""
    return f"{count(threads, 'thread')} a library"


def without_others_words(result: LoaderResult) -> str:
    """What the model recommends for this machine without the processes that disturbed it;
    empty where that is not left open."""
    if result.without_others is None:
        return ""
    if steady(result.without_others) == steady(result.recommended):
        return ""  # they are the recommended ones, whose row has their rate
    texts = [
        f"{settings_words(settings)} {rate(candidate.batches_per_s)}"
        for settings in dict.fromkeys((result.without_others, result.present))
        if (candidate := result.candidate(settings)) is not None
    ]
    return (
        "without them (predicted from the CPU time of batches, not confirmed by a run): "
        f"{settings_words(result.without_others)} ({'; '.join(texts)} batches/s predicted)"
    )


def _run_of(result: LoaderResult, settings: LoaderSettings) -> Confirmed | None:
    """The real run of these settings; one that did not fail, if there is one."""
    runs = [run for run in result.confirmed if steady(run.settings) == steady(settings)]
    runs.sort(
        key=lambda run: (
            run.measured_batches_per_s is None,
            run.is_disturbed,
            run.settings != settings,
        )
    )
    return runs[0] if runs else None


def _measured(result: LoaderResult, settings: LoaderSettings) -> Confirmed | None:
    """The confirming run of these settings, if it neither failed nor was disturbed by others."""
    run = _run_of(result, settings)
    if run is None or run.measured_batches_per_s is None or run.is_disturbed:
        return None
    return run


def best_rate(result: LoaderResult, settings: LoaderSettings) -> tuple[float, str] | None:
    """Batches per second of these settings: measured if they were run, else predicted."""
    run = _measured(result, settings)
    if run is not None and run.measured_batches_per_s is not None:
        return run.measured_batches_per_s, "measured"
    candidate = result.candidate(settings)
    return (candidate.batches_per_s, "predicted") if candidate is not None else None


def settings_blocks(result: LoaderResult) -> list[Table | Facts | None]:
    """Present and recommended settings, the others that were run, and remarks on them."""
    shown = [("current", result.present)]
    if result.recommended != result.present and result.verdict != "cannot_tell":
        shown.append(("recommended", result.recommended))
    known = {steady(result.present), steady(result.recommended)}
    others = dict.fromkeys(
        run.settings for run in result.confirmed if steady(run.settings) not in known
    )
    shown += [("also run", settings) for settings in others]
    remarks: dict[str, list[str]] = {}
    for name, settings in shown:
        which = f"{name}, {count(settings.num_workers, 'worker')}" if name == "also run" else name
        for remark in _remarks(result, settings):
            remarks.setdefault(remark, []).append(which)
    head = ("", "workers", "prefetch", "pin", "persist", "order", "predicted", "measured",
            "GPU waits")  # fmt: skip
    return [
        table(head, [_settings_row(result, *each) for each in shown], "Batches a second",
              range(1, 8), detail=5),
        facts(*((", ".join(names), remark) for remark, names in remarks.items()), detail=30),
    ]  # fmt: skip


def _settings_row(result: LoaderResult, name: str, settings: LoaderSettings) -> tuple[str, ...]:
    run = _measured(result, settings)
    failed = _run_of(result, settings)
    candidate = result.candidate(settings)
    predicted = candidate.batches_per_s if candidate else None
    if predicted is None and failed is not None:
        predicted = failed.predicted_batches_per_s
    measured = rate(run.measured_batches_per_s) if run is not None else ""
    if run is None and failed is not None:
        measured = "failed" if failed.fault is not None else "too slow"
        measured = rate(failed.measured_batches_per_s) if failed.is_disturbed else measured
    workers = settings.num_workers
    return (
        name,
        str(workers),
        str(settings.prefetch_factor) if workers else "-",
        switch(settings.pin_memory),
        switch(settings.persistent_workers) if workers else "-",
        switch(settings.in_order) if workers else "-",
        rate(predicted),
        measured,
        _waiting(result, candidate, run),
    )


def _remarks(result: LoaderResult, settings: LoaderSettings) -> list[str]:
    """What the columns do not say of settings."""
    run, failed = _measured(result, settings), _run_of(result, settings)
    remarks = [f"started by {settings.start_method}"] if _start_matters(result, settings) else []
    if run is None and failed is not None and failed.is_disturbed:
        remarks.append("measured while other processes were busy: not used")
    if settings.worker_threads != 1:
        remarks.append(f"{settings.worker_threads} threads a worker")
    if settings.library_threads is not None:
        remarks.append(library_words(settings.library_threads))
    return remarks


def _waiting(result: LoaderResult, candidate: Candidate | None, run: Confirmed | None) -> str:
    """The share of time that the GPU waits, measured if run; "-" where the step time is 0."""
    if not result.step_s:
        return "-"
    if run is not None and run.waiting_share is not None:
        return percent(run.waiting_share)
    return percent(candidate.waiting_share) if candidate is not None else ""


def _start_matters(result: LoaderResult, settings: LoaderSettings) -> bool:
    """Is its start method not every setting's?"""
    return bool(settings.num_workers) and (
        settings.start_method != "fork" or result.present.start_method != "fork"
    )


def by_workers(result: LoaderResult) -> list[Candidate]:
    """One candidate for each number of workers: the recommended, present or measured one, else
    the fastest."""
    chosen: dict[int, Candidate] = {}

    def rank(candidate: Candidate) -> tuple[bool, bool, bool, bool, float]:
        settings = candidate.settings
        return (
            not candidate.infeasible,
            steady(settings) == steady(result.recommended),
            steady(settings) == steady(result.present),
            _measured(result, settings) is not None,
            candidate.batches_per_s,
        )

    for candidate in result.candidates:
        workers = candidate.settings.num_workers
        if workers not in chosen or rank(candidate) > rank(chosen[workers]):
            chosen[workers] = candidate
    return [chosen[workers] for workers in sorted(chosen)]


def workers_table(result: LoaderResult) -> Table:
    """Over the number of workers, each with the other settings that suit it best."""
    chosen = by_workers(result)
    return figures(
        ("Workers", "Settings", "Predicted", "Measured", "GPU waits", "Cores", "RAM", "Remark"),
        [_workers_row(result, candidate) for candidate in chosen],
        "Batches per second by number of workers, each with the settings that suit it best",
        (0, 2, 3, 4, 5, 6),
        [n for n, candidate in enumerate(chosen) if candidate.settings == result.recommended],
    )


def _workers_row(result: LoaderResult, candidate: Candidate) -> tuple[str, ...]:
    settings = candidate.settings
    run = _measured(result, settings)
    waits = candidate.waiting_share
    if run is not None and run.waiting_share is not None:
        waits = run.waiting_share
    marks = []
    if steady(settings) == steady(result.recommended) and result.verdict != "cannot_tell":
        marks.append("recommended")
    if steady(settings) == steady(result.present):
        marks.append("current")
    if candidate.infeasible:
        marks.append(f"infeasible: {candidate.infeasible}")
    elif candidate.oversubscribed:
        marks.append(f"oversubscribed: {candidate.oversubscribed}")
    return (
        str(settings.num_workers),
        settings_words(settings),
        rate(candidate.batches_per_s),
        rate(run.measured_batches_per_s if run is not None else None),
        percent(waits) if result.step_s else "-",
        f"{candidate.busy_cores:.1f}",
        size(candidate.ram_bytes),
        ", ".join(marks),
    )


def too_many(result: LoaderResult) -> Facts | None:
    """Cost of more workers than needed."""
    candidate = result.candidate(result.recommended)
    if best_rate(result, result.recommended) is None:
        return None
    return facts(
        *((count(each.settings.num_workers, "worker"), _too_many_words(result, each, candidate))
          for each in result.too_many)
    )  # fmt: skip


def _saving(result: LoaderResult, more: Candidate, run: Confirmed | None) -> str:
    """Slow-down of saving a checkpoint while so many workers are running."""
    alone = result.save_alone_s
    measured = run.save_s if run is not None else None
    if not alone or more.save_s is None:
        return ""
    text = (
        f"saving {size(SAVE_BYTES)} of a checkpoint {more.save_s / alone:.1f} times as long as "
        "without workers"
    )
    return text if measured is None else f"{text} (measured {measured / alone:.1f})"


def _too_many_words(result: LoaderResult, more: Candidate, base: Candidate | None) -> str:
    run, usual = _measured(result, more.settings), _measured(result, result.recommended)
    said = [f"{rate(more.batches_per_s)} batches/s predicted"]
    if base is not None and base.batches_per_s:
        said[0] += f" ({more.batches_per_s / base.batches_per_s - 1:+.0%})"
    if run is not None:
        said.append(f"{rate(run.measured_batches_per_s)} measured")
    if more.ram_bytes is not None and base is not None and base.ram_bytes is not None:
        said.append(f"{size(max(0, more.ram_bytes - base.ram_bytes))} more RAM")
    if run is not None and run.context_switches_per_batch is not None:
        text = f"{run.context_switches_per_batch:.0f} context switches a batch"
        if usual is not None and usual.context_switches_per_batch is not None:
            text += f" (recommended: {usual.context_switches_per_batch:.0f})"
        said.append(text)
    if saving := _saving(result, more, run):
        said.append(saving)
    if more.infeasible:
        said.append(f"infeasible: {more.infeasible}")
    elif more.oversubscribed:
        said.append(f"oversubscribed: {more.oversubscribed}")
    return ", ".join(said)


# ---
# What a batch costs and what the machine allows.


def batch_facts(probe: Probe) -> Facts | None:
    """Costs of a batch: time by part, size, transfer to the main process, workers."""
    return facts(
        ("made", f"{count(probe.batches, 'batch', 'batches')} in {duration(probe.seconds)}"),
        ("data set", _dataset(probe)),
        ("in a worker", _worker(probe)),
        ("without workers", duration(probe.alone_s) if probe.alone_s is not None else ""),
        ("content", _content(probe)),
        ("hand-off", _transfer(probe)),
        ("sampler", _sampler(probe)),
        ("storage", _storage(probe.storage) if probe.storage is not None else ""),
        ("a worker", _one_worker(probe)),
        ("two workers", _scaling(probe)),
    )


def machine_rows(machine: LoaderMachine, ranks: int = 1) -> tuple[Row, ...]:
    """Limits of the machine for a DataLoader; unknown ones are shown as such."""
    usable = f"{cores(machine.usable_cores)} usable"
    of = "of " if ranks > 1 else ""
    details = [f"{of}{len(machine.affinity)} logical allowed"] if machine.affinity else []
    if machine.physical_cores is not None:
        details.append(f"{machine.physical_cores} physical")
    if machine.quota_cores is not None:
        details.append(f"quota of {cores(machine.quota_cores)}")
    worth = sum(machine.core_speeds)
    if worth < 0.95 * len(machine.core_speeds):  # slow cores, or two threads on one
        details.append(f"worth {worth:.1f} of the fastest alone")
    if ranks > 1:
        usable += f", the share of one of {ranks} ranks"
    return rows(
        ("cores", usable + (f" ({', '.join(details)})" if details else "")),
        ("RAM", _bytes(machine.available_bytes, "available")),
        ("/dev/shm", _bytes(machine.shm_free_bytes, "free")),
        ("open files", "cannot tell" if machine.open_files is None else str(machine.open_files)),
    )


def _bytes(nbytes: int | None, word: str) -> str:
    return "cannot tell" if nbytes is None else f"{size(nbytes)} {word}"


def _dataset(probe: Probe) -> str:
    kind = "iterable data set" if probe.kind == "iterable" else "map-style"
    words = [probe.dataset, kind]
    if probe.batch_size is not None:
        words.append(f"batch size {probe.batch_size}")
    if probe.samples is not None:
        words.append(f"{probe.samples} samples an epoch")
    return ", ".join(words)


def _worker(probe: Probe) -> str:
    if probe.fetch_s is None:
        return "not measured: no run with workers succeeded"
    text = duration(probe.fetch_s)
    if probe.variation is not None:
        text += f" ± {percent(probe.variation)} from batch to batch"
    if probe.fetch_cpu_s is not None:
        text += f"; {duration(probe.fetch_cpu_s)} of CPU"
        waited = 1 - probe.fetch_cpu_s / probe.fetch_s if probe.fetch_s else 0.0
        if probe.threads is not None and probe.threads > 1.1:
            text += f" on {probe.threads:.1f} threads at a time"
        elif waited > 0.1:
            text += f", the other {percent(waited)} waits (storage, locks, sleep, no free core)"
    pools = ", ".join(f"{name} {n}" for name, n in sorted(probe.thread_pools.items()))
    return text + (f"; thread pools: {pools}" if pools else "")


def _content(probe: Probe) -> str:
    return f"{size(probe.batch_bytes)} in {count(probe.batch_tensors, 'tensor')}"


def _transfer(probe: Probe) -> str:
    if probe.receive_s is None:
        return ""
    text = duration(probe.receive_s)
    if probe.receive_busy_s is not None:
        text += f" ({duration(probe.receive_busy_s)} while a worker loads the next)"
    if probe.pin_s is not None:
        text += f", {duration(probe.pin_s)} more to pin it"
    if probe.next_s is not None:
        text += f", {duration(probe.next_s)} in next()"
    return text


def _sampler(probe: Probe) -> str:
    """Only where it matters: above a hundredth of a batch."""
    if not probe.sampler_s or not probe.fetch_s or probe.sampler_s < 0.01 * probe.fetch_s:
        return ""
    return f"{duration(probe.sampler_s)} for a batch's indices"


def _storage(storage: StorageCost) -> str:
    text = f"{duration(storage.warm_s)} a batch from the page cache"
    if storage.cold_s is None:
        text += f"; cold: cannot tell{f' ({storage.reason})' if storage.reason else ''}"
    else:
        text += f", {duration(storage.cold_s)} from storage"
        if storage.read_bytes is not None:
            text += f" ({size(storage.read_bytes)} read)"
    if storage.file_bytes is not None:
        text += f"; {count(storage.files, 'file')} of {size(storage.file_bytes)}"
    if storage.cached_share is not None:
        fits = "all" if storage.cached_share >= 1 else percent(storage.cached_share)
        text += f", of which {fits} can stay in free RAM"
    return text


def _one_worker(probe: Probe) -> str:
    words = []
    if probe.worker_private_bytes is not None:
        words.append(f"{size(probe.worker_private_bytes)} of RAM of its own")
    starts = [f"{duration(s)} by {name}" for name, s in sorted(probe.start_s.items())]
    if starts:
        words.append(f"starts in {', '.join(starts)}")
    return "; ".join(words)


def _scaling(probe: Probe) -> str:
    if probe.scaling is None:
        return ""
    text = f"{probe.scaling:.2f} times the rate of one"
    if probe.contention:
        text += f" (one more busy core slows all cores by {percent(probe.contention, decimals=1)})"
    return text


# ---
# The DataLoader's part of a plan, in words: which part waits for which, and what would help.


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
    maximum = loading.input_at_most
    assert maximum is not None
    low, high = loading.input_range or (maximum, maximum)
    text = f"at most {rate(maximum)} batches/s"
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
    target = 1 / found.step_s
    if high < target:
        most = "up to " if loading.step_is_bound else ""
        by = times(target / (loading.input_at_most or high))
        return f"; the DataLoader is the limit there by {most}{by}"
    if low >= target:
        return "; the GPU is the limit there"
    return "; either part may be the limit there"


def verdict_words(loading: DataLoading, result: LoaderResult) -> str:
    """Which part is the limit, the DataLoader or the GPU."""
    if loading.bottleneck == "unknown":
        reason = "no step time is known; give --step-time"
        if result.step_s > 0:
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


#: Kinds of faults of a DataLoader by which its workers give wrong samples.
_WRONG_DATA = (
    *("shared_handle", "handle_before_fork", "iterable_not_sharded", "generator_copied"),
)


def keeps_up_text(result: PlanResult) -> str:
    """Does the DataLoader keep up?"""
    loading = result.loading
    if loading is None:
        return ""
    found = loading.result
    if found is None:
        return f"not tuned: {loading.failure}"
    if loading.input_at_most is not None and result.cpu is not None and not result.cpu.core_speed:
        where = result.cpu.name or "the other processor"
        return f"on {where}: {input_text(loading)}; measured here, see --explain"
    settings = f"num_workers={(loading.launched or found.recommended).num_workers}"
    factor = loading.factor or 0.0
    marked = f" ({BUSY})" if loading.evidence == "busy" else ""
    if loading.bottleneck == "unknown":
        why = f": {found.reason}" if found.faults and not found.candidates else ""
        return f"cannot tell whether {settings} keeps up{why}: see --explain"
    if loading.bottleneck == "gpu":
        more = f" ({times(factor)} the GPU's rate)" if factor >= _SAME else ""
        return f"{settings} keeps up{more}{marked}"
    most = "up to " if loading.step_is_bound else ""
    text = f"{settings} slows the step {most}{times(factor)}{marked}"
    helpful = next(filter(helps, most_helpful_first(found.advice)), None)
    if helpful is not None:
        text += f"; {effect_text(helpful)}: {helpful.title}"
    return text


def wrong_data_text(result: PlanResult) -> str:
    """What makes workers read other data than they are asked for, and its fix."""
    found = result.loading.result if result.loading is not None else None
    faults = found.faults if found is not None else ()
    wrong = next((fault for fault in faults if fault.kind in _WRONG_DATA), None)
    if wrong is None:
        return ""
    text = f" ({wrong.place})" if wrong.place is not None else ""
    return f"{wrong.title}{text}; fix: {wrong.fix.action}"
