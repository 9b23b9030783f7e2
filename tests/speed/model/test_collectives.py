"""Times of collectives, and how much of them a step waits for."""

from __future__ import annotations

import dataclasses

import pytest

from tests.speed.model.test_timeline import MACHINE, computing, row, work
from trainfit.hardware import find_gpu
from trainfit.hardware.gpu_topology import find_gpus, link_of
from trainfit.results.runs.steps import COLLECTIVES
from trainfit.speed.collectives import SLOWED_BY, among_machines, one_collective
from trainfit.speed.step import step_time

MIB, GIB = 1 << 20, 1 << 30


def bus(name: str, kind: str, ranks: int, nbytes: int = GIB) -> float:
    """GB/s as nccl-tests give them."""
    factor = (2 if kind == "all_reduce" else 1) * (ranks - 1) / ranks
    return nbytes * factor / one_collective(kind, nbytes, ranks, link_of(find_gpu(name))) / 1e9


@pytest.mark.parametrize(
    ("name", "kind", "published"),
    [
        ("A100 80GB SXM", "all_reduce", 222),
        ("A100 80GB SXM", "all_gather", 205),
        ("A100 80GB SXM", "reduce_scatter", 213),
        ("H100 SXM", "all_reduce", 445),
        ("H100 SXM", "all_gather", 335),
        ("H100 SXM", "reduce_scatter", 336),
        ("B200", "all_reduce", 704),
        ("B200", "all_gather", 617),
        ("B200", "reduce_scatter", 613),
        ("V100 16GB SXM", "all_reduce", 130),
    ],
)
def test_large_messages_reach_what_is_published(name: str, kind: str, published: float) -> None:
    """At 1 GiB on 8 GPUs: nccl-tests' bus bandwidth."""
    assert bus(name, kind, 8) == pytest.approx(published, rel=0.15)


def test_small_messages_wait_for_latency() -> None:
    link = link_of(find_gpu("H100 SXM"))
    seconds = [one_collective("all_reduce", 1024, ranks, link) for ranks in (2, 4, 8)]
    assert seconds == sorted(seconds)
    assert 4e-6 < seconds[0] < seconds[-1] < 25e-6


def test_links_of_cards() -> None:
    kinds = {name: link_of(find_gpu(name)).kind for name in ("H200", "A100 80GB PCIe", "RTX 4090")}
    assert list(kinds.values()) == ["nvlink", "pcie", "desktop"]
    without = dataclasses.replace(find_gpu("A100 80GB SXM"), peer_to_peer=False)
    assert link_of(without).kind == "host"
    fast, slow = (
        one_collective("all_reduce", 100 * MIB, 2, link_of(gpu))
        for gpu in (find_gpu("A100 80GB SXM"), without)
    )
    assert slow > 5 * fast


def test_a_process_alone_communicates_nothing() -> None:
    assert one_collective("all_reduce", GIB, 1, link_of(find_gpu("H100 SXM"))) == 0


def reduce(nbytes: int, stream: int) -> tuple[str, int, dict[str, int]]:
    return row("all_reduce", stream, read=nbytes, rows=4)


def test_a_collective_on_its_own_stream_hides_behind_kernels() -> None:
    took = one_collective("all_reduce", 64 * MIB, 4, link_of(MACHINE.gpu))
    order = (
        row("event", 0, rows=1),
        row("event_wait", 9, rows=1, columns=0),
        reduce(64 * MIB, 9),
        row("event", 9, rows=2, columns=0),
    )
    wait = row("event_wait", 0, rows=2, columns=9)
    hidden = step_time(work(computing(1e-3), *order, computing(2 * took), wait), MACHINE)
    assert hidden.communication_s == pytest.approx(took)
    # What is hidden still slows the kernels beside it.
    assert hidden.exposed_s == pytest.approx(SLOWED_BY * took, rel=0.1)
    shown = step_time(work(computing(2 * took), *order, wait, computing(1e-3)), MACHINE)
    assert shown.exposed_s == pytest.approx(took, rel=0.1)


def test_ranks_wait_for_the_slowest_where_they_meet() -> None:
    alone = step_time(work(computing(1e-3)), MACHINE)
    two, eight = (
        step_time(work(computing(1e-3), row("all_reduce", 0, read=4, rows=ranks)), MACHINE)
        for ranks in (2, 8)
    )
    assert alone.slowest_s == 0 < two.slowest_s < eight.slowest_s
    assert eight.slowest_s / eight.seconds == pytest.approx(0.03, abs=0.005)


def test_a_collective_on_the_current_stream_is_all_waited_for() -> None:
    took = one_collective("all_reduce", 64 * MIB, 4, link_of(MACHINE.gpu))
    found = step_time(work(computing(1e-3), reduce(64 * MIB, 0), computing(1e-3)), MACHINE)
    assert found.exposed_s == pytest.approx(took, rel=0.01)
    assert found.seconds - found.slowest_s == pytest.approx(2e-3 + took, rel=0.1)


def of_machines(name: str, kind: str, nbytes: int, ranks: int, machines: int) -> float:
    return among_machines(kind, nbytes, ranks, machines, find_gpus(name))


def test_a_card_for_each_gpu_brings_the_network_close_to_nvlink() -> None:
    inside = one_collective("all_reduce", 1 << 30, 8, link_of(find_gpus("8x H100 SXM")))
    across = of_machines("2x(8x H100 SXM), 400Gb/s", "all_reduce", 1 << 30, 16, 2)
    assert inside < across < 2 * inside
    # 45 GB/s a GPU: 2 * 15/16 of the bytes over 8 cards.
    assert across == pytest.approx((1 << 30) * 2 * 15 / 16 / (8 * 45e9), rel=0.02)


def test_one_card_is_shared_by_the_gpus_of_its_machine() -> None:
    shared = of_machines("2x(8x H100 SXM), 1x 400Gb/s", "all_gather", 1 << 30, 16, 2)
    assert shared == pytest.approx((1 << 30) * 15 / 16 / 45e9, rel=0.02)
    # A group of one GPU of each machine has one card in either case.
    names = ("2x(8x H100 SXM), 400Gb/s", "2x(8x H100 SXM), 1x 400Gb/s")
    assert len({of_machines(each, "all_reduce", 1 << 28, 2, 2) for each in names}) == 1


def test_a_fast_network_leaves_the_links_within_a_machine_as_the_limit() -> None:
    gpu = find_gpus("2x(4x RTX 4090), 1x 10Tb/s")
    inside = one_collective("reduce_scatter", 1 << 28, 4, link_of(gpu))
    across = among_machines("reduce_scatter", 1 << 28, 8, 2, gpu)
    assert inside < across < inside + 1e-4


def test_every_machine_makes_it_slower() -> None:
    name = "{}x(8x H100 SXM), 400Gb/s"
    for kind in COLLECTIVES:
        took = [of_machines(name.format(n), kind, 1 << 26, 8 * n, n) for n in (2, 4, 16)]
        assert took == sorted(took)
        assert all(took)
