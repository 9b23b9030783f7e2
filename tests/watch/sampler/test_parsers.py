"""The counters of /proc, from what kernels write and from rubbish."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from trainfit.watch.sampler import proc_files
from trainfit.watch.sampler.roles import rank_variable

COUNTS = st.integers(0, (1 << 64) - 1)
PARSERS = (
    proc_files.process_stat,
    proc_files.cpu_ticks,
    proc_files.run_queue,
    proc_files.schedstat_ns,
    proc_files.switches,
    proc_files.pressure_s,
    proc_files.throttling,
    rank_variable,
    lambda content: proc_files.keyed(content, b"read_bytes:"),
    lambda content: proc_files.disk_bytes(content, {b"sda"}),
    lambda content: proc_files.network_bytes(content, {b"eth0"}),
)
#: Pieces of real texts, so that rubbish comes near to what is parsed.
PIECES = st.sampled_from(
    [
        *(b"cpu ", b"some avg10=", b"total=", b"(", b")", b"0", b"7 ", b"\n", b"sda ", b"eth0:"),
        *(b"nr_periods ", b"nr_throttled ", b"throttled_usec ", b"read_bytes:", b"RANK=", b"/"),
        *(b"-1 ", b"\0"),
    ]
)


@pytest.mark.parametrize("parse", PARSERS)
@given(content=st.one_of(st.binary(max_size=200), st.lists(PIECES, max_size=60).map(b"".join)))
def test_rubbish_gives_nothing_or_a_value_and_raises_nothing(parse, content) -> None:  # type: ignore[no-untyped-def]
    parse(content)


@given(
    name=st.binary(max_size=15).filter(lambda name: b"\n" not in name),
    parent=st.integers(0, 1 << 22),
    user=COUNTS,
    system=COUNTS,
    threads=st.integers(1, 1 << 15),
    started=COUNTS,
    rss=st.integers(0, 1 << 40),
    cpu=st.integers(0, 8191),
)
def test_a_process_whatever_its_name_is(
    name: bytes,
    parent: int,
    user: int,
    system: int,
    threads: int,
    started: int,
    rss: int,
    cpu: int,
) -> None:
    fields = ["S", parent, *[0] * 9, user, system, 0, 0, 20, 0, threads, 0, started, 0, rss]
    fields += [*[0] * 14, cpu, 0]
    content = b"17 (" + name + b") " + " ".join(map(str, fields)).encode() + b"\n"
    found = proc_files.process_stat(content)
    assert found == proc_files.ProcessStat(
        name, b"S", parent, user + system, threads, started, rss, cpu
    )


def test_a_process_of_this_machine() -> None:
    found = proc_files.process_stat(Path("/proc/self/stat").read_bytes())
    assert found is not None
    assert found.state == b"R"
    assert found.threads >= 1
    assert found.rss_pages > 100


@given(busy=st.lists(COUNTS, min_size=5, max_size=5), idle=COUNTS, iowait=COUNTS)
def test_busy_is_all_but_idle_waiting_and_stolen(busy: list[int], idle: int, iowait: int) -> None:
    user, nice, system, interrupts, soft = busy
    values = [user, nice, system, idle, iowait, interrupts, soft, 12345, 0, 0]
    content = f"cpu  {' '.join(map(str, values))}\ncpu0 1 1 1 1 1 1 1 1 1 1\n".encode()
    assert proc_files.cpu_ticks(content) == proc_files.CpuTicks(sum(busy), iowait)


@given(received=COUNTS, sent=COUNTS, blank=st.sampled_from([b" ", b""]))
def test_interfaces_that_are_not_asked_for_do_not_count(
    received: int, sent: int, blank: bytes
) -> None:
    counts = f"{received} 1 0 0 0 0 0 0 {sent} 1 0 0 0 0 0 0\n".encode()
    header = b"Inter-| Receive | Transmit\n face |bytes packets|bytes packets\n"
    content = header + b"    lo:" + blank + counts + b"  eth0:" + blank + counts
    assert proc_files.network_bytes(content, {b"eth0"}) == (received, sent)
    assert proc_files.network_bytes(content, {b"ib0"}) is None


def test_disks_count_in_sectors_of_512_bytes() -> None:
    content = (
        b" 259 0 nvme0n1 100 0 2000 5 50 0 800 3 0 8 8 0 0 0 0 0 0\n"
        b" 259 1 nvme0n1p1 90 0 1900 5 50 0 800 3 0 8 8 0 0 0 0 0 0\n"
        b"   8 0 sda 10 0 16 5 5 0 8 3 0 8 8\n"
    )
    assert proc_files.disk_bytes(content, {b"nvme0n1", b"sda"}) == (2016 * 512, 808 * 512)


def test_both_versions_of_a_cgroup_say_how_long_it_was_throttled() -> None:
    first = b"nr_periods 40\nnr_throttled 12\nthrottled_time 2500000000\n"
    second = (
        b"usage_usec 9\nuser_usec 5\nsystem_usec 4\nnr_periods 40\nnr_throttled 12\n"
        b"throttled_usec 2500000\nnr_bursts 0\n"
    )
    expected = proc_files.Throttling(40, 12, 2.5)
    assert proc_files.throttling(first) == proc_files.throttling(second) == expected
    # Version 2's root has no quota and says nothing of one.
    assert proc_files.throttling(b"usage_usec 9\nuser_usec 5\nsystem_usec 4\n") is None


def test_pressure_is_of_those_of_which_some_wait() -> None:
    content = (
        b"some avg10=1.16 avg60=0.66 avg300=0.31 total=45839308\n"
        b"full avg10=0.00 avg60=0.00 avg300=0.00 total=17700687\n"
    )
    assert proc_files.pressure_s(content) == pytest.approx(45.839308)
    assert proc_files.pressure_s(b"") is None


def test_a_kernel_without_statistics_of_its_scheduler_tells_no_time() -> None:
    assert proc_files.schedstat_ns(b"0 0 0\n") is None
    assert proc_files.schedstat_ns(b"1004006 19299 3\n") == (1004006, 19299)


def test_context_switches_of_a_thread() -> None:
    status = b"Name:\tpython\nvoluntary_ctxt_switches:\t150\nnonvoluntary_ctxt_switches:\t545\n"
    assert proc_files.switches(status) == (150, 545)


def test_threads_that_run_and_the_last_number() -> None:
    assert proc_files.run_queue(b"5.72 4.47 4.45 5/173 11149\n") == (5, 11149)


def test_the_rank_in_an_environment() -> None:
    assert rank_variable(b"LOCAL_RANK=1\0RANK=13\0PATH=/bin\0") == 13
    assert rank_variable(b"LOCAL_RANK=1\0XRANK=13\0RANK=none\0") is None
