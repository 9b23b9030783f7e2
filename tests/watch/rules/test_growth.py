"""What grows in a run, made of rows: RAM by kind, copied pages, files, the steps themselves."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import pytest

from helpers_watch import (
    GIB,
    LOADER,
    finding,
    kinds,
    loader,
    run,
    run_on_cpu,
    unknown_kinds,
    watch_screen,
)
from trainfit.findings.ranking import comes_first
from trainfit.report.watch import answer
from trainfit.results.findings import Finding
from trainfit.results.runs import tables
from trainfit.results.runs.learning import LearningFacts, Misuse
from trainfit.results.runs.watched import (
    FIGURES,
    CodeLine,
    Event,
    GrowingVariable,
    Holds,
    RunRecord,
    StackLooks,
)
from trainfit.results.watch import WatchResult
from trainfit.watch.judge import judge
from trainfit.watch.rules import longer_steps

MIB = 2**20
KEPT = GrowingVariable("outputs", "train.py:52", "list", 20, 400, 380, "graphs", 4 * MIB)
NUMBERS = GrowingVariable("losses", "train.py:53", "list", 20, 400, 380)
#: Steps of a healthy run that last 40 s.
STEPS = 400


def times(record: RunRecord) -> Any:
    return np.unique(record.processes["time_s"])


def memory_rows(record: RunRecord, role: int = 0, **columns: Any) -> tables.Table:
    """Memory by kind of one process each second."""
    at = times(record)[::10]
    rows = tables.empty_rows(tables.MEMORY, len(at))
    rows["time_s"], rows["pid"], rows["rank"], rows["role"] = at, 100 + role, 0, role
    rows["anonymous_bytes"], rows["file_bytes"], rows["shared_bytes"] = GIB, GIB, 0
    for name, per_s in columns.items():
        rows[name] = np.maximum(0, rows[name]) + per_s * (at - at[0])
    return rows


def growing(per_s: float, steps: int = STEPS, **header: Any) -> RunRecord:
    """The training process's RSS grows by so many bytes a second."""
    record = run(steps, header=header)
    rows = record.processes
    main = rows["role"] == 0
    rows["rss_bytes"][main] = 4 * GIB + per_s * rows["time_s"][main]
    return record


def with_memory(record: RunRecord, *rows: tables.Table, **others: Any) -> RunRecord:
    return dataclasses.replace(record, memory=np.concatenate(rows), **others)


# --- RAM ------------------------------------------------------------------------------------------


def test_the_variable_that_keeps_each_step_s_tensors() -> None:
    result = judge(growing(50 * MIB, growing=(NUMBERS, KEPT)))
    found = finding(result, "ram_growth")
    assert found.severity == "critical" and str(found.at) == "train.py:52"
    assert "5 MiB a step" in found.title and "`outputs` keeps each step's" in found.title
    assert "from 20 to 400 entries in 380 steps" in found.cause
    assert "detach()" in found.fix.action
    assert "train.py:52" in answer(result)


def test_ram_that_grows_without_a_variable_is_told_after_a_while() -> None:
    short = judge(growing(100 * MIB, steps=100))
    assert "ram_growth" not in kinds(short) and "ram_growth" in unknown_kinds(short)
    found = finding(judge(growing(50 * MIB, growing=(NUMBERS,))), "ram_growth")
    assert found.severity == "warning" and found.place is None and found.confidence == "likely"
    # With a name it is told at once.
    assert "ram_growth" in kinds(judge(growing(100 * MIB, steps=100, growing=(KEPT,))))


@pytest.mark.parametrize(("item_bytes", "named"), [(5 * MIB, True), (1024, False)])
def test_python_objects_whose_bytes_are_the_growth_are_named(item_bytes: int, named: bool) -> None:
    """Entries of 5 MiB in each step are what 50 MiB/s come from; of 1 KiB they are not."""
    rows = dataclasses.replace(NUMBERS, item_bytes=item_bytes)
    found = finding(judge(growing(50 * MIB, growing=(rows,))), "ram_growth")
    assert (str(found.place) == "train.py:53") is named
    assert ("`losses` keeps each step's Python objects" in found.title) is named
    if named:
        assert found.severity == "critical" and "5 MiB each" in found.cause
        assert "maxlen" in found.fix.action


