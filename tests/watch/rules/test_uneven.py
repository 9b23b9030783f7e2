"""Ranks and GPUs that differ: whose core, data or computation it is; memory; "90 against 50%"."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import pytest

from helpers_watch import (
    GIB,
    GPU,
    HEADER,
    finding,
    gpu_rows,
    kinds,
    run,
    run_on_cpu,
    table,
    unknown_kinds,
)
from trainfit.results.runs import tables
from trainfit.results.runs.communication import GradientTimes, RankCommunication
from trainfit.results.runs.watched import CodeLine, RunRecord, StackLooks
from trainfit.watch.judge import judge

CARDS = tuple(dataclasses.replace(GPU, uuid=f"GPU-{n}") for n in range(2))


def ranks(
    steps: Sequence[Mapping[str, Any]],
    cards: Sequence[Mapping[str, Any]] = ({}, {}),
    **headers: Sequence[Any],
) -> RunRecord:
    """Two ranks, each on its own GPU, with these changes of a healthy run's steps and samples."""
    made = []
    for number, columns in enumerate(steps):
        told = {name: values[number] for name, values in headers.items()}
        on_cpu = told.get("gpu", number) is None
        (rank,) = (run_on_cpu if on_cpu else run)(**columns).ranks
        told = {"gpus": CARDS, "gpu": number, "world_size": len(steps), **told}
        header = dataclasses.replace(HEADER, rank=number, **told)
        made.append(dataclasses.replace(rank, header=header))
    whole = run(**max(steps, key=len))
    times = np.unique(whole.gpus["time_s"])
    rows = [gpu_rows(times, gpu=number, **columns) for number, columns in enumerate(cards)]
    return dataclasses.replace(whole, ranks=tuple(made), gpus=np.concatenate(rows))


def evidence(found: Any) -> dict[str, Any]:
    return {each.what: each.value for each in found.evidence}


def gradients(collectives_s: float, hidden_s: float, by: Any = "CUDA events") -> RankCommunication:
    return RankCommunication(gradients=GradientTimes(collectives_s, hidden_s, 0.05, by))


# --- Why a rank is slow ---------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("columns", "cause"),
    [
        ({"input_s": 0.08}, "its data: most of the difference is its DataLoader"),
        (
            {"forward_s": 0.08, "gpu_forward_s": 0.08, "samples": 64},
            "its data: it has more samples in a step than the others; most of the difference is "
            "the forward pass",
        ),
        ({"forward_s": 0.08, "gpu_forward_s": 0.08}, "its computation: most of the difference is"),
    ],
)
def test_data_and_computation_are_told_apart(columns: dict[str, Any], cause: str) -> None:
    found = finding(judge(ranks([{}, columns])), "straggler")
    assert found.rank == 1 and found.cause.startswith(cause)


@pytest.mark.parametrize(("of_others", "is_named"), [((), True), (("train.py:8", 60), False)])
def test_a_slow_rank_has_the_line_that_it_alone_spends_the_time_at(
    of_others: tuple[Any, ...], is_named: bool
) -> None:
    """In the finding and the first line; not one where all ranks are as long."""
    at, others_s = CodeLine("train.py:8", 60, (), "tokenise"), 0.07 if of_others else 0.0
    alike = StackLooks(80, (CodeLine(*of_others),) if of_others else ())
    # The slow rank's line is found in two looks of three: what it has more is elsewhere.
    rest = (CodeLine("train.py:30", 30, (), "save"),) if of_others else ()
    codes = [alike, StackLooks(90, (at, *rest))]
    columns = [{"other_s": others_s}, {"other_s": 0.1}]
    record = ranks(columns, gpu=[None, None], other_code=codes)
    result = judge(record)
    found = finding(result, "straggler")
    assert found.rank == 1
    assert (str(found.place) == "train.py:8") is is_named
    assert ("train.py:8" in found.cause and "train.py:8" in found.fix.action) is is_named


