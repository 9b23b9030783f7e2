"""Threads of libraries in workers, and the CPUs to run on: advice only from evidence."""

from __future__ import annotations

from typing import Any

import pytest

import helpers_facts as facts
import helpers_machines
from helpers_probe import machine, probe
from trainfit.hardware.machine.recorded import RecordedSystem
from trainfit.hardware.machine.survey import survey
from trainfit.loader.threads import cores, may_be_held, variables, verdict
from trainfit.results.dataloader import CostPart, LoaderSettings
from trainfit.results.loader import CoreAdvice
from trainfit.results.machine import CoreKind, NumaNode, TorchBuild

EIGHT = LoaderSettings(8)
DECODED = (CostPart("decode", 0.9, ("av.container.input.decode",)),)


def lines(
    seen: dict[str, Any], settings: LoaderSettings = EIGHT, env: dict[str, str] | None = None
) -> list[str]:
    found = variables(probe(**seen), machine(), settings, env or {})
    assert all(each.evidence and each.reason for each in found)
    return [each.line for each in found]


# --- Variables --------------------------------------------------------------------------------
def test_one_thread_a_batch_needs_nothing() -> None:
    # Pools that nobody used are no evidence.
    assert lines({"threads": 1.0, "thread_pools": {"openblas": 16, "opencv": 16}}) == []
    said = verdict(probe(thread_pools={"openblas": 16}), machine(), EIGHT)
    assert said.startswith("no oversubscription found: a batch kept 1.0 threads busy; 8 workers")
    assert "openblas 16" in said


@pytest.mark.parametrize(
    ("seen", "may"),
    [
        ({"threads": 1.0, "thread_pools": {"openblas": 16}}, False),  # not used
        ({"threads": 1.0, "thread_pools": {"openblas": 16}, "started_threads": 15}, True),
        ({"threads": 3.0, "thread_pools": {"openblas": 16}}, True),
        ({"threads": 3.0, "started_threads": 8}, False),  # FFmpeg's, in no pool
        ({"threads": 1.0, "thread_pools": {"ffmpeg": 16}, "parts": DECODED}, True),
        ({"threads": 3.0, "thread_pools": {"ffmpeg": 16}}, False),  # loaded by OpenCV, say
        ({"threads": 3.0, "thread_pools": {"torch": 16}}, False),  # workers hold it already
    ],
)
def test_what_a_second_probe_is_made_for(seen: dict[str, Any], may: bool) -> None:
    assert may_be_held(probe(**seen)) is may


def test_what_was_measured_decides_on_variables() -> None:
    """Two workers' OpenBLAS on 16 cores does not outnumber them, and one thread may be faster."""
    seen = {"threads": 2.0, "thread_pools": {"openblas": 2}, "started_threads": 1}
    held = LoaderSettings(2, library_threads=1)
    (advice,) = variables(probe(**seen), machine(), held, {}, was_held=True)
    assert advice.line == "export OPENBLAS_NUM_THREADS=1"
    assert "libraries start 1 thread in a worker in addition to its own" in advice.evidence
    assert "pools in a worker, its own thread included: openblas 2" in advice.evidence
    assert verdict(probe(**seen), machine(), held).startswith("workers are faster with one thread")
    # Threads outnumber cores here, but the same with one of each was no faster.
    many = {"threads": 4.0, "thread_pools": {"openblas": 16, "arrow": 16}}
    assert variables(probe(**many), machine(), EIGHT, {}, was_held=True) == ()
    assert len(variables(probe(**many), machine(), EIGHT, {})) == 2


def test_only_pools_that_batches_use_are_held() -> None:
    held = LoaderSettings(2, library_threads=1)
    loaded = {"openblas": 16, "opencv": 16, "ffmpeg": 16}
    seen = {"threads": 2.0, "thread_pools": loaded, "used_pools": ("opencv",)}
    found = variables(probe(**seen), machine(), held, {}, was_held=True)
    assert [each.line for each in found] == ["cv2.setNumThreads(0)"]
    # A decoder's threads end with it: none of a pool is left, and it is FFmpeg's all the same.
    seen |= {"used_pools": (), "parts": DECODED}
    (advice,) = variables(probe(**seen), machine(), held, {}, was_held=True)
    assert (advice.name, advice.where) == ("thread_count", "script")
    assert variables(probe(**seen), machine(), LoaderSettings(8), {}, was_held=True) == ()


