"""Watched runs with known causes, made by a simulated training loop (_watch_loop.py): each cause
alone, in pairs, and none.

A run's machine is drawn first (cores, GPU, batch, times), healthy: the GPU is the limit or nearly
so. A cause changes what causes it (a worker's time, a clock, memory), never a column of the result.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

import numpy as np
from _watch_loop import MIB, WatchedLoop, WatchedScript
from _watch_rates import lightly, sample_in_turns

from trainfit.results.runs import tables
from trainfit.results.runs.tables import Table
from trainfit.results.runs.watched import (
    RankRecord,
    RunHeader,
    RunRecord,
    WatchedGpu,
    WatchedLoader,
)

GIB = 2**30


@dataclass
class World:
    """A job, and what is sampled around it; causes change it before it runs."""

    random: np.random.Generator
    job: WatchedScript
    header: RunHeader
    memory: dict[str, float] = field(default_factory=dict)
    gpu: dict[str, float] = field(default_factory=dict)
    machine: dict[str, float] = field(default_factory=dict)
    ranks: int = 1
    slow_rank: float = 1.0
    flags: Callable[[Table], None] | None = None

    def change(self, **what: Any) -> None:
        self.job = dataclasses.replace(self.job, **what)

    def named(self, **what: Any) -> None:
        self.header = dataclasses.replace(self.header, **what)

    @property
    def total(self) -> float:
        return float(self.header.gpus[0].memory_bytes or 0)


def healthy(random: np.random.Generator) -> World:
    """A GPU-bound run on a machine that has what it needs."""
    cores = float(random.choice([8, 12, 16, 32]))
    gpu_s = float(random.uniform(0.04, 0.3))
    workers = int(random.integers(3, max(4, cores // 2)))
    # Workers make batches 1.6 to 3 times as fast as the GPU uses them.
    fetch = gpu_s * workers / float(random.uniform(1.6, 3.0))
    waits = float(random.choice([0.0, 0.2]))
    # Who reads the loss in each step has a step that is launched in little of its time.
    each_step = bool(random.random() < 0.33)
    launch = float(random.uniform(0.03, 0.1) if each_step else random.uniform(0.1, 0.6))
    card, peak, memory = [
        ("NVIDIA A100-SXM4-40GB", 312e12, 40),
        ("NVIDIA GeForce RTX 4090", 165e12, 24),
        ("NVIDIA H100 80GB HBM3", 989e12, 80),
    ][int(random.integers(3))]
    job = WatchedScript(
        steps=int(random.integers(300, 500)),
        batch=int(random.choice([8, 16, 32, 64])),
        cores=cores,
        workers=workers,
        epoch=int(random.integers(120, 400)),
        fetch_cpu_s=fetch * (1 - waits),
        fetch_wait_s=fetch * waits,
        gpu_s=gpu_s,
        launch_s=gpu_s * launch,
        noise=float(random.uniform(0.01, 0.08)),
        sync_every=1 if each_step else int(random.choice([20, 50])),
        persistent=bool(random.random() < 0.5),
        worker_start_s=float(random.uniform(0.05, 0.3)),
        checkpoint_every=200,
        checkpoint_s=float(random.uniform(0.1, 0.5)) * gpu_s * 4,
        seed=int(random.integers(2**31)),
    )
    used = float(random.uniform(0.3, 0.68))
    mfu = float(random.uniform(0.25, 0.55))
    header = RunHeader(
        "python train.py", 0, 1, 1, "host", 0.0, 0.0, "0.1.0", "3.11.7", "2.8.0",
        gpu=0,
        gpus=(WatchedGpu(card, "", memory * GIB, (8, 0), peak),),
        usable_cores=cores,
        ram_bytes=128 * GIB,
        parameters=10**8,
        precision="bfloat16",
        autocast="bfloat16",
        flops_per_sample=mfu * peak * gpu_s / job.batch,
        threads={"torch": int(cores)},
        ending="finished",
    )  # fmt: skip
    world = World(random, job, header)
    world.memory = {"share": used, "cached": float(random.uniform(1.02, 1.25)), "growth": 0.0}
    world.gpu = {"clock": 1.0, "reason": 0, "heat": float(random.uniform(55, 72))}
    world.machine = {"others": float(random.uniform(0.0, 0.3))}
    return world


# --- Causes ---------------------------------------------------------------------------------------
def input_bound(world: World) -> None:
    """Decoding takes more than the workers can, and cores are left."""
    job = world.job
    workers = max(2, int(job.cores // 4))
    fetch = job.gpu_s * workers * float(world.random.uniform(1.5, 3.0))
    world.change(workers=workers, fetch_cpu_s=fetch, fetch_wait_s=0.0)


def storage_bound(world: World) -> None:
    """Workers wait for the disk."""
    job = world.job
    fetch = job.gpu_s * job.workers * float(world.random.uniform(1.5, 3.0))
    world.change(fetch_cpu_s=0.1 * fetch, fetch_wait_s=0.9 * fetch, parts=(0.9, 0.05, 0.03, 0.02))
    world.machine["iowait"] = 2.0


def no_workers(world: World) -> None:
    fetch = world.job.gpu_s * float(world.random.uniform(0.9, 2.0))
    world.change(workers=0, fetch_cpu_s=fetch, fetch_wait_s=0.0)


def slow_worker(world: World) -> None:
    job = world.job
    world.change(slow_worker=float(world.random.uniform(2.5, 4.0)) * job.workers * job.gpu_s
                 / (job.fetch_cpu_s + job.fetch_wait_s))  # fmt: skip


def epoch_start(world: World) -> None:
    epoch = int(world.random.integers(20, 40))
    start = epoch * world.job.gpu_s * float(world.random.uniform(0.3, 0.8))
    world.change(epoch=epoch, persistent=False, worker_start_s=start)


def unpinned(world: World) -> None:
    size = world.job.gpu_s * float(world.random.uniform(0.25, 0.5)) * 3e9
    world.change(pinned=False, batch_bytes=int(size))


def oversubscribed(world: World) -> None:
    """Each worker has as many threads of a library as there are cores."""
    job = world.job
    threads = job.cores
    crowd = float(world.random.uniform(3.0, 5.0)) * job.workers * job.gpu_s
    world.change(crowded=crowd / (job.fetch_cpu_s + job.fetch_wait_s))
    world.named(worker_threads={"openblas": int(threads)})
    world.machine |= {"runnable": job.workers * threads * 0.7, "switches": 4000.0, "saturated": 1.0}


def host_bound(world: World) -> None:
    """Many small kernels: the main thread launches longer than the GPU computes."""
    world.change(launch_s=world.job.gpu_s * float(world.random.uniform(1.6, 3.0)))
    world.memory["share"] = 0.2


def hidden_syncs(world: World) -> None:
    """item() after each part of the step."""
    job = world.job
    launch = float(world.random.uniform(0.9, 1.2)) * job.gpu_s
    world.change(syncs=int(world.random.integers(4, 12)), launch_s=launch, sync_every=1)


def checkpoint_stalls(world: World) -> None:
    every = int(world.random.integers(25, 60))
    stall = every * world.job.gpu_s * float(world.random.uniform(0.2, 0.5))
    world.change(checkpoint_every=every, checkpoint_s=stall)


def cgroup(world: World) -> None:
    """The quota runs out in most periods: all on the CPU is slower."""
    job = world.job
    slow = float(world.random.uniform(4.0, 6.0))
    world.change(slowdown=slow)
    world.named(quota_cores=max(1.0, job.cores / 8))
    world.machine |= {"throttled": float(world.random.uniform(0.5, 0.9))}


def swapping(world: World) -> None:
    world.change(slowdown=float(world.random.uniform(4.0, 6.0)))
    world.machine |= {"swap": 40.0 * MIB, "left": 0.03}


def contention(world: World) -> None:
    """Other processes on all cores."""
    world.change(slowdown=float(world.random.uniform(4.0, 6.0)))
    world.machine |= {"others": world.job.cores * 0.9, "runnable": world.job.cores * 2.0}


def hot(world: World) -> None:
    clock = float(world.random.uniform(0.55, 0.85))
    world.change(clock=clock)
    world.gpu |= {"clock": clock, "reason": 0x20, "heat": 88.0}


def power(world: World) -> None:
    clock = float(world.random.uniform(0.6, 0.85))
    world.change(clock=clock)
    world.gpu |= {"clock": clock, "reason": 0x4}


def amp_off(world: World) -> None:
    world.named(precision="float32", autocast="")


def small_batch(world: World) -> None:
    world.named(flops_per_sample=(world.header.flops_per_sample or 0.0) / 10)
    world.memory["share"] = float(world.random.uniform(0.05, 0.3))
    world.gpu["sm_active"] = float(world.random.uniform(0.1, 0.4))


def leak(world: World) -> None:
    left = 0.9 - world.memory["share"] * world.memory["cached"]
    world.memory["growth"] = max(0.1, left) * world.total / (4 * world.job.steps)


def near_limit(world: World) -> None:
    world.memory |= {"share": 0.93, "cached": 1.01}


def fragmented(world: World) -> None:
    world.memory |= {"share": 0.25, "cached": float(world.random.uniform(2.3, 3.2))}


def not_finite(world: World) -> None:
    at = int(world.job.steps * world.random.uniform(0.2, 0.9))

    def change(steps: Table) -> None:
        late = steps["step"] >= at
        steps["flags"][late] &= ~np.uint16(tables.LOSS_FINITE)
        steps["flags"][late] |= tables.LOSS_NOT_FINITE
        steps["loss"][late] = np.nan

    world.flags = change


def skipped(world: World) -> None:
    every = int(world.random.integers(4, 20))
    world.named(precision="float16", autocast="float16")

    def change(steps: Table) -> None:
        steps["loss_scale"] = 1024.0
        steps["flags"][steps["step"] % every == 0] |= tables.STEP_SKIPPED

    world.flags = change


def straggler(world: World) -> None:
    """One of four ranks has slower workers; the others wait in the backward pass."""
    world.ranks, world.slow_rank = 4, float(world.random.uniform(1.4, 2.0))


def shared_gpu(world: World) -> None:
    world.gpu["others"] = float(world.random.uniform(0.1, 0.3))
    world.memory["share"] = min(world.memory["share"], 0.45)


@dataclass(frozen=True)
class Cause:
    """A cause, the kinds that name it (one is enough), and kinds that are true as well."""

    name: str
    make: Callable[[World], None]
    kinds: tuple[str, ...]
    also: tuple[str, ...] = ()
    group: str = "other"


_SLOW_CPU = (
    "input_bound",
    "hidden_syncs",
    "host_bound_launches",
    "one_hot_thread",
    "slow_worker",
    "epoch_start",
)
CAUSES: tuple[Cause, ...] = (
    Cause("input_bound", input_bound, ("input_bound",), group="data"),
    Cause("storage_bound", storage_bound, ("input_bound",), group="data"),
    Cause("no_workers", no_workers, ("no_workers",), ("input_bound",), "data"),
    Cause("slow_worker", slow_worker, ("slow_worker",), ("input_bound",), "data"),
    Cause("epoch_start", epoch_start, ("epoch_start",), ("input_bound",), "data"),
    Cause("unpinned", unpinned, ("unpinned_copies",), ("copies",), "copy"),
    Cause("oversubscribed", oversubscribed, ("thread_oversubscription",),
          ("input_bound", "too_many_workers"), "data"),
    Cause("host_bound", host_bound, ("host_bound_launches",), ("one_hot_thread",), "host"),
    Cause("hidden_syncs", hidden_syncs, ("hidden_syncs",), ("host_bound_launches",), "host"),
    Cause("checkpoints", checkpoint_stalls, ("checkpoint_stalls",), (), "saves"),
    Cause("cgroup", cgroup, ("cgroup_throttling",), (*_SLOW_CPU, "too_many_workers"), "cpu"),
    Cause("swapping", swapping, ("swapping",), (*_SLOW_CPU, "ram_near_limit"), "cpu"),
    Cause("contention", contention, ("cpu_contention",),
          (*_SLOW_CPU, "thread_oversubscription"), "cpu"),
    Cause("heat", hot, ("thermal_throttling",), (), "clock"),
    Cause("power", power, ("power_throttling",), (), "clock"),
    Cause("amp_off", amp_off, ("amp_off",), (), "precision"),
    Cause("small_batch", small_batch, ("small_batch",), ("low_mfu",), "use"),
    Cause("leak", leak, ("memory_growth",), ("memory_near_limit",), "memory"),
    Cause("near_limit", near_limit, ("memory_near_limit",), (), "memory"),
    Cause("fragmented", fragmented, ("reserved_above_allocated",), (), "memory"),
    Cause("nan", not_finite, ("loss_not_finite",), (), "loss"),
    Cause("skipped", skipped, ("skipped_steps",), (), "loss"),
    Cause("straggler", straggler, ("straggler",), ("input_bound",), "ranks"),
    Cause("shared_gpu", shared_gpu, ("gpu_shared",), (), "sharing"),
)  # fmt: skip
#: What is so of a healthy run on a busy machine.
CONTENTION: Final = Cause("others", contention, ("cpu_contention",))
#: Causes that hide each other's symptom: what keeps the GPU idle hides what only a busy one shows.
_NEED_BUSY_GPU = {"clock", "precision", "use"}
_IDLE_GPU = {"data", "copy", "host", "cpu", "saves", "ranks"}


@dataclass(frozen=True)
class KnownRun:
    """A run and what is known of it."""

    causes: tuple[Cause, ...]
    run: RunRecord

    @property
    def allowed(self) -> frozenset[str]:
        """Kinds that are no false alarm."""
        return frozenset(itertools.chain(*((*c.kinds, *c.also) for c in self.causes)))


def make(causes: Sequence[Cause], seed: int) -> KnownRun:
    """One run with these causes."""
    world = healthy(np.random.default_rng(seed))
    for cause in causes:
        cause.make(world)
    return KnownRun(tuple(causes), record(world))


def make_busy(seed: int) -> KnownRun:
    """A healthy run on cores that other programs use as well: all that it does on them lasts two to
    four times as long, for the same CPU time."""
    world = healthy(np.random.default_rng(seed))
    slow = float(world.random.uniform(2.0, 4.0))
    world.change(slowdown=slow)
    world.machine |= {"runnable": slow * world.job.cores}
    run = record(world)
    (rank,) = run.ranks
    for rows, names in (
        (rank.steps, ("cpu_s",)),
        (rank.fetches, ("cpu_s",)),
        (run.machine, ("cores_ours",)),
        (run.processes, ("cpu_cores", "hottest_thread")),
    ):
        for name in names:
            rows[name] /= slow
    run.machine["cores_busy"] = world.job.cores
    waits = tables.empty_rows(tables.CORE_WAITS, len(run.processes))
    for name in ("time_s", "pid", "rank", "role", "worker", "cpu_cores"):
        waits[name] = run.processes[name]
    others = 1 - float(np.mean(run.machine["cores_ours"])) / world.job.cores
    waits["main_thread"] = waits["threads"] = waits["cpu_cores"] * (slow - 1) / others
    return KnownRun((CONTENTION,), dataclasses.replace(run, core_waits=waits))


def pairs() -> Iterator[tuple[Cause, Cause]]:
    """Those that can be told apart in one run."""
    for one, other in itertools.combinations(CAUSES, 2):
        groups = {one.group, other.group}
        if len(groups) == 1 or (groups & _NEED_BUSY_GPU and groups & _IDLE_GPU):
            continue
        # They fill the memory, or are of one precision.
        if groups in ({"use", "memory"}, {"use", "sharing"}, {"memory", "sharing"}):
            continue
        if {one.name, other.name} == {"amp_off", "skipped"}:
            continue
        if groups <= _IDLE_GPU:  # the longer of two stalls hides the other
            continue
        yield one, other


# --- What is recorded -------------------------------------------------------------------------
def record(world: World) -> RunRecord:
    """Run the job, and sample what is around it."""
    ranks = []
    loops = [_loop(world, rank) for rank in range(world.ranks)]
    for rank, loop in enumerate(loops):
        _in_step(loops, rank)
        _memory(world, loop.steps)
        if world.flags is not None:
            world.flags(loop.steps)
        steps = lightly(loop.steps, world.random)
        ranks.append(RankRecord(_header(world, rank), steps, loop.fetches))
    times = np.arange(0.1, float(loops[0].steps["end_s"][-1]), 0.1)[:3000]
    machine = _machine(world, loops[0], times)
    sample_in_turns(machine)
    return RunRecord(
        tuple(ranks),
        machine,
        _gpu(world, loops[0], times),
        _processes(world, loops[0], times),
    )


def _loop(world: World, rank: int) -> WatchedLoop:
    job = dataclasses.replace(world.job, seed=world.job.seed + rank)
    if world.ranks > 1 and rank == 1:  # its data need longer than a step
        fetch = world.slow_rank * job.gpu_s * max(1, job.workers)
        job = dataclasses.replace(job, fetch_cpu_s=fetch, fetch_wait_s=0.0)
    return WatchedLoop(job).run()


def _in_step(loops: Sequence[WatchedLoop], rank: int) -> None:
    """Ranks wait for the slowest in the backward pass: all steps end together. Their GPUs are at
    work meanwhile: the all-reduce is a kernel that waits."""
    if len(loops) == 1:
        return
    steps = loops[rank].steps
    slowest = np.max([np.asarray(loop.steps["step_s"]) for loop in loops], axis=0)
    waits = np.maximum(0.0, slowest - steps["step_s"])
    for name in ("backward_s", "gpu_s", "gpu_backward_s"):
        steps[name] += waits
    loops[rank].work += waits
    steps["step_s"] += waits
    steps["end_s"] = np.cumsum(steps["step_s"])


def _memory(world: World, steps: Table) -> None:
    share, cached = world.memory["share"], world.memory["cached"]
    noise = world.random.normal(0.0, 0.0005, len(steps))
    growth = world.memory["growth"] * steps["step"]
    peak = share * world.total * (1 + noise) + growth
    steps["peak_allocated_bytes"] = np.maximum.accumulate(peak).astype(np.int64)
    steps["allocated_bytes"] = (0.4 * share * world.total * (1 + noise) + growth).astype(np.int64)
    reserved = np.minimum(share * cached * world.total + growth, 0.985 * world.total)
    steps["reserved_bytes"] = np.maximum.accumulate(reserved).astype(np.int64)
    steps["alloc_retries"] = 0
    # Statistics are read at most ten times a second.
    late = np.diff(np.floor(np.asarray(steps["end_s"]) * 10), prepend=-1) < 1
    for name in ("peak_allocated_bytes", "allocated_bytes", "reserved_bytes", "alloc_retries"):
        steps[name][late] = -1


def _header(world: World, rank: int) -> RunHeader:
    job = world.job
    loader = WatchedLoader(
        "training", "train.py:41", job.workers, job.prefetch if job.workers else None,
        job.pinned, job.persistent and job.workers > 0, job.batch, job.epoch, "fork",
    )  # fmt: skip
    return dataclasses.replace(
        world.header, rank=rank, world_size=world.ranks, loaders=(loader,),
        distributed="ddp" if world.ranks > 1 else "", host=f"host{rank}",
    )  # fmt: skip


def _share(table: Table, spent: Any, times: Any) -> Any:
    """Of the half second before each time, what steps spent in something."""
    ends, spent = np.asarray(table["end_s"]), np.nan_to_num(np.asarray(spent))
    total = np.concatenate([[0.0], np.cumsum(spent)])
    at = np.interp(times, np.concatenate([[0.0], ends]), total)
    before = np.interp(times - 0.5, np.concatenate([[0.0], ends]), total)
    return np.clip((at - before) / 0.5, 0.0, 1.0)


def _gpu(world: World, loop: WatchedLoop, times: Any) -> Table:
    """NVML's utilisation is of half a second; a starved GPU lowers its clock by itself."""
    rows, steps = tables.empty_rows(tables.GPUS, len(times)), loop.steps
    busy = _share(steps, loop.work, times)
    measured = steps[steps["reserved_bytes"] >= 0]
    reserved = np.interp(times, measured["end_s"], measured["reserved_bytes"])
    maximum = 1.9e9
    idle = busy < 0.4
    rows["time_s"], rows["gpu"], rows["utilization"] = times, 0, busy
    rows["sm_hz"] = np.where(idle, 0.6 * maximum, maximum * world.gpu["clock"])
    rows["max_sm_hz"] = maximum
    rows["clock_reasons"] = np.where(idle, 0x1, int(world.gpu["reason"]))
    flash = world.random.random(len(times)) < 0.01  # a change of performance state
    rows["clock_reasons"][flash] |= 0x8
    rows["temperature_c"] = world.gpu["heat"] + world.random.normal(0, 1, len(times))
    rows["power_w"], rows["power_limit_w"] = 120 + 250 * busy, 400.0
    others = world.gpu.get("others", 0.0) * world.total
    context = 0.45 * GIB
    rows["ours_bytes"] = (reserved + context).astype(np.int64)
    rows["others_bytes"] = int(others)
    rows["used_bytes"] = np.minimum(reserved + context + others, world.total).astype(np.int64)
    if "sm_active" in world.gpu:
        rows["sm_active"] = busy * world.gpu["sm_active"]
    return rows


