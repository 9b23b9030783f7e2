"""What batches wait for, by looks at those who make them; and few slow ones among many."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest

from helpers_watch import finding, kinds, loader, run_on_cpu
from trainfit.report.watch import answer
from trainfit.results.runs import tables
from trainfit.results.runs.watched import CodeLine, StackLooks, WaitsFor
from trainfit.results.watch import WatchResult
from trainfit.watch.judge import judge

#: Two cores, both of which two other programs keep busy.
BUSY = {"cores_busy": 2.0, "cores_ours": 0.2, "runnable": 4.0}
SLEEP = CodeLine("data.py:7", 60, (), "time.sleep", "time.sleep", "sleep")
LOCK = CodeLine("data.py:7", 45, (), "multiprocessing.synchronize.__enter__", "", "lock")


def waiting(*lines: CodeLine, workers: int = 2, **changes: object) -> WatchResult:
    header = {
        "usable_cores": 2.0,
        "threads": {"torch": 1},
        "loaders": loader(num_workers=workers, prefetch_factor=2 if workers else None),
        "fetch_code": StackLooks(105, lines),
    } | dict(changes.pop("header", {}))  # type: ignore[call-overload]
    fetches = {"fetch_s": 0.4, "cpu_s": 0.004, "read_s": np.nan, "decode_s": np.nan}
    fetches |= {"transform_s": np.nan, "collate_s": np.nan} | dict(changes.pop("fetches", {}))  # type: ignore[call-overload]
    columns = {"input_s": 0.3, "queued": 0} | changes
    return judge(run_on_cpu(machine=BUSY, header=header, fetches=fetches, **columns))


def test_no_number_of_workers_helps_against_a_lock() -> None:
    result = waiting(SLEEP, LOCK)
    found = finding(result, "input_bound")
    assert "num_workers" not in found.fix.settings and "would not help" in found.fix.action
    assert "a lock at data.py:7" in found.cause
    assert "workers wait for a lock, at data.py:7" in answer(result)


def test_a_sleep_is_no_disk_and_more_workers_help_on_busy_cores() -> None:
    found = finding(waiting(SLEEP), "input_bound")
    assert found.fix.settings.keys() == {"num_workers"} and "sleeping" in found.cause
    assert "disk" not in found.fix.action and str(found.place) == "data.py:7"


def test_a_sleep_in_the_main_process_wants_a_worker_on_busy_cores() -> None:
    fetches = {"fetch_s": 0.3, "cpu_s": 0.004}
    found = finding(waiting(SLEEP, workers=0, fetches=fetches), "no_workers")
    assert int(found.fix.settings["num_workers"]) >= 1 and str(found.place) == "data.py:7"


def test_a_pause_before_another_try_is_told_with_the_error_that_is_caught() -> None:
    """And half of the batches have one: their median tells nothing of what all cost."""
    pause = dataclasses.replace(SLEEP, count=90, over="range(tries)")
    times = np.where(np.arange(200) % 9 < 4, 0.8, 0.006)
    fetches = {"fetch_s": times, "cpu_s": 0.002}
    result = waiting(pause, input_s=0.15, fetches=fetches)
    found = finding(result, "input_bound")
    assert "data.py:7 sleeps (`time.sleep`)" in answer(result)
    assert "log the error that is caught" in found.fix.action
    assert "2 of 2 needed" not in found.cause and int(found.fix.settings["num_workers"]) > 2


def test_few_slow_samples_are_asked_before_cores_and_hand_off() -> None:
    slow = np.where(np.arange(200) % 7 == 3, 0.5, 0.001)
    header = {"slow_samples": {"37": 0.45, "137": 0.45}}
    result = waiting(SLEEP, header=header, fetches={"fetch_s": slow, "cpu_s": 0.001})
    found = finding(result, "input_bound")
    assert "few of them take long" in answer(result) and "samples 37, 137" in found.cause
    assert int(found.fix.settings["prefetch_factor"]) >= 4


def test_reads_from_the_network_are_no_disk_and_more_workers_help_next_to_other_programs() -> None:
    """They are advised also where the training is so quick that no number keeps up with it."""
    recv = CodeLine("data.py:7", 100, (), "urlopen", "self._sock.recv_into", "network")
    fetches = {"fetch_s": 0.4, "cpu_s": 0.06, "read_s": 0.39}
    found = finding(waiting(recv, workers=1, fetches=fetches), "input_bound")
    assert int(found.fix.settings["num_workers"]) > 1 and "the network" in found.cause
    assert "disk" not in f"{found.cause} {found.fix.action}"
    quick = dict.fromkeys(("forward_s", "backward_s", "optimizer_s"), 0.001)
    found = finding(waiting(recv, workers=1, fetches=fetches, **quick), "input_bound")
    assert int(found.fix.settings["num_workers"]) > 1


def test_the_line_that_most_of_a_batch_s_time_goes_to() -> None:
    decodes = CodeLine("data.py:9", 90, (), "image.resize", "image.resize", "")
    found = finding(waiting(decodes, fetches={"cpu_s": 0.39}), "input_bound")
    assert not found.fix.settings and str(found.place) == "data.py:9"
    assert found.value_of("data.py:9, share of a batch's time") == pytest.approx(90 / 105)
    spread = [CodeLine(f"data{n}.py:9", 15, (), "", "", "") for n in range(7)]
    found = finding(waiting(*spread, fetches={"cpu_s": 0.39}), "input_bound")
    assert str(found.place) == "train.py:41"


@pytest.mark.parametrize(
    ("calls", "inner", "what", "action"),
    [
        ("h5py.File", "h5py._hl.files.make_fid", "opens the file", "open it once in each worker"),
        ("zipfile.ZipFile", "fp.read", "opens the file", "open it once in each worker"),
        ("csv.reader", "codecs.decode", "reads a whole table", "once, in __init__"),
        ("json.loads", "self.scan_once", "parses text", "parse once"),
        ("tokenizer", "tokenizer.encode_plus", "makes tokens", "before the training"),
        ("Image.open(path).convert", "decoder.decode", "decodes or resizes", "Image.draft"),
    ],
)
def test_what_a_sample_s_line_does_is_named(calls: str, inner: str, what: str, action: str) -> None:
    line = CodeLine("data.py:9", 90, (), calls, inner, "")
    result = waiting(line, fetches={"cpu_s": 0.39})
    found = finding(result, "input_bound")
    assert f": data.py:9 {what}" in found.title and action in found.fix.action
    assert answer(result).count("data.py:9") == 1
    alone = finding(waiting(line, workers=0, fetches={"cpu_s": 0.39}), "input_bound")
    assert action in alone.fix.action


def test_a_loop_over_elements_in_collate_fn_is_named() -> None:
    line = CodeLine("data.py:12", 90, (), "", "__main__.collate_fn", "", "enumerate(sample)")
    found = finding(waiting(line, fetches={"cpu_s": 0.39}), "input_bound")
    assert "data.py:12 goes over `enumerate(sample)` in Python" in found.title
    assert "pad_sequence" in found.fix.action


def test_no_more_workers_than_batches_or_than_a_machine_bears() -> None:
    """A sleep of minutes would want thousands."""
    slow = {"fetch_s": 400.0, "cpu_s": 0.004}
    few = loader(num_workers=0, prefetch_factor=None, batches=8)
    found = finding(waiting(SLEEP, workers=0, fetches=slow), "no_workers")
    assert int(found.fix.settings["num_workers"]) <= 16
    found = finding(waiting(SLEEP, header={"loaders": few}, fetches=slow), "no_workers")
    assert int(found.fix.settings["num_workers"]) <= 8


def test_a_small_batch_that_comes_late_is_late_by_other_programs() -> None:
    """Nothing is won by sending less."""
    fetches = {"fetch_s": 0.05, "cpu_s": 0.04, "bytes": 20_000}
    fix = finding(waiting(fetches=fetches, queued=2), "input_bound").fix
    assert "send less" not in fix.action and "stop the other programs" in fix.action
    fix = finding(waiting(fetches=fetches | {"bytes": 10**8}, queued=2), "input_bound").fix
    assert "stop the other programs" not in fix.action


def test_what_the_choice_of_samples_costs_is_no_lack_of_workers() -> None:
    chosen = StackLooks(100, (CodeLine("sampler.py:3", 60, (), "random.sample", "random.sample"),))
    result = waiting(header={"sampler_code": chosen}, fetches={"fetch_s": 0.3})
    found = finding(result, "sampler_share")
    assert found.share == 0.6 and str(found.place) == "sampler.py:3"
    assert "60% of the time: sampler.py:3" in answer(result)
    alone = finding(waiting(fetches={"fetch_s": 0.3}), "input_bound")
    rest = [each.share or 0.0 for each in result.findings if each.kind == "input_bound"]
    assert sum(rest) == pytest.approx((alone.share or 0.0) - 0.6, abs=0.01)


def test_looks_that_come_late_to_a_sampler_in_c_are_no_slow_transfer() -> None:
    """Part of the waits was seen in it, and batches are cheap and ready: the rest is its, too."""
    cheap = {"fetch_s": 0.0008, "cpu_s": 0.0008, "bytes": 20_000}

    def judged(looks: int, of: str = "random.choices") -> list[str]:
        chosen = StackLooks(100, (CodeLine("sampler.py:8", looks, (), of, "list"),))
        result = waiting(header={"sampler_code": chosen}, fetches=cheap, queued=2, input_s=0.08)
        return [f"{each.kind} {each.share or 0.0:.2f}" for each in result.findings]

    shares = dict(each.split() for each in judged(20))
    assert float(shares["sampler_share"]) > 0.25 and float(shares.get("input_bound", "0")) < 0.15
    few = dict(each.split() for each in judged(5))
    assert float(few["sampler_share"]) == 0.05 and float(few["input_bound"]) > 0.15


def test_a_sampler_of_pytorch_that_draws_all_samples_of_long_epochs() -> None:
    """None of its lines is the script's; epochs' starts are what it costs."""
    own = "torch.utils.data.sampler.__iter__"
    lines = tuple(CodeLine("", 90, (), own, each) for each in ("torch.multinomial", "x.tolist"))
    flags = np.where(np.arange(200) % 50 == 0, tables.EPOCH_START, 0)
    input_s = np.where(flags > 0, 4.0, 0.001)
    result = waiting(header={"sampler_code": StackLooks(400, lines)}, input_s=input_s, flags=flags)
    found = finding(result, "sampler_share")
    assert found.title.endswith("45% of the time: WeightedRandomSampler")
    assert str(found.at) == "train.py:41" and "num_samples" in found.fix.action
    assert "epoch_start" not in kinds(result)


def test_without_looks_it_is_as_before() -> None:
    header = {"fetch_code": StackLooks()}
    found = finding(waiting(header=header), "input_bound")
    assert "reading" in found.cause and str(found.place) == "train.py:41"


@pytest.mark.parametrize(
    ("waits_for", "said"),
    [("network", "waits for the network"), ("process", "waits for another process")],
)
def test_a_line_that_waits_is_not_told_to_compute(waits_for: WaitsFor, said: str) -> None:
    """A socket of the script's own, which no library's name tells."""
    line = CodeLine("data.py:16", 90, (), "c.recv", "c.recv", waits_for)
    assert f"data.py:16 {said} for most of a batch's time" in answer(waiting(line))


def test_neighbouring_lines_of_the_data_set_are_one_place() -> None:
    """Of which none has half of a batch's time; a habit is told where most of them have it."""
    parts = [CodeLine(f"data.py:{n}", 14, (), f"np.f{n}", f"np.f{n}") for n in range(10, 17)]
    text = answer(waiting(*parts, fetches={"cpu_s": 0.39}))
    assert "data.py:10-16 compute most of a batch" in text and "at data.py" not in text
    over = [CodeLine(each.place, each.count, (), each.calls, "", "", "row") for each in parts]
    text = answer(waiting(*over, fetches={"cpu_s": 0.39}))
    assert "data.py:10-16 goes over `row` in Python" in text and "np." not in text