def test_opencv_in_each_of_eight_workers() -> None:
    """mmdetection#6867: 8 GPUs x 4 workers x 64 threads."""
    seen = {"threads": 3.2, "thread_pools": {"opencv": 16, "openblas": 1}}
    (advice,) = variables(probe(**seen), machine(), EIGHT, {})
    assert (advice.name, advice.value, advice.where) == (
        "cv2.setNumThreads", "0", "worker_init_fn"
    )  # fmt: skip
    assert advice.line == "cv2.setNumThreads(0)"
    assert "OpenCV has 16 threads" in advice.reason
    assert "3.2 threads busy" in advice.evidence and "8 workers on 16 cores" in advice.evidence
    assert verdict(probe(**seen), machine(), EIGHT).startswith("threads outnumber cores: a batch")


@pytest.mark.parametrize(
    ("pool", "line"),
    [
        ("openblas", "export OPENBLAS_NUM_THREADS=1"),
        ("mkl", "export MKL_NUM_THREADS=1"),
        ("openmp", "export OMP_NUM_THREADS=1"),
        ("numba", "export NUMBA_NUM_THREADS=1"),
        ("arrow", "pyarrow.set_cpu_count(1)"),
    ],
)
def test_each_pool_has_its_own_line(pool: str, line: str) -> None:
    assert lines({"threads": 2.0, "thread_pools": {pool: 16}}) == [line]
    # What is set already is not repeated.
    if line.startswith("export"):
        name, _, value = line.removeprefix("export ").partition("=")
        seen = {"threads": 2.0, "thread_pools": {pool: 16}}
        assert lines(seen, env={name: value}) == []


@pytest.mark.parametrize(
    ("function", "word"),
    [
        ("av.container.input.decode", "thread_count = 1"),
        ("decord.video_reader.get_batch", "num_threads=1"),
        ("torchcodec.decoders._video_decoder.get_frames_at", "num_ffmpeg_threads=1"),
    ],
)
def test_decoders_are_known_by_their_functions(function: str, word: str) -> None:
    """FFmpeg's threads are in no pool that can be asked."""
    seen = {"threads": 5.0, "parts": (CostPart("decode", 0.9, (function,)),)}
    (line,) = lines(seen)
    assert word in line
    assert lines(seen | {"threads": 1.05}) == []
    assert lines(seen, LoaderSettings(2)) == []  # 10 threads have room on 16 cores


def test_a_word_within_a_name_is_no_module() -> None:
    parts = (CostPart("transform", 0.9, ("mydata.augment.flip", "torchvision.io.decode_jpeg")),)
    seen = {"threads": 5.0, "parts": parts}
    assert lines(seen) == []
    assert "library unknown" in verdict(probe(**seen), machine(), EIGHT)


def test_threads_that_were_not_measured() -> None:
    seen = {"threads": None, "thread_pools": {"opencv": 16}}
    assert lines(seen) == []
    assert verdict(probe(**seen), machine(), EIGHT).startswith("whether threads outnumber cores")


def test_a_script_that_gives_workers_threads() -> None:
    (line,) = lines({}, LoaderSettings(8, worker_threads=4))
    assert line == "torch.set_num_threads(1)"
    assert lines({}, LoaderSettings(4, worker_threads=4)) == []


@pytest.mark.parametrize(("workers", "value"), [(0, "2"), (1, "1"), (2, "1")])
def test_the_main_process_under_a_quota(workers: int, value: str) -> None:
    """OpenMP sees 16 cores, the job gets 2."""
    small = machine(usable_cores=2.0, quota_cores=2.0)
    found = variables(probe(), small, LoaderSettings(workers), {})
    assert [(each.name, each.value) for each in found] == [("OMP_NUM_THREADS", value)]
    assert "16 cores; usable: 2 cores" in found[0].evidence
    # MKL follows it, unless it has a variable of its own.
    both = variables(probe(), small, LoaderSettings(workers), {"MKL_NUM_THREADS": "16"})
    assert [each.name for each in both] == ["OMP_NUM_THREADS", "MKL_NUM_THREADS"]
    set_already = {"OMP_NUM_THREADS": value, "MKL_NUM_THREADS": value}
    assert variables(probe(), small, LoaderSettings(workers), set_already) == ()


def test_a_variable_beyond_the_cores() -> None:
    found = variables(probe(), machine(), LoaderSettings(0), {"OMP_NUM_THREADS": "64"})
    assert found[0].line == "export OMP_NUM_THREADS=16"
    assert "OMP_NUM_THREADS=64" in found[0].evidence
    assert variables(probe(), machine(), LoaderSettings(0), {"OMP_NUM_THREADS": "abc"}) == ()