def _machine(world: World, loop: WatchedLoop, times: Any) -> Table:
    rows = tables.empty_rows(tables.MACHINE, len(times))
    job, machine = world.job, world.machine
    main = _share(loop.steps, loop.steps["cpu_s"], times)
    workers = _workers_busy(loop, times) * job.threads
    if machine.get("saturated"):
        workers = np.full(len(times), job.cores - 1.0)
    ours = np.minimum(main + workers, world.header.quota_cores or job.cores)
    others = machine["others"]
    rows["time_s"], rows["interval_s"] = times, 0.1
    rows["cores_ours"] = ours
    rows["cores_busy"] = np.minimum(job.cores, ours + others)
    rows["iowait_cores"] = machine.get("iowait", 0.05)
    rows["runnable"] = np.maximum(1, world.random.poisson(machine.get("runnable", 0.0) + ours))
    left = machine.get("left", 0.5) * float(world.header.ram_bytes or 0)
    rows["ram_available_bytes"] = int(left)
    rows["ram_used_bytes"] = int(float(world.header.ram_bytes or 0) - left)
    swap = machine.get("swap", 0.0)
    rows["swap_in_bytes"] = rows["swap_out_bytes"] = int(swap / 10)
    rows["shm_used_bytes"], rows["shm_free_bytes"] = GIB, 63 * GIB
    rows["disk_read_bytes"] = int(1e6 + 3e7 * machine.get("iowait", 0.0))
    if world.header.quota_cores is not None:
        rows["cgroup_periods"] = 1
        throttled = world.random.random(len(times)) < machine.get("throttled", 0.0)
        rows["cgroup_throttled"], rows["cgroup_throttled_s"] = throttled, 0.05 * throttled
    rows["cpu_hz"] = 3.0e9
    return rows