def test_a_library_found_in_another_function_at_each_look_is_told_by_the_known_ones() -> None:
    """A file that is read in a gzip stream; of what is not known half is no answer."""
    inner = ("self.file.read", "gzip.closed", "self._decompressor.decompress")
    counts = (35, 30, 28)
    lines = [
        CodeLine("data.py:9", n, (), "next", each) for n, each in zip(counts, inner, strict=True)
    ]
    found = finding(waiting(*lines, fetches={"cpu_s": 0.39}), "input_bound")
    assert "data.py:9 unpacks or checks a file for each sample" in found.title
    unknown = CodeLine("data.py:9", 90, (), "next", "self.file.read")
    found = finding(waiting(unknown, fetches={"cpu_s": 0.39}), "input_bound")
    assert str(found.place) == "data.py:9" and "unpacks" not in found.title


def test_batches_that_come_late_next_to_other_programs_are_late_by_what_they_cost() -> None:
    """With a training that needs less of the cores than they; else the hand-off is what is late."""
    line = CodeLine("data.py:9", 90, (), "copy.deepcopy", "memo.get")
    costs = {"fetch_s": 0.5, "cpu_s": 0.3}
    result = waiting(line, fetches=costs, queued=2, cpu_s=0.02)
    found = finding(result, "input_bound")
    assert str(found.place) == "data.py:9" and "copies in depth" in found.title
    assert found.fix.action.startswith("copy only what is changed")
    assert "stop the other programs" in found.fix.action
    found = finding(waiting(line, fetches=costs, queued=2, cpu_s=0.4), "input_bound")
    assert "copies in depth" not in found.title