# --- CPUs -------------------------------------------------------------------------------------
def recorded(name: str, workers: int, ranks: int = 1) -> CoreAdvice | None:
    return cores(survey(helpers_machines.machine(name)), LoaderSettings(workers), ranks)


def test_one_kind_of_core_and_one_node_need_nothing() -> None:
    for name in ("cpu-only-torch", "slurm-node", "container-quota", "this-machine", "t4-vm"):
        assert recorded(name, 2) is None


def test_performance_cores_first() -> None:
    found = recorded("workstation", 6)  # 8 performance cores, 8 efficiency cores
    assert found is not None
    assert found.prefix == "taskset -c 0-15"
    assert "5.2 GHz" in found.evidence and "3.9 GHz" in found.evidence
    more = recorded("workstation", 10)
    assert more is not None and more.prefix == "taskset -c 0-18"
    assert "8 performance cores and 3 efficiency cores" in more.evidence
    assert recorded("workstation", 15) is None  # all are needed


def test_a_job_that_may_run_on_some_performance_cores_only() -> None:
    kinds = (
        CoreKind("performance", (0, 1, 2, 3), 2, 5e9),
        CoreKind("efficiency", (4, 5, 6, 7), 4, 3.8e9),
    )
    siblings = ((0, 1), (2, 3), (4,), (5,), (6,), (7,))
    cpu = {"affinity": (2, 3, 4, 5), "core_kinds": kinds, "siblings": siblings}
    found = cores(facts.machine(cpu=cpu), LoaderSettings(1))
    assert found is not None and found.cpus == (2, 3, 4)
    pinning = cores(facts.machine(cpu=cpu), LoaderSettings(1, pin_memory=True))
    assert pinning is None
    only = facts.machine(cpu=cpu | {"affinity": (0, 1, 2, 3)})
    assert cores(only, LoaderSettings(1)) is None


def test_the_node_of_the_gpu() -> None:
    document = helpers_machines.document("server-8gpu")
    document["environment"]["CUDA_VISIBLE_DEVICES"] = "5"
    seen = survey(RecordedSystem(document))
    found = cores(seen, LoaderSettings(8))
    assert found is not None
    assert found.prefix == "taskset -c 32-63,96-127"
    assert "GPU 5 is attached to NUMA node 1 of 2" in found.evidence
    assert "numactl --cpunodebind=1 --membind=1" in found.reason
    assert cores(seen, LoaderSettings(40)) is None  # 32 cores there: leaving half out costs more


def test_a_job_within_the_node_already() -> None:
    nodes = (NumaNode(0, tuple(range(8))), NumaNode(1, tuple(range(8, 16))))
    gpus = [facts.gpu(numa_node=1)]
    cpu = {"numa_nodes": nodes}
    assert cores(facts.machine(cpu=cpu, gpus=gpus), LoaderSettings(2)) is not None
    bound = facts.machine(cpu=cpu | {"affinity": tuple(range(8, 16))}, gpus=gpus)
    assert cores(bound, LoaderSettings(2)) is None
    unknown = facts.machine(cpu=cpu, gpus=[facts.gpu(numa_node=None)])
    assert cores(unknown, LoaderSettings(2)) is None
    assert cores(facts.machine(cpu=cpu, gpus=None), LoaderSettings(2)) is None


def test_torchrun_binds_each_rank() -> None:
    found = recorded("server-8gpu", 8, ranks=8)
    torch = survey(helpers_machines.machine("server-8gpu")).cuda.torch.value
    assert torch is not None
    nodes = (NumaNode(0, tuple(range(8))), NumaNode(1, tuple(range(8, 16))))
    gpus = [facts.gpu(0, numa_node=0), facts.gpu(1, numa_node=1)]

    def with_torch(version: str) -> CoreAdvice | None:
        build = TorchBuild(version, (12, 8), None, "/site/torch")
        made = facts.machine(cpu={"numa_nodes": nodes}, gpus=gpus, cuda={"torch": build})
        return cores(made, LoaderSettings(2), ranks=2)

    new = with_torch("2.9.0+cu128")
    assert new is not None
    assert new.prefix == "torchrun --numa-binding=node --nproc-per-node=2"
    assert "node 0: GPU 0; node 1: GPU 1" in new.evidence
    assert with_torch("2.8.0+cu128") is None  # the option came with 2.9
    assert (found is not None) == (tuple(map(int, torch.version.split(".")[:2])) >= (2, 9))


def test_a_machine_that_cannot_tell() -> None:
    assert cores(facts.machine(cpu={"affinity": facts.unknown()}), LoaderSettings(2)) is None