def test_a_rank_whose_threads_share_a_core_is_slow_by_its_core() -> None:
    """Not by other programs: the run itself has the cores that are busy."""
    record = ranks([{}, {"other_s": 0.06}])
    times = np.arange(5.0, 25.0, 0.5)
    waits = [
        table(tables.CORE_WAITS, {"time_s": times, "rank": n, "role": 0, "pid": 100 + n,
              "cpu_cores": 0.5, "main_thread": share, "threads": share}, len(times))
        for n, share in enumerate((0.0, 0.4))
    ]  # fmt: skip
    machine = record.machine.copy()
    machine["cores_busy"] = machine["cores_ours"] = 8.0
    found = finding(
        judge(dataclasses.replace(record, machine=machine, core_waits=np.concatenate(waits))),
        "straggler",
    )
    assert found.rank == 1 and found.cause.startswith("its core: ")
    assert evidence(found)["rank 1 ready without a core"] == pytest.approx(0.4)


@pytest.mark.parametrize(("waits", "is_slow"), [((0.5, 0.5), False), ((0.02, 0.05), True)])
def test_ranks_that_other_programs_hold_up_alike_differ_by_chance(
    waits: tuple[float, float], is_slow: bool
) -> None:
    """Who waits for a slow rank in collectives needs no core, and is hardly held up."""
    record = ranks([{}, {"other_s": 0.03}])
    times = np.arange(5.0, 25.0, 0.5)
    rows = [
        table(tables.CORE_WAITS, {"time_s": times, "rank": n, "role": 0, "pid": 100 + n,
              "cpu_cores": 0.5, "main_thread": share, "threads": share}, len(times))
        for n, share in enumerate(waits)
    ]  # fmt: skip
    machine = record.machine.copy()
    machine["cores_busy"], machine["cores_ours"] = 8.0, 0.4
    made = dataclasses.replace(record, machine=machine, core_waits=np.concatenate(rows))
    assert ("straggler" in kinds(judge(made))) is is_slow


def test_a_rank_that_waits_in_collectives_of_its_own_is_not_the_slow_one() -> None:
    """Gradients that the script averages by itself: the waiting is no phase's."""
    slow, waiting = {"input_s": 0.08}, {"other_s": 0.08}
    told = [RankCommunication(0.0, 400), RankCommunication(0.079, 400)]
    found = finding(
        judge(ranks([slow, waiting], gpu=[None, None], communication=told)), "straggler"
    )
    assert found.rank == 0 and found.cause.startswith("its data")
    assert evidence(found)["the others in collectives, median"] == pytest.approx(0.079)
    # Without these times, nobody could tell them apart.
    assert "straggler" not in kinds(judge(ranks([slow, waiting], gpu=[None, None])))


# --- Communication --------------------------------------------------------------------------------


def test_communication_is_what_the_rank_that_waits_least_spends() -> None:
    told = [gradients(0.06, 0.02), gradients(0.09, 0.02)]
    found = finding(judge(ranks([{}, {}], communication=told)), "exposed_communication")
    said = evidence(found)
    assert said["in collectives, on the rank that waits least"] == pytest.approx(0.04)
    assert said["hidden by the backward pass"] == 0.02 and said["measured by"] == "CUDA events"
    assert found.share == pytest.approx(0.4, rel=0.05)
    result = judge(ranks([{}, {}], communication=told))
    shares = [each.collectives_share for each in result.ranks]
    assert shares == [pytest.approx(0.4, rel=0.05), pytest.approx(0.7, rel=0.05)]
    assert result.limit == "communication"


def test_hidden_communication_is_no_fault() -> None:
    told = [gradients(0.04, 0.04)] * 2
    result = judge(ranks([{}, {}], communication=told))
    assert "exposed_communication" not in kinds(result)
    assert "exposed_communication" not in unknown_kinds(result)
    assert [each.collectives_share for each in result.ranks] == [0, 0]


@pytest.mark.parametrize(
    "told", [RankCommunication(0.05, 400), gradients(0.06, 0.0, "the host's clock")]
)
def test_on_a_gpu_the_hosts_time_in_a_call_tells_nothing(told: RankCommunication) -> None:
    result = judge(ranks([{}, {}], communication=[told, told]))
    assert "exposed_communication" in unknown_kinds(result)
    assert [each.collectives_share for each in result.ranks] == [None, None]


# --- Memory ---------------------------------------------------------------------------------------


