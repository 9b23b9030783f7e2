"""The text of ``trainfit loader``: every verdict, what is not known, and what to write."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest

from helpers_loader import machine, probe, result
from helpers_report import on_one_line, whole
from trainfit.report.blocks import Chart
from trainfit.report.sections.loader import loader_line, loader_subject
from trainfit.report.sections.loader_figures import settings_words
from trainfit.results.dataloader import Candidate, Confirmed, LoaderSettings, StorageCost
from trainfit.results.findings import Finding, failure_finding
from trainfit.results.loader import CoreAdvice, LoaderResult, VariableAdvice, advice_finding

BEST = LoaderSettings(4, pin_memory=True, persistent_workers=True)
VARIABLE = VariableAdvice(
    "OMP_NUM_THREADS", "1", "environment", "OMP_NUM_THREADS=1", "one is enough", "8 of 2 cores"
)
CORES = CoreAdvice("taskset -c 0-3", (0, 1, 2, 3), "the fast cores", "4.9 and 3.8 GHz")


def loader_text(found: LoaderResult) -> str:
    return whole(loader_subject(found))


def commands(found: LoaderResult) -> list[str]:
    return [command.text for command in loader_subject(found).headline.commands]


def section(text: str, title: str) -> list[str]:
    """The lines of the section that begins so."""
    (found,) = (part for part in text.split("\n\n") if part.startswith(title))
    return found.splitlines()[1:]


def row(text: str, name: str) -> str:
    (found,) = (line for line in text.splitlines() if line.startswith(f"    {name} "))
    return found


@pytest.mark.parametrize(
    ("verdict", "words"),
    [
        ("change", "Change the settings: 8.33 → 24.8 batches/s, 2.98× (predicted)\n"),
        ("keep", "Keep the settings: no other is more than 2% faster (8.33 batches/s, predicted)"),
        ("nothing_to_gain", "Nothing to gain: the GPU is the limit (8.33 batches/s, predicted)"),
        ("no_setting_helps", "No setting helps: the limit is the storage (8.33 batches/s, pred"),
        ("cannot_tell", "Cannot tell which settings are best\n"),
    ],
)
def test_verdicts(verdict: Any, words: str) -> None:
    told = loader_text(result(verdict=verdict, limit="disk", reason="because of this"))
    assert words in told and "\n  because of this\n" in told


def test_present_and_recommended_stand_beside_each_other_with_what_was_measured() -> None:
    told = loader_text(result())
    assert row(told, "current").split() == ["current", "1", "2", "no", "no", "yes", "8.33", "67%"]
    assert row(told, "recommended").split() == (
        ["recommended", "4", "2", "yes", "yes", "yes", "24.8", "24.1", "2%"]
    )
    assert "confidence 1 real run of these settings differed by -3% from" in on_one_line(told)


def test_a_table_over_workers_has_measured_rates_and_what_cannot_be() -> None:
    (chart,) = (
        block
        for part in loader_subject(result()).sections
        for block in part.blocks
        if isinstance(block, Chart) and "workers" in block.title
    )
    rows = {row[0]: row[1:] for row in chart.table.rows}
    assert list(rows) == ["0", "1", "2", "3", "4", "6", "8", "16"]
    assert rows["4"][2:4] == ("24.1", "2%") and rows["4"][-1] == "recommended"
    assert rows["1"][-1] == "current" and rows["2"][1:4] == ("16.7", "-", "33%")
    assert "infeasible: 16.0 GiB of RAM" in [row[-1] for row in rows.values()]


def test_settings_that_differ_in_persistence_alone_have_the_same_rates() -> None:
    """What is confirmed runs for a moment: whether its workers persist does not matter there."""
    passing = dataclasses.replace(BEST, persistent_workers=False)
    run = dataclasses.replace(result().confirmed[0], settings=passing)
    seen = tuple(
        dataclasses.replace(each, settings=passing) if each.settings == BEST else each
        for each in result().candidates
    )
    told = loader_text(result(confirmed=(run,), candidates=seen))
    assert row(told, "recommended") == row(loader_text(result()), "recommended")


def test_the_confidence_is_that_of_the_chosen_settings() -> None:
    """Not of another one that was run, too."""
    mine = result().confirmed[0]
    other = dataclasses.replace(mine, settings=LoaderSettings(8), measured_batches_per_s=36.0)
    told = " ".join(loader_text(result(confirmed=(other, mine), ranks=2)).split())
    assert "1 real run of these settings, each with 2 copies of the DataLoader running, " in told
    assert "differed by -3% from the prediction" in told and "inaccurate" not in told
    told = " ".join(loader_text(result(confirmed=(other,))).split())
    assert "predicted only, no undisturbed real run of these settings; 1 run of others " in told
    assert "differed by +45% from the prediction" in told


def test_without_real_runs_and_without_a_step_that_is_said() -> None:
    text = loader_text(result(confirmed=(), step_s=0.0, step_source="nobody said"))
    told = " ".join(text.split())
    assert "confidence predicted only, not confirmed by a real run" in told
    assert "assumed as 0 (nobody said)" in told and "--step-time 40ms" in told
    assert row(text, "current").split()[-1] == "-"  # how long it waits means nothing


def test_a_busy_machine_is_why_no_run_confirms() -> None:
    """Whatever number of runs was asked for."""
    busy = Finding("busy_machine", "critical", "other processes competed for 1.9 cores")
    told = " ".join(loader_text(result(confirmed=(), doubts=(busy,))).split())
    assert "confidence predicted only; other processes kept the machine busy: repeat" in told
    assert "--confirm" not in told


def test_the_factor_is_said_once_and_no_row_repeats_the_recommended_one() -> None:
    best, head = result().recommended, "2.71× as many batches"
    text = loader_text(result(reason=head, without_others=best))
    assert head not in text and "without others" not in text
    more = f"{head}; then the GPU bounds"
    assert more in " ".join(loader_text(result(reason=more)).split())
    other = dataclasses.replace(best, num_workers=8)
    assert "without others" in loader_text(result(without_others=other))


def test_predictions_off_the_mark_are_said_to_be() -> None:
    runs = (
        Confirmed(BEST, 24.8, 14.0, 0.4, 40, 2.0),
        Confirmed(LoaderSettings(1), 8.0, 8.4, 0.6, 40, 2.0),
        Confirmed(LoaderSettings(8), 25.0, None, None, 0, 0.0),
    )
    told = " ".join(loader_text(result(confirmed=runs)).split())
    assert "1 real run of these settings differed by -44% from the prediction" in told
    assert "use the measured rates" in told
    assert "also run 8 2 no no yes 25.0 too slow" in told


def test_what_a_batch_costs() -> None:
    lines = section(loader_text(result()), "What a batch costs")
    told = " ".join(" ".join(lines).split())
    for words in (
        "in a worker 120 ms ± 31% from batch to batch; 114 ms of CPU",
        "made 150 batches in 20 s",
        "content 4 MiB in 2 tensors",
        "hand-off 900 µs (1.2 ms while a worker loads the next), 700 µs more to pin it",
        "storage 120 ms a batch from the page cache, 190 ms from storage (2 MiB read)",
        "a worker 180 MiB of RAM of its own; starts in 12 ms by fork, 2.9 s by spawn",
        "two workers 1.94 times the rate of one (one more busy core slows all cores by 2%)",
    ):
        assert words in told
    assert "sampler" not in told  # a fraction of a thousandth


def test_what_was_not_measured_is_left_out_or_said() -> None:
    bare = probe(
        kind="iterable",
        **dict.fromkeys(("fetch_s", "fetch_cpu_s", "variation", "alone_s", "receive_s")),
        **dict.fromkeys(("worker_private_bytes", "scaling", "batch_size", "samples")),
        start_s={},
        storage=StorageCost(0.1, None, None, 3, None, None, "the cache cannot be dropped"),
    )
    text = loader_text(result(probe=bare))
    told = " ".join(" ".join(section(text, "What a batch costs")).split())
    assert "in a worker not measured: no run with workers succeeded" in told
    assert "cold: cannot tell (the cache cannot be dropped)" in told
    assert "hand-off" not in told and "a worker " not in told.replace("in a worker", "")
    unknown = machine(available_bytes=None, shm_free_bytes=None, open_files=None)
    assert loader_text(result(machine=unknown)).count("cannot tell") == 3


def test_waiting_threads_and_slow_samplers() -> None:
    told = loader_text(result(probe=probe(fetch_cpu_s=0.03, sampler_s=0.02)))
    assert "the other 75% waits" in told and "20 ms for a batch's indices" in told
    busy = probe(fetch_cpu_s=0.5, threads=4.2, thread_pools={"opencv": 8})
    told = " ".join(loader_text(result(probe=busy)).split())
    assert "on 4.2 threads at a time; thread pools: opencv 8" in told


def test_a_quota_and_slow_cores_are_told() -> None:
    limited = machine(usable_cores=1.5, quota_cores=1.5, core_speeds=(1.0, 1.0, 0.6))
    told = loader_text(result(machine=limited))
    assert "1.5 usable (8 logical allowed, 4 physical, quota of 1.5, worth 2.6 of the" in told


def test_too_many_workers() -> None:
    more = Candidate(LoaderSettings(16, pin_memory=True), 21.0, 0.1, 8.0, 5 << 30)
    run = Confirmed(more.settings, 21.0, 19.5, 0.2, 40, 2.0, 900.0)
    whole = result(too_many=(more,), confirmed=(*result().confirmed, run))
    told = " ".join(section(loader_text(whole), "Too many workers"))
    assert "16 workers" in told and "21.0 batches/s predicted (-15%), 19.5 measured" in told
    assert "4.00 GiB more RAM" in " ".join(told.split())
    assert "900 context switches a batch (recommended: 120)" in " ".join(told.split())
    assert "saving" not in told


def test_what_saving_takes_beside_too_many_workers() -> None:
    more = Candidate(LoaderSettings(16), 21.0, 0.1, 8.0, 5 << 30, save_s=0.09)
    whole = result(too_many=(more,), save_alone_s=0.03)
    told = " ".join(" ".join(section(loader_text(whole), "Too many workers")).split())
    said = "saving 32 MiB of a checkpoint 3.0 times as long as without workers"
    assert said in told and "(measured" not in told
    run = Confirmed(more.settings, 21.0, 19.5, 0.2, 40, 2.0, 900.0, save_s=0.06)
    whole = result(too_many=(more,), save_alone_s=0.03, confirmed=(run,))
    told = " ".join(" ".join(section(loader_text(whole), "Too many workers")).split())
    assert f"{said} (measured 2.0)" in told


def test_threads_advice_faults_and_notes() -> None:
    init = VariableAdvice(
        "cv2", "0", "worker_init_fn", "cv2.setNumThreads(0)", "8 workers of 8 threads", "64 seen"
    )
    small = advice_finding("uint8", "send bytes", "convert on the GPU", 26.0, 1.05, "4 MiB")
    large = advice_finding("cache", "keep it in RAM", "a dict", 60.0, 2.4, "1 GiB")
    fault = failure_finding(
        "shm_full", "bus error", "Trace\n  deep", "--shm-size 8g", LoaderSettings(8)
    )
    found = result(
        variables=(VARIABLE, init),
        cores=CORES,
        advice=(small, large),
        faults=(fault,),
        notes=("n",),
        launch="OMP_NUM_THREADS=1 taskset -c 0-3 python train.py",
    )
    text = on_one_line(loader_text(found))
    assert "environment: OMP_NUM_THREADS=1 why one is enough evidence 8 of 2 cores" in text
    assert "worker_init_fn: cv2.setNumThreads(0) why 8 workers" in text
    assert "cores: taskset -c 0-3 why the fast cores" in text
    assert text.index("2.40× (predicted): keep it in RAM") < text.index("send bytes")
    assert "shm_full: bus error (with 8 workers, prefetch 2)" in text
    assert "fix --shm-size 8g" in text and "evidence Trace deep" in text
    assert [note.text for note in loader_subject(found).notes] == ["n"]
    assert commands(found) == [
        "DataLoader(…, num_workers=4, prefetch_factor=2, pin_memory=True, persistent_workers=True)",
        "cv2.setNumThreads(0)",
        "OMP_NUM_THREADS=1 taskset -c 0-3 python train.py",
    ]


def test_a_fault_that_was_met_several_times_is_told_once() -> None:
    fault = failure_finding("died", "it died", "signal 11", "upgrade")
    run = Confirmed(BEST, 1.0, None, None, 0, 0.0, fault=fault)
    found = result(faults=(fault,), probe=probe(faults=(fault,)), confirmed=(run, run))
    assert loader_text(found).count("died: it died") == 1


@pytest.mark.parametrize(
    ("settings", "line"),
    [
        (
            LoaderSettings(0),
            "DataLoader(…, num_workers=0, prefetch_factor=None, pin_memory=False, "
            "persistent_workers=False)",
        ),
        (
            LoaderSettings(2, 4, True, False, True, "spawn"),
            "DataLoader(…, num_workers=2, prefetch_factor=4, pin_memory=True, "
            'persistent_workers=True, in_order=False, multiprocessing_context="spawn")',
        ),
    ],
)
def test_the_line_to_write_is_one_that_pytorch_takes(settings: LoaderSettings, line: str) -> None:
    """Without workers PyTorch refuses prefetch_factor and persistent_workers."""
    from torch.utils.data import DataLoader

    written = loader_line(settings, LoaderSettings(1, persistent_workers=True))
    assert written == line
    arguments = eval(written.replace("DataLoader(…, ", "dict("))
    loader: Any = DataLoader([1, 2], **arguments)
    assert loader.num_workers == settings.num_workers


def test_nothing_is_to_be_written_where_nothing_changes() -> None:
    same = result(recommended=LoaderSettings(1), verdict="nothing_to_gain", confirmed=())
    assert commands(same) == commands(result(verdict="cannot_tell")) == []
    threads = dataclasses.replace(BEST, worker_threads=2)
    assert commands(result(recommended=threads))[1] == "torch.set_num_threads(2)"


def test_the_launch_line_is_the_plans() -> None:
    assert commands(result(launch="OMP_NUM_THREADS=1 python a.py"))[-1] == (
        "OMP_NUM_THREADS=1 python a.py"
    )
    given = result(command="--loader a.py:make", variables=(VARIABLE,), cores=CORES)
    assert commands(given)[-1] == "OMP_NUM_THREADS=1 taskset -c 0-3 COMMAND"
    ranks = dataclasses.replace(CORES, prefix="torchrun --numa-binding=node --nproc-per-node=2")
    assert commands(result(cores=ranks, launch="torchrun … python a.py"))[-1] == f"{ranks.prefix} …"


def test_a_bound_of_the_step_is_called_one() -> None:
    told = " ".join(loader_text(result(step_is_bound=True)).split())
    assert "a step at least 40 ms" in told
    assert "--step-time gives the real one" in told


def test_a_saved_result_reads_the_same() -> None:

    whole = result()
    assert LoaderResult.from_json(whole.to_json(), Path("x")) == whole


def test_settings_in_words() -> None:
    assert settings_words(LoaderSettings(0)) == "no workers"
    many = LoaderSettings(1, 4, True, False, True, "spawn", 2)
    assert settings_words(many) == (
        "1 worker, prefetch 4, pinned, persistent, out of order, spawn, 2 threads each"
    )


def test_changes_without_a_predicted_gain_have_their_share() -> None:
    decode = advice_finding("gpu_decoding", "decode on the GPU", "DALI", None, None, "seen", 0.46)
    resize = advice_finding("resize", "store them smaller", "re-encode", None, None, "", 0.7)
    text = loader_text(result(advice=(decode, resize)))
    assert "(predicted): " not in text
    assert text.index("70% of the time: store") < text.index("46% of the time: decode")


def test_a_change_that_gains_nothing_within_an_epoch_says_what_it_is() -> None:
    """Workers that persist: "8.33 → 8.33 batches/s" would tell nobody what to change."""
    stays = LoaderSettings(1, persistent_workers=True)
    told = loader_text(result(verdict="change", recommended=stays, confirmed=()))
    assert "Change the settings: 1 worker, prefetch 2, persistent (8.33 batches/s within" in told


def test_a_fault_for_which_slower_settings_are_recommended_comes_first() -> None:
    """Workers that each give all samples: fewer batches a second are no loss then."""
    fault = failure_finding("iterable_not_sharded", "Each worker yields all samples", "", "shard")
    slower = result(
        verdict="change", present=BEST, recommended=LoaderSettings(1), confirmed=(), faults=(fault,)
    )
    told = loader_text(slower)
    assert "Fix the data set first: Each worker yields all samples. Until then: 1 worker" in told
    faster = loader_text(result(verdict="change", faults=(fault,)))
    assert "Change the settings: 8.33 → 24.8" in faster