def test_what_waits_for_a_disk_in_vain_is_told_to_leave_it() -> None:
    """A log that is written through for each sample: no local disk mends it."""
    line = CodeLine("data.py:9", 90, (), "os.fsync", "os.fsync", "disk")
    found = finding(waiting(line, workers=1), "input_bound")
    assert "do without fsync()" in found.fix.action and "local disk" not in found.fix.action


def test_a_worker_that_sleeps_is_a_slow_one_next_to_other_programs() -> None:
    """Whatever threads a library keeps in each worker: it needs no core."""
    turns = np.arange(200) % 3
    fetches = {"fetch_s": np.where(turns == 2, 0.9, 0.02), "cpu_s": 0.004, "worker": turns}
    header = {"worker_threads": {"torch": 2}}
    result = waiting(SLEEP, workers=3, header=header, fetches=fetches)
    found = finding(result, "slow_worker")
    assert str(found.place) == "data.py:7" and "data.py:7" in answer(result)
    assert "few of them" not in answer(result)


def test_a_sampler_that_reads_samples_is_told_so() -> None:
    inner = CodeLine("data.py:5", 60, ("sampler.py:9",), "torch.sort", function="Text.__getitem__")
    found = finding(waiting(header={"sampler_code": StackLooks(100, (inner,))}), "sampler_share")
    assert str(found.place) == "sampler.py:9" and "reads samples of the data set" in found.title
    assert "made once, in __init__" in found.fix.action


def test_programs_that_are_started_for_samples_want_no_more_workers() -> None:
    """They compute in processes of their own, while the worker waits."""
    starts = CodeLine("data.py:7", 90, (), "subprocess.run", "_fork_exec")
    found = finding(waiting(starts), "input_bound")
    assert "num_workers" not in found.fix.settings and "starts a program" in found.title