def test_contexts_of_other_ranks_on_a_gpu_are_told() -> None:
    """Both reserve 11 GiB; seven processes more have a context on the first GPU."""
    cards = [{"ours_bytes": 16 * GIB}, {"ours_bytes": 12 * GIB}]
    found = finding(judge(ranks([{}, {}], cards)), "uneven_memory")
    assert found.rank == 0 and "other ranks hold a context" in found.cause
    assert "set_device" in found.fix.action
    assert evidence(found)["rank 0"] == 16 and evidence(found)["the others, median"] == 12


@pytest.mark.parametrize(
    ("rank", "columns", "cause"),
    [
        (1, {"samples": 64}, "It has 64 samples in a step, the others 32"),
        (0, {}, "Rank 0 keeps what the others do not"),
        (1, {}, "Its batches hold longer samples"),
    ],
)
def test_memory_that_one_rank_holds_more_is_told(
    rank: int, columns: dict[str, Any], cause: str
) -> None:
    steps: list[dict[str, Any]] = [{}, {}]
    cards: list[dict[str, Any]] = [{"ours_bytes": 12 * GIB}, {"ours_bytes": 12 * GIB}]
    steps[rank] = {"reserved_bytes": 19 * GIB, **columns}
    cards[rank] = {"ours_bytes": 20 * GIB}
    result = judge(ranks(steps, cards))
    found = finding(result, "uneven_memory")
    assert (found.rank, found.severity) == (rank, "warning")
    assert found.cause.startswith(cause) and "fullest GPU decides" in found.cause
    assert result.ranks[rank].reserved_bytes == 19 * GIB


def test_memory_that_differs_little_is_no_finding() -> None:
    cards = [{"ours_bytes": 12 * GIB}, {"ours_bytes": 12 * GIB + (1 << 29)}]
    assert "uneven_memory" not in kinds(judge(ranks([{}, {}], cards)))


# --- "90 against 50%" -----------------------------------------------------------------------------

USED = ({"utilization": 0.9}, {"utilization": 0.5})


def test_a_gpu_that_waits_for_its_data_is_used_less() -> None:
    result = judge(ranks([{}, {"input_s": 0.08}], USED, communication=[gradients(0.09, 0.01)] * 2))
    found = finding(result, "uneven_utilization")
    assert found.rank == 1
    assert found.title == ("The GPU of rank 1 is used 50% of the time, that of rank 0 90%")
    assert found.cause.startswith("Its rank waits for batches ")
    assert "A kernel that waits for other ranks counts as use" in found.cause
    assert evidence(found)["rank 0 in collectives"] == pytest.approx(0.08)


def test_gpus_of_two_kinds_are_told() -> None:
    both = (CARDS[0], dataclasses.replace(CARDS[1], name="NVIDIA H100"))
    found = finding(judge(ranks([{}, {}], USED, gpus=[both, both])), "uneven_utilization")
    assert "The GPUs differ: NVIDIA H100 and NVIDIA GPU" in found.cause


def test_fewer_samples_are_told_and_what_is_not_known_is_said_so() -> None:
    found = finding(judge(ranks([{"samples": 64}, {}], USED)), "uneven_utilization")
    assert "It has 32 samples in a step, the other 64" in found.cause
    found = finding(judge(ranks([{}, {}], USED)), "uneven_utilization")
    assert found.confidence == "possible" and "profiler" in found.fix.action


def test_equal_use_is_no_finding() -> None:
    cards = ({"utilization": 0.9}, {"utilization": 0.8})
    assert "uneven_utilization" not in kinds(judge(ranks([{}, {}], cards)))


def test_the_first_gpu_of_data_parallel_is_told_with_figures() -> None:
    """One process, two GPUs: the first gathers the outputs."""
    record = run(header={"distributed": "data_parallel", "gpus": CARDS, "gpu": 0})
    times = np.unique(record.gpus["time_s"])
    rows = [
        gpu_rows(times, gpu=0, utilization=0.9, ours_bytes=20 * GIB),
        gpu_rows(times, gpu=1, utilization=0.5, ours_bytes=12 * GIB),
    ]
    found = finding(judge(dataclasses.replace(record, gpus=np.concatenate(rows))), "data_parallel")
    said = evidence(found)
    assert said["memory of GPU 0"] == 20 and said["memory of the others, most"] == 12
    assert said["utilization of GPU 0"] == pytest.approx(0.9)
    assert said["utilization of the others, mean"] == pytest.approx(0.5)


# --- Work in the backward pass --------------------------------------------------------------------