def test_the_variable_that_gets_most_is_the_one() -> None:
    """Some small tensors that are kept, too, are not what fills the RAM."""
    small = dataclasses.replace(KEPT, holds="tensors", item_bytes=128)
    rows = dataclasses.replace(NUMBERS, item_bytes=5 * MIB)
    found = finding(judge(growing(50 * MIB, growing=(small, rows))), "ram_growth")
    assert "`losses` keeps" in found.title


def test_what_a_data_set_keeps_in_the_training_process_may_be_full_some_time() -> None:
    cache = GrowingVariable(
        "self.cache", "data.py:9", "dict", 200, 4000, 380, "tensors", MIB // 2, of_data=True
    )
    found = finding(judge(growing(50 * MIB, growing=(cache,))), "ram_growth")
    assert found.severity == "warning" and str(found.place) == "data.py:9"
    assert "keeps each batch's tensors" in found.title and "maxsize" in found.fix.action


def test_a_state_with_its_graph_is_named_by_both_that_it_costs() -> None:
    state = GrowingVariable("h", "train.py:9", "graph", 0, 380, 380, "graphs")
    longer = 0.05 + 2e-4 * np.arange(STEPS)
    result = judge(
        run_on_cpu(
            STEPS,
            header={"growing": (state,)},
            step_s=longer,
            backward_s=longer - 0.02,
            cpu_s=longer,
            end_s=np.cumsum(longer),
        )
    )
    for kind in ("ram_growth", "growing_steps"):
        found = finding(result, kind)
        assert str(found.place) == "train.py:9" and "its autograd graph" in found.title
        assert "through 380 steps" in found.cause and "detach()" in found.fix.action


def test_what_a_data_set_keeps_is_named_with_its_line() -> None:
    cache = GrowingVariable("Frames.load", "data.py:9", "cache", 200, 4000, 95)
    record = run(STEPS, header={"worker_growing": (NUMBERS, cache)})
    rows = record.processes
    worker = rows["role"] == 1
    rows["rss_bytes"][worker] = GIB + 50 * MIB * rows["time_s"][worker]
    found = finding(judge(record), "ram_growth")
    assert str(found.place) == "data.py:9" and "`Frames.load` keeps all" in found.title
    assert "200 to 4000 entries in 95 batches of a worker" in found.cause
    assert "maxsize" in found.fix.action and found.severity == "warning"
    alone = finding(judge(growing(50 * MIB, growing=(NUMBERS, cache))), "ram_growth")
    assert str(alone.place) == "data.py:9" and "in 95 steps" in alone.cause


def test_ram_that_is_full_before_the_data_set_was_read_once() -> None:
    """What holds the data set levels off with its first epoch: if that fits."""
    many, few = (dataclasses.replace(LOADER, batches=number) for number in (10**6, STEPS + 10))
    assert finding(judge(growing(GIB, loaders=(many,))), "ram_growth").severity == "critical"
    assert finding(judge(growing(GIB, loaders=(few,))), "ram_growth").severity == "warning"


def test_a_cache_of_more_than_the_ram_is_critical_at_once() -> None:
    """How large it becomes is known from one sample and from how many there are."""
    header = {"loaders": (dataclasses.replace(LOADER, batches=STEPS + 10, batch_size=1024),)}
    kept = GrowingVariable("self.seen", "data.py:9", "dict", 31, 5280, 165, "tensors", MIB)
    few = dataclasses.replace(kept, item_bytes=1000)

    def severity(variable: GrowingVariable) -> str:
        record = run(STEPS, header=header | {"worker_growing": (variable,)})
        worker = record.processes["role"] == 1
        record.processes["rss_bytes"][worker] = GIB + 50 * MIB * record.processes["time_s"][worker]
        return finding(judge(record), "ram_growth").severity

    assert severity(kept) == "critical" and severity(few) == "warning"


