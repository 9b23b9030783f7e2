"""Several GPUs of one machine, by name."""

from __future__ import annotations

import pytest

from trainfit.hardware import GpuNameError, catalogue, find_gpu
from trainfit.hardware.gpu_topology import assumed_count, find_gpus, named_count, with_ranks


@pytest.mark.parametrize(
    ("name", "key", "count"),
    [
        ("8x H100 SXM", "H100 SXM", 8),
        ("2 x RTX 4090", "RTX 4090", 2),
        ("4xA100 80GB PCIe", "A100 80GB PCIe", 4),
        ("2xcustom:24GiB", "custom 24GiB sm_80", 2),
        ("RTX 4090", "RTX 4090", 1),
        ("Kaggle 2xT4", "T4", 1),
    ],
)
def test_names(name: str, key: str, count: int) -> None:
    gpu = find_gpus(name)
    assert (gpu.key, gpu.count) == (key, count)


@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("0x H100 SXM", "1 to 16 GPUs"),
        ("100x H100 SXM", "1 to 16 GPUs"),
        ("8x H100 SXM, 400Gb/s", "a network is between machines.*2x\\(8x H100 SXM\\), 400Gb/s"),
        ("2x(8x H100 SXM)", "say how fast the network between them is"),
        ("2x(8x H100 SXM), fast", "'fast' is no network"),
        ("2x(8x H100 SXM), 0Gb/s", "'0Gb/s' is no network"),
        ("0x(8x H100 SXM), 400Gb/s", "1 to 1024 machines"),
        ("2x(8x no such card), 400Gb/s", "unknown GPU"),
        ("2x(8x H100 SXM", "as in 2x\\(8x H100 SXM\\), 400Gb/s"),
        ("2x 8x H100 SXM", "as in 2x\\(8x H100 SXM\\), 400Gb/s"),
        ("2x no such card", "unknown GPU"),
    ],
)
def test_names_that_are_refused(name: str, says: str) -> None:
    with pytest.raises(GpuNameError, match=says):
        find_gpus(name)


@pytest.mark.parametrize(
    ("name", "count", "machines", "rate", "cards"),
    [
        ("2x(8x H100 SXM), 400Gb/s", 8, 2, 50e9, 8),
        ("4 x ( 2x RTX 4090 ), 1x 10 Gbit/s", 2, 4, 1.25e9, 1),
        ("16x(A100 80GB PCIe), 25GB/s", 1, 16, 25e9, 1),
        ("1x(8x H100 SXM), 400Gb/s", 8, 1, None, 1),
    ],
)
def test_machines(name: str, count: int, machines: int, rate: float | None, cards: int) -> None:
    gpu = find_gpus(name)
    assert (gpu.count, gpu.machines) == (count, machines)
    assert (gpu.network_bytes_per_s, gpu.network_cards) == (rate, cards)
    assert named_count(name) == count * machines


def test_the_number_that_a_name_says() -> None:
    names = ("8x H100 SXM", "H100 SXM", "p5.48xlarge", "g5.xlarge")
    assert [named_count(name) for name in names] == [8, None, 8, None]


def test_a_gpu_for_each_process_is_assumed_and_said() -> None:
    one = find_gpu("RTX 4090")
    assert with_ranks(one, 1) is one
    several = with_ranks(one, 4)
    assert several.count == 4
    assert assumed_count(several).startswith("4 GPUs in one machine, one for each process")
    assert assumed_count(find_gpus("4x RTX 4090")) == ""


@pytest.mark.parametrize(
    ("name", "proposed"),
    [
        ("T4,T4", "2x T4"),
        ("T4 T4", "2x T4"),
        ("RTX 4090 + RTX 4090 + RTX 4090", "3x RTX 4090"),
        ("RTX 4090 x2", "2x RTX 4090"),
        ("T4x4", "4x T4"),
        ("2 T4", "2x T4"),
        ("2*T4", "2x T4"),
        ("2x(T4,T4), 1Gb/s", "2x T4"),
    ],
)
def test_several_gpus_in_another_spelling_are_not_taken_for_one(name: str, proposed: str) -> None:
    with pytest.raises(GpuNameError, match="their number and the name") as caught:
        find_gpus(name)
    assert caught.value.matches == [proposed]


@pytest.mark.parametrize(
    ("name", "proposed"),
    [
        ("0x T4", ["8x T4"]),
        ("2x(4x T4)", ["2x(4x T4), 400Gb/s"]),
        ("2x(4x T4), fast", ["2x(4x T4), 400Gb/s", "2x(4x T4), 1x 100Gb/s"]),
    ],
)
def test_a_machine_that_cannot_be_has_a_proposal_that_can(name: str, proposed: list[str]) -> None:
    with pytest.raises(GpuNameError) as caught:
        find_gpus(name)
    assert caught.value.matches == proposed
    for each in proposed:
        find_gpus(each)


def test_a_machine_with_different_gpus_is_refused() -> None:
    with pytest.raises(GpuNameError, match="different kinds") as caught:
        find_gpus("T4, A100")
    assert caught.value.matches == ["T4", "A100"]


def test_one_gpu_by_any_of_its_names() -> None:
    for gpu in catalogue():
        assert find_gpus(gpu.key).count == 1