def _workers_busy(loop: WatchedLoop, times: Any) -> Any:
    """Cores that workers keep busy, in half-second averages."""
    made = loop.fetches
    if not len(made):
        return np.zeros(len(times))
    order = np.argsort(made["end_s"])
    done = np.cumsum(made["cpu_s"][order])
    ends = made["end_s"][order]
    later = np.interp(times + 0.5, ends, done)
    return np.clip((later - np.interp(times - 0.5, ends, done)), 0.0, loop.job.workers)


def _processes(world: World, loop: WatchedLoop, times: Any) -> Table:
    """The main process and its workers, once a second."""
    job, at = world.job, times[::10]
    whole = tables.empty_rows(tables.PROCESSES, len(at) * (1 + job.workers))
    for number in range(1 + job.workers):
        rows = whole[number * len(at) : (number + 1) * len(at)]
        main = number == 0
        busy = (
            _share(loop.steps, loop.steps["cpu_s"], at)
            if main
            else _workers_busy(loop, at) / job.workers
        )
        rows["time_s"], rows["pid"], rows["rank"] = at, 1 if main else 99 + number, 0
        rows["role"], rows["worker"] = (0, -1) if main else (1, number - 1)
        crowd = world.machine.get("saturated")
        rows["cpu_cores"] = (job.cores - 1) / job.workers if crowd and not main else busy
        library = world.header.worker_threads.get("openblas", 1)
        share = rows["cpu_cores"] / (1 if main else library)
        rows["hottest_thread"] = np.minimum(1.0, share)
        rows["threads"] = 40 if main else 2 + library
        rows["voluntary_switches"] = 300.0
        rows["involuntary_switches"] = world.machine.get("switches", 20.0)
        rows["rss_bytes"] = 2 * GIB
        rows["read_bytes"] = int(1e6)
        waits = job.fetch_wait_s / max(1e-9, job.fetch_wait_s + job.fetch_cpu_s)
        rows["waits_for_io"] = 0.0 if main else waits * 0.9
    return whole