@pytest.mark.parametrize(
    ("holds", "samples", "told"),
    [("tensors", 5, True), ("tensors", 4, False), ("graphs", 4, True), ("graphs", 3, False)],
)
def test_a_variable_that_grows_needs_few_samples_of_the_ram(
    holds: Holds, samples: int, told: bool
) -> None:
    """On a full machine the sampler reads every few seconds."""
    every = growing(50 * MIB, growing=(dataclasses.replace(KEPT, holds=holds),))
    at = times(every)
    some = at[np.linspace(len(at) // 4, len(at) - 1, samples).astype(int)]
    rows = every.processes[np.isin(every.processes["time_s"], some)]
    result = judge(dataclasses.replace(every, processes=rows))
    assert any(each.title.startswith("RAM of the") for each in result.findings) == told
    unnamed = dataclasses.replace(growing(50 * MIB), processes=rows)
    assert "ram_growth" not in kinds(judge(unnamed))


def test_graphs_that_are_kept_are_told_before_the_ram_shows_it() -> None:
    """Without a look at the RAM in all; a window of some steps is no leak."""

    def told(**changes: Any) -> list[Finding]:
        record = growing(0, growing=(dataclasses.replace(KEPT, **changes),))
        record = dataclasses.replace(record, processes=record.processes[:0])
        return [each for each in judge(record).findings if each.kind == "ram_growth"]

    (found,) = told()
    assert found.severity == "warning" and str(found.at) == "train.py:52"
    assert "`outputs` keeps each step's autograd graph" in found.title
    for healthy in (
        {"holds": "tensors"},
        {"steps": 80, "last_size": 100, "item_bytes": 4},
        {"last_size": 60},  # one in ten steps: results of evaluations
    ):
        assert not told(**healthy), healthy
    # Outputs of a layer, which a hook keeps, are seen sooner than losses.
    few = {"first_size": 5, "last_size": 56, "steps": 50}
    assert told(**few, item_bytes=1 << 17) and not told(**few, item_bytes=4)


def test_without_the_garbage_collector_circles_stay() -> None:
    grows = finding(judge(growing(50e6, collector_off="train.py:3")), "ram_growth")
    assert "gc.disable() is in effect" in grows.title and str(grows.at) == "train.py:3"
    assert "gc.collect()" in grows.fix.action and grows.is_critical
    kept = finding(judge(growing(50e6, collector_off="train.py:3", growing=(KEPT,))), "ram_growth")
    assert "gc.disable" not in kept.title and str(kept.at) == "train.py:52"
    assert "ram_growth" not in kinds(judge(growing(0.0, collector_off="train.py:3")))


@pytest.mark.parametrize(("figures", "is_told"), [(65, True), (18, False)])
def test_figures_that_stay_open_are_told_before_the_ram_shows_it(
    figures: int, is_told: bool
) -> None:
    kept = GrowingVariable("pyplot", "train.py:11", FIGURES, 2, figures, 150)
    result = judge(growing(0.0, growing=(kept,)))
    assert ("ram_growth" in kinds(result)) == is_told
    if is_told:
        found = finding(result, "ram_growth")
        assert found.title.startswith("pyplot keeps each figure that is not closed")
        assert found.fix.line == "plt.close(fig)" and str(found.at) == "train.py:11"
        grows = finding(judge(growing(50e6, growing=(kept,))), "ram_growth")
        assert "a step: pyplot keeps each figure" in grows.title


def started(more: Any, events: bool = True) -> WatchResult:
    """So many processes as ``more`` says of a second, by the number of seconds."""
    record = run(STEPS)
    seconds = np.arange(0.0, 40.0)
    pids = [(at, 500 + n) for at in seconds for n in range(int(more(at)))]
    rows = np.zeros(len(pids), tables.PROCESSES)
    rows["time_s"], rows["pid"] = [at for at, _ in pids], [pid for _, pid in pids]
    rows["role"], rows["rss_bytes"] = 2, GIB // 4
    mains = record.processes[record.processes["role"] == 0]
    told = [Event(1.0, "child", 3, None, "data.py:6", {"pid": float(pid)}) for _, pid in pids[-9:]]
    rank = dataclasses.replace(record.ranks[0], events=tuple(told if events else ()))
    processes = np.concatenate([mains, rows])
    return judge(dataclasses.replace(record, processes=processes, ranks=(rank,)))


def test_processes_that_do_not_end() -> None:
    found = finding(started(lambda at: 2 + at / 3), "process_growth")
    assert found.title.endswith("5 at first, 15 in the end") and str(found.at) == "data.py:6"
    assert "Manager().shutdown()" in found.fix.action
    assert finding(started(lambda at: 2 + at / 3, events=False), "process_growth").place is None
    for healthy in (
        lambda at: 8,  # workers
        lambda at: min(8, at),  # a pool that is filled by what is asked of it
        lambda at: 4 * (at % 10 < 5),  # those of each epoch
        lambda at: 1 + at / 20,
    ):
        assert "process_growth" not in kinds(started(healthy))


def test_graphs_that_are_kept_are_told_of_less() -> None:
    """In a run of few steps, on a machine that others use."""
    for holds in ("graphs", "tensors"):
        record = growing(0, growing=(dataclasses.replace(KEPT, holds=holds),))
        main = record.processes["role"] == 0
        seconds = record.processes["time_s"][main]
        record.processes["rss_bytes"][main] = 300 * MIB + 2 * MIB * seconds
        titles = " ".join(each.title for each in judge(record).findings)
        assert ("RAM of the" in titles) == (holds == "graphs")


def test_of_what_kind_it_is() -> None:
    record = growing(50 * MIB, growing=(KEPT,))
    rows = memory_rows(record, anonymous_bytes=40 * MIB, shared_bytes=10 * MIB)
    found = finding(judge(with_memory(record, rows)), "ram_growth")
    parts = {each.what: each.value for each in found.evidence if each.what.startswith("of it")}
    assert parts == {
        "of it private (tensors, Python objects)": pytest.approx(2400 * MIB, rel=0.01),
        "of it shared with workers (their batches)": pytest.approx(600 * MIB, rel=0.01),
    }


def test_files_that_are_mapped_are_no_leak() -> None:
    record = growing(50 * MIB)
    assert "ram_growth" not in kinds(
        judge(with_memory(record, memory_rows(record, file_bytes=50 * MIB)))
    )


def test_a_cache_that_fills_is_none() -> None:
    record = run(STEPS)
    rows = record.processes
    main = rows["role"] == 0
    rows["rss_bytes"][main] = 4 * GIB + np.minimum(rows["time_s"][main], 15) * 200 * MIB
    assert "ram_growth" not in kinds(judge(record))


def test_ram_by_kind_is_on_the_screen() -> None:
    record = run(STEPS)
    result = judge(with_memory(record, memory_rows(record), memory_rows(record, 1)))
    assert [each.who for each in result.host_memory] == ["training", "workers"]
    text = " ".join(line.text.strip() for line in watch_screen(result))
    assert "RAM         the training process 2.00 GiB (1.00 GiB private, 0 B shared" in text


# --- Copy-on-write --------------------------------------------------------------------------------


def forked(copied: float, method: str = "fork", held: int = GIB, rss: float = 0.0) -> WatchResult:
    """Workers whose own memory grows by so many bytes a second, and their RSS by ``rss``."""
    record = run(STEPS, header={"loaders": (dataclasses.replace(LOADER, start_method=method),)})
    worker = memory_rows(record, 1, private_bytes=copied, anonymous_bytes=rss)
    worker["private_bytes"][::4] += MIB  # of a batch
    worker["private_bytes"][1::2] = -1  # it is counted now and then only
    main = memory_rows(record)
    main["anonymous_bytes"] = held
    return judge(with_memory(record, main, worker))


def test_workers_that_copy_what_they_read() -> None:
    found = finding(forked(10 * MIB, held=40 * GIB), "copy_on_write")
    assert found.severity == "critical"  # four copies of 40 GiB, 48 GiB are available
    assert "NumPy array" in found.fix.action and str(found.at) == "train.py:41"
    assert found.value_of("its RSS, which counts shared pages, too, by") == 0
    assert finding(forked(10 * MIB, held=5 * GIB), "copy_on_write").severity == "warning"
    assert finding(forked(10 * MIB), "copy_on_write").severity == "info"
    # What fills the RAM comes before what costs time, as other growth does.
    assert comes_first(found)


def test_copies_that_are_made_already_are_not_counted_twice() -> None:
    """Of 4 × 16 GiB the workers have made 4 × 10; 30 GiB are left."""
    record = run(STEPS, header={"loaders": (LOADER,)})
    worker = memory_rows(record, 1, private_bytes=0.0, anonymous_bytes=0.0)
    worker["private_bytes"] += (10 * GIB * np.linspace(0, 1, len(worker))).astype(np.int64)
    main = memory_rows(record)
    main["anonymous_bytes"] = 16 * GIB
    record.machine["ram_available_bytes"] = np.linspace(70, 30, len(record.machine)) * GIB
    assert finding(judge(with_memory(record, main, worker)), "copy_on_write").severity == "warning"


def test_what_is_no_copy() -> None:
    assert "copy_on_write" not in kinds(forked(10 * MIB, method="spawn"))
    # New memory: its RSS grows as much.
    assert "copy_on_write" not in kinds(forked(10 * MIB, rss=10 * MIB))
    assert "copy_on_write" not in kinds(forked(0.2 * MIB))


# --- Folders that fill ----------------------------------------------------------------------------


def shm(per_s: float, **others: Any) -> RunRecord:
    record = run(STEPS, **others)
    rows = record.machine
    rows["shm_used_bytes"] = GIB + per_s * rows["time_s"]
    rows["shm_free_bytes"] = 32 * GIB - rows["shm_used_bytes"]
    return record


def new_files(folder: int, nbytes: float, text: str) -> Event:
    values = {"folder": folder, "bytes": nbytes, "files": 300}
    return Event(40.0, "new_files", text=text, values=values)


def test_files_in_memory_that_nobody_deletes() -> None:
    writes = CodeLine("train.py:60", 30, (), "f.write", "", "disk")
    record = shm(50 * MIB, header={"other_code": StackLooks(100, (writes,))}, other_s=0.03)
    told = (new_files(tables.SHARED_MEMORY, 2 * GIB, "/dev/shm/part-*"),)
    result = judge(dataclasses.replace(record, sampler_events=told))
    found = finding(result, "shm_growth")
    assert found.is_critical and str(found.at) == "train.py:60"
    assert "300 files /dev/shm/part-*" in found.title
    assert "other_code" not in kinds(result)  # it is the same line
    assert found.value_of("full in") == pytest.approx(29 * GIB / (50 * MIB), rel=0.05)


def test_batches_of_workers_that_are_kept() -> None:
    record = shm(50 * MIB)
    rows = memory_rows(record, shared_bytes=50 * MIB)
    found = finding(judge(with_memory(record, rows)), "shm_growth")
    assert "batches of workers are kept" in found.title and ".clone()" in found.fix.action


def test_what_others_put_there_is_not_the_run_s() -> None:
    record = shm(50 * MIB)
    assert "shm_growth" not in kinds(judge(with_memory(record, memory_rows(record))))
    assert "shm_growth" not in kinds(judge(shm(0.1 * MIB)))


@pytest.mark.parametrize(
    ("mib", "workers", "told"), [(9, 4, True), (6, 4, False), (9, 2, False), (-1, 4, False)]
)
def test_a_small_shm_is_told_of_before_the_batches_fill_it(
    mib: int, workers: int, told: bool
) -> None:
    """Docker's default, of which little is used so far: 4 workers may have 8 batches ready."""
    record = run(
        header={"loaders": loader(num_workers=workers, prefetch_factor=2)},
        machine={"shm_free_bytes": 60 * 2**20, "shm_used_bytes": 4 * 2**20},
        fetches={"bytes": mib * 2**20 if mib > 0 else -1},
    )
    result = judge(record)
    assert ("shm_near_limit" in kinds(result)) is told
    if told:
        found = finding(result, "shm_near_limit")
        assert "64 MiB" in found.title and found.severity == "warning"
        assert "81 MiB needed" in found.fix.action


def test_temporary_files() -> None:
    record = run(STEPS)
    at = times(record)[::10]
    rows = tables.empty_rows(tables.FOLDERS, len(at))
    rows["time_s"], rows["folder"] = at, tables.TEMPORARY
    rows["used_bytes"] = 100 * GIB + 100 * MIB * at
    rows["free_bytes"] = 10 * GIB - 100 * MIB * at
    told = (new_files(tables.TEMPORARY, 3 * GIB, "/tmp/frames*/*.png"),)
    record = dataclasses.replace(record, folders=rows)
    found = finding(judge(dataclasses.replace(record, sampler_events=told)), "temporary_growth")
    assert "/tmp/frames*/*.png" in found.title and found.is_critical
    # Another program fills the disk.
    assert "temporary_growth" not in kinds(judge(record))


def test_temporary_files_of_one_name_whatever_else_comes_and_goes() -> None:
    """Other programs fill and empty the same file system."""
    record = run(STEPS)
    at = times(record)[::10]
    rows = tables.empty_rows(tables.FOLDERS, len(at))
    rows["time_s"], rows["folder"] = at, tables.TEMPORARY
    rows["used_bytes"] = 100 * GIB - 50 * MIB * at + GIB * (np.arange(len(at)) % 3)
    rows["free_bytes"] = 10 * GIB
    record = dataclasses.replace(record, folders=rows)

    def judged(*told: tuple[float, float]) -> WatchResult:
        events = [
            dataclasses.replace(new_files(tables.TEMPORARY, each, "/tmp/frames_*"), time_s=time_s)
            for time_s, each in told
        ]
        return judge(dataclasses.replace(record, sampler_events=tuple(events)))

    found = finding(judged((15.0, 40 * MIB), (30.0, 80 * MIB)), "temporary_growth")
    assert "300 files /tmp/frames_*" in found.title
    assert found.value_of("growth") == pytest.approx(60 * 40 * MIB / 15, rel=0.01)
    for told in ([(30.0, 80 * MIB)], [(15.0, 30 * MIB), (30.0, 50 * MIB)]):
        assert "temporary_growth" not in kinds(judged(*told))
    # Written within a second, and no more since.
    assert "temporary_growth" not in kinds(judged((10.0, 40 * MIB), (11.0, 80 * MIB)))


# --- Steps that get longer ------------------------------------------------------------------------


def longer(own: bool = True, steps: int = 200, **header: Any) -> WatchResult:
    """The backward pass takes 0.3 ms longer in each step, on the CPU; with ``own`` CPU time."""
    more = 0.3e-3 * np.arange(steps)
    record = run_on_cpu(steps, backward_s=0.05 + more, header=header)
    rows = record.ranks[0].steps
    rows["cpu_s"] = 0.9 * (rows["step_s"] if own else np.full(steps, 0.1))
    return judge(record)


def test_a_history_that_is_never_cut() -> None:
    tokens = GrowingVariable("tokens", "train.py:30", "tensor", 64, 3200, 190, "tensors")
    result = longer(growing=(KEPT, tokens))
    found = finding(result, "growing_steps")
    assert str(found.at) == "train.py:30" and "`tokens` grows" in found.title
    assert "in the backward pass" in found.title and found.share == pytest.approx(0.2, abs=0.05)
    assert "from 64 to 3200 elements" in found.cause
    assert "cut the history" in found.fix.action


def test_a_history_is_told_where_other_programs_leave_more_in_the_second_half() -> None:
    """Steps stay as long then, while each has more to compute with."""
    bank = GrowingVariable("bank", "train.py:11", "tensor", 24_576, 1_325_056, 190, "tensors")
    until = np.minimum(np.arange(200), 140)
    for grows, is_told in (((bank,), True), ((KEPT,), False)):
        record = run_on_cpu(200, backward_s=0.01 + 2e-3 * until, header={"growing": grows})
        rows = record.ranks[0].steps
        rows["cpu_s"] = 0.9 * rows["step_s"]
        result = judge(record)
        assert ("growing_steps" in kinds(result)) is is_told
        if is_told:  # steps at first leave no more than that
            assert 0.5 < (finding(result, "growing_steps").share or 0.0) < 0.95


def test_a_log_that_each_step_writes_out_whole() -> None:
    """Numbers are computed with in the script's own code: there is nothing to cut or detach."""
    more = 0.3e-3 * np.arange(200)
    record = run_on_cpu(200, other_s=0.05 + more, header={"growing": (NUMBERS,)})
    rows = record.ranks[0].steps
    rows["cpu_s"] = 0.9 * rows["step_s"]
    found = finding(judge(record), "growing_steps")
    assert "`losses` grows" in found.title and "other Python code" in found.title
    assert "append a line" in found.fix.action and "detach" not in found.fix.action


def test_longer_steps_of_which_no_variable_tells() -> None:
    found = finding(longer(), "growing_steps")
    assert found.place is None and "detach()" in found.fix.action


def test_steps_that_get_longer_as_their_inputs_do_are_meant() -> None:
    def sizes(last: int) -> Any:
        return tuple((step, 1000 if step < 100 else last) for step in range(0, 200, 5))

    found = finding(longer(input_sizes=sizes(4000)), "growing_steps")
    assert found.severity == "info" and "from 1,000 to 4,000 numbers" in found.title
    assert answer(longer(input_sizes=sizes(4000))).find("longer") < 0
    assert finding(longer(input_sizes=sizes(1000)), "growing_steps").severity != "info"
    # A history that is never cut is an input that grows, too.
    tokens = GrowingVariable("tokens", "train.py:30", "tensor", 64, 3200, 190, "tensors")
    more = tuple((step, 1000 + 20 * step) for step in range(0, 200, 5))
    kept = longer(input_sizes=more, growing=(tokens,))
    assert finding(kept, "growing_steps").severity != "info"
    # What no line adds to is longer because the inputs are: a curriculum.
    planned = dataclasses.replace(tokens, place="")
    assert finding(longer(input_sizes=more, growing=(planned,)), "growing_steps").severity == "info"
    # … and what it gives in stages has a name, too.
    assert finding(longer(input_sizes=sizes(4000), growing=(tokens,)), "growing_steps") == found


def test_an_optimizer_that_gets_more_and_more_parameters() -> None:
    added = Misuse("parameters_added", ("30", "6", "66"), "train.py:27")
    learning = LearningFacts(steps=10, misuses=(added,))
    more = 1 + 6e-3 * np.arange(200)
    longer = {f"{name}_s": 0.02 * more for name in ("forward", "backward", "optimizer")}
    record = run_on_cpu(200, **longer, header={"learning": learning})
    rows = record.ranks[0].steps
    rows["cpu_s"] = 0.9 * rows["step_s"]
    found = finding(judge(record), "growing_steps")
    assert "the optimizer gets new parameters" in found.title and str(found.at) == "train.py:27"
    assert "before the loop" in found.fix.action


def test_other_programs_that_come_make_no_growing_steps() -> None:
    assert "growing_steps" not in kinds(longer(own=False))


def test_a_machine_that_gets_busier_makes_no_growing_steps() -> None:
    """Threads that wait for one another compute meanwhile, so that CPU time grows as well."""
    more = 1 + 6e-3 * np.arange(200)
    busier = {f"{name}_s": 0.02 * more for name in ("forward", "backward", "optimizer")}
    record = run_on_cpu(200, **busier, header={"growing": (NUMBERS,)})
    rows = record.ranks[0].steps
    rows["cpu_s"] = 0.9 * rows["step_s"]
    assert "growing_steps" not in kinds(judge(record))
    # A model that computes with more and more has no more parameters.
    record = run_on_cpu(200, **busier | {"optimizer_s": 0.02}, header={"growing": (NUMBERS,)})
    rows = record.ranks[0].steps
    rows["cpu_s"] = 0.9 * rows["step_s"]
    assert "growing_steps" in kinds(judge(record))


@pytest.mark.parametrize(("more", "is_told"), [(0.0, False), (1e-3, True)])
def test_longer_waits_are_growth_where_batches_need_longer(more: float, is_told: bool) -> None:
    """At first ready batches are used up, and no batch needs longer."""
    steps = 200
    seconds = 0.2 + more * np.arange(steps)
    waits = np.linspace(0.0, 0.2, steps)
    record = run_on_cpu(steps, input_s=waits, fetches={"fetch_s": seconds, "cpu_s": seconds})
    assert ("growing_steps" in kinds(judge(record))) == is_told


@pytest.mark.parametrize(("more", "is_told"), [(0.0, False), (1e-3, True)])
def test_batches_that_others_make_late_do_not_cost_more(more: float, is_told: bool) -> None:
    """Their CPU time stays, whatever the cores are used for by others, who become more."""
    steps = np.arange(200)
    seconds = {"fetch_s": 0.2 + 2e-3 * steps, "cpu_s": 0.1 + more * steps}
    machine = {"cores_busy": 2.0, "cores_ours": 0.5}
    words = {"header": {"usable_cores": 2.0}, "machine": machine, "fetches": seconds}
    result = judge(run_on_cpu(200, input_s=np.linspace(0.0, 0.4, 200), **words))
    assert ("growing_steps" in kinds(result)) == is_told
    if is_told:
        assert "x[:, -N:]" not in finding(result, "growing_steps").fix.action


def test_steady_steps_do_not_grow() -> None:
    assert "growing_steps" not in kinds(judge(run_on_cpu(200)))
    once = np.where(np.arange(200) < 100, 0.05, 0.09)  # a second phase of training
    assert "growing_steps" not in kinds(judge(run_on_cpu(200, backward_s=once)))


# --- Order ----------------------------------------------------------------------------------------


def test_what_ends_the_run_comes_before_what_costs_time() -> None:
    record = growing(50 * MIB, growing=(KEPT,))
    waits = run(STEPS, input_s=0.06, header={"growing": (KEPT,)})
    processes = waits.processes
    main = processes["role"] == 0
    processes["rss_bytes"][main] = 4 * GIB + 50 * MIB * processes["time_s"][main]
    assert kinds(judge(waits))[0] == "ram_growth"
    assert kinds(judge(record)) == ["ram_growth"]


def test_memory_of_tensors_on_a_gpu_is_named_by_the_variable() -> None:
    record = run(STEPS, allocated_bytes=8 * GIB + 2 * MIB * np.arange(STEPS))
    found = finding(judge(record), "memory_growth")
    assert found.place is None
    record = run(
        STEPS, allocated_bytes=8 * GIB + 2 * MIB * np.arange(STEPS), header={"growing": (KEPT,)}
    )
    found = finding(judge(record), "memory_growth")
    assert str(found.at) == "train.py:52" and "`outputs`" in found.title


# --- Threads --------------------------------------------------------------------------------------


def test_threads_that_do_not_end_are_counted() -> None:
    """A pool for each batch."""
    record = run_on_cpu()
    main = record.processes["role"] == 0
    count = int(main.sum())
    record.processes["threads"][main] = np.linspace(8, 400, count)
    found = finding(judge(record), "thread_growth")
    assert found.title.startswith("Threads that the script starts do not end:")
    assert "pool.shutdown()" in found.fix.action
    # One pool that fills, or many threads from the beginning.
    record.processes["threads"][main] = np.minimum(np.linspace(8, 400, count), 100)
    assert "thread_growth" not in kinds(judge(record))
    record.processes["threads"][main] = np.linspace(8, 40, count)
    assert "thread_growth" not in kinds(judge(record))


# --- Memory that runs out, which the script catches ---------------------------------------------


def ran_out(*steps: int) -> list[Event]:
    told = []
    for number, step in enumerate(steps):
        words = "CUDA out of memory. Tried to allocate 20.00 MiB"
        told.append(Event(10.0 + number, "out_of_memory", step, None, words))
        told.append(Event(10.0 + number, "out_of_memory_at", step, None, "train.py:41"))
    return told


def test_a_step_that_is_tried_over_and_over_is_told_with_its_line() -> None:
    result = judge(run(header={"ending": "interrupted"}, events=ran_out(200, 200, 200, 200)))
    found = result.findings[0]
    assert (found.kind, found.severity, str(found.place)) == (
        "memory_retried",
        "critical",
        "train.py:41",
    )
    assert "each try of step 200: 4 so far" in answer(result)
    assert "within `except`" in found.cause.lower() and "after it" in found.fix.action


def test_steps_that_are_left_out_now_and_then_are_told() -> None:
    found = finding(judge(run(events=ran_out(20, 60, 90, 120, 150))), "memory_retried")
    assert found.severity == "warning" and "In 5 of 200 steps" in found.title


@pytest.mark.parametrize(
    "events",
    [
        ran_out(0, 0, 0, 0, 0, 0),  # a search for the batch size, which was found
        ran_out(3, 9),
        [
            *ran_out(200),
            Event(12.0, "exception", 200, None, "Traceback (most recent call last):\n"
            "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 20.00 MiB"),
        ],
    ],
)  # fmt: skip
def test_few_tries_and_a_run_that_ends_by_it_are_none(events: list[Event]) -> None:
    assert "memory_retried" not in kinds(judge(run(events=events)))


@pytest.mark.parametrize(("lengths", "rises"), [((1, 2, 3, 4), True), ((1, 4, 2, 5), False)])
def test_steps_of_which_some_are_longer_in_between_do_not_rise(
    lengths: tuple[int, ...], rises: bool
) -> None:
    """What a full machine does to light steps, whose phases are estimates."""
    assert longer_steps._rises(np.repeat(np.array(lengths, dtype=np.float64), 50)) is rises