def ddp(computed_s: float, exposed_s: float) -> RankCommunication:
    times = GradientTimes(exposed_s, 0.0, computed_s, "the host's clock")
    return RankCommunication(0.0, 0, times)


def in_backward(slow: RankCommunication, other: RankCommunication, **headers: Any) -> RunRecord:
    """Two ranks on CPUs whose backward passes last as long: one waits there for the other."""
    return ranks(
        [{"backward_s": 0.06}] * 2, gpu=[None, None], communication=[other, slow], **headers
    )


def test_a_rank_that_computes_longer_in_its_backward_pass_is_the_straggler() -> None:
    """Longer sequences: the backward pass has most of the difference, and hides it."""
    slow, other = ddp(0.055, 0.005), ddp(0.01, 0.05)
    found = finding(judge(in_backward(slow, other)), "straggler")
    assert found.rank == 1 and "the backward pass" in found.cause
    assert found.cause.startswith("its computation")
    sizes = [((0, 100), (4, 100)), ((0, 400), (4, 400))]
    found = finding(judge(in_backward(slow, other, input_sizes=sizes)), "straggler")
    assert found.cause.startswith("its data: its batches are larger")
    assert evidence(found)["elements of a batch of rank 1"] == 400


def test_means_of_backward_passes_alone_name_no_straggler() -> None:
    # It is not waited for: its mean has a first pass that lasted a second.
    assert "straggler" not in kinds(judge(in_backward(ddp(0.055, 0.02), ddp(0.01, 0.01))))
    # Nobody else's is known.
    assert "straggler" not in kinds(judge(in_backward(ddp(0.055, 0.0), RankCommunication())))


@pytest.mark.parametrize(("without_core", "said"), [(0.0, "communication"), (0.5, "nothing")])
def test_waits_for_a_rank_without_a_core_are_no_communication(
    without_core: float, said: str
) -> None:
    record = in_backward(ddp(0.02, 0.03), ddp(0.02, 0.03))
    times = np.arange(5.0, 25.0, 0.5)
    waits = [
        table(tables.CORE_WAITS, {"time_s": times, "rank": n, "role": 0, "pid": 100 + n,
              "cpu_cores": 0.5, "main_thread": without_core, "threads": without_core}, len(times))
        for n in range(2)
    ]  # fmt: skip
    machine = record.machine.copy()
    machine["cores_busy"], machine["cores_ours"] = 8.0, 0.5
    result = judge(dataclasses.replace(record, machine=machine, core_waits=np.concatenate(waits)))
    assert ("exposed_communication" in kinds(result)) is (said == "communication")
    assert ("exposed_communication" in unknown_kinds(result)) is (said == "nothing")


def test_calls_of_the_script_in_which_ranks_meet_are_named_with_their_line() -> None:
    """Metrics as Python objects in each step; and the time in them is no other Python code."""
    called = RankCommunication(0.04, 400)
    line = CodeLine("train.py:30", 60, (), "dist.all_gather_object", "c10d.all_gather_object")
    beside = CodeLine("train.py:12", 40, (), "step.log", "step.log")
    headers: dict[str, Any] = {
        "communication": [called] * 2,
        "collective_code": [StackLooks(80, (line,))] * 2,
        "other_code": [StackLooks(80, (beside,))] * 2,
    }
    result = judge(ranks([{"other_s": 0.04}] * 2, gpu=[None, None], **headers))
    found = finding(result, "exposed_communication")
    assert found.title.startswith("train.py:30 meets the other ranks (`dist.all_gather_object`)")
    assert "send tensors" in found.fix.action and str(found.place) == "train.py:30"
    assert "other_code" not in kinds(result)


def test_an_evaluation_on_one_rank_alone_is_told_to_be_shared() -> None:
    spent = np.where(np.arange(200) % 20 == 10, 1.0, 0.0)
    alone = {"evaluation_s": spent}
    waits = {"other_s": np.where(spent > 0, 1.0, 0.005)}
    found = finding(judge(ranks([alone, waits], gpu=[None, None])), "evaluation_share")
    assert found.rank == 0 and found.fix.action.startswith("let all ranks evaluate")
    both = finding(judge(ranks([alone, alone], gpu=[None, None])), "evaluation_share")
    assert not both.fix.action.startswith("let all ranks evaluate")
