"""Every threshold of the rules, with its reason or source.

Shares are of the steady steps' time.
"""

from __future__ import annotations

from typing import Final

from trainfit.results.watch import LEAST_STEPS as LEAST_STEPS

# --- When anything is said ------------------------------------------------------------------------
#: Samples of the machine or a GPU at least: of a run's first seconds in half a second, later in 10
#: to 20. NVML averages over up to 1 s.
LEAST_SAMPLES: Final = 10
#: Where they are fewer, seconds that samples cover of what the kernel adds up (cores, waits): on a
#: full machine the sampler reads every few seconds, and what lies between is measured, too.
LEAST_COVERED_S: Final = 2.0
#: Of what is read twice a second at most (each process, memory): three seconds.
LEAST_SLOW_SAMPLES: Final = 6
#: Of how long threads waited for cores, which the kernel adds up: what lies between two readings is
#: measured, too.
LEAST_WAIT_SAMPLES: Final = 3
#: Looks at a line from which its share is told: of 5 that are 40% of all, one in ten is off by more
#: than a half.
LOOKS_AT_LINE: Final = 5
#: Loss from which something is worth telling: Kineto's TensorBoard plug-in names a DataLoader
#: above 5% of the step.
NOTICEABLE: Final = 0.05
#: Loss of a warning, and of a critical finding. TraceML warns at 10% and calls 20% critical;
#: a quarter of the time is what a change of settings is worth stopping the run for.
WARNING_SHARE: Final = 0.10
CRITICAL_SHARE: Final = 0.25
#: What is no rare event is there in at least this part of the run: one disturbance is no cause.
LASTING: Final = 1 / 3
#: Steps in a row that are looked at as one for that. Workers give batches in turn, so that what
#: every eighth step waits for is a lasting loss of all.
BLOCK_STEPS: Final = 8
#: Idle time of the GPU by NVML from which it counts beyond what CUDA events say. Utilization is
#: averaged over 1/6 to 1 s and rounded; copies and gaps between kernels lower it in healthy runs.
NVML_IDLE: Final = 0.25

# --- Cores ----------------------------------------------------------------------------------------
#: Of the usable cores that are busy, from which no worker finds a free one. Cores are never all
#: counted as busy: ticks of 10 ms and switches leave a few percent.
SATURATED: Final = 0.90
#: Threads that run or wait for each usable core: above, they wait for each other. Up to a quarter
#: more is the noise of short-lived threads.
CROWDED: Final = 1.25
#: Involuntary context switches a second for each usable core that say the same: a thread that
#: shares its core is switched every 3 to 4 ms (Linux: base_slice_ns).
SWITCHES_PER_CORE: Final = 50.0
#: Of the usable cores that processes outside the run keep busy.
OTHERS_CORES: Final = 0.25
#: Of the part of the cores that one thread gets which always wants to run, what a run must use
#: for others to be in its way: schedulers are fair to a factor of two.
WANTS_CORES: Final = 0.5
#: Cores that a process keeps busy, from which several of its threads are at work: one thread, and
#: what PyTorch's own helpers (pinning, autograd's device thread) take.
SEVERAL_THREADS: Final = 1.5
#: A process' CPU time over that of its busiest thread, from which a second one is busy; sampling
#: and the recorder's own thread of a worker (20 looks a second) are within a tenth.
SECOND_THREAD: Final = 1.25
#: Cores of a process that hardly computes, on a machine with free ones.
HALF_A_CORE: Final = 0.5
#: Seconds of a batch that is as quickly made as taken from a worker: of 1 to 8 small tensors the
#: main process needs 0.6 to 1.5 ms for that though the batch is ready (PyTorch 2.13, two cores).
CHEAP_BATCH_S: Final = 0.001
#: Bytes of a batch from which to copy it into and out of shared memory takes as long as that (some
#: 5 GB/s each way).
LARGE_BATCH_BYTES: Final = 2 * 2**20
#: CPU seconds a second of a thread below which that ratio is noise.
AT_ALL_BUSY: Final = 0.05
#: CPU seconds a second of a thread that never waits. A thread with a core of its own reads 0.95
#: and more; below 0.9 it waits for something.
HOT_THREAD: Final = 0.90
#: Of the usable cores that are idle while one thread has no more to give.
IDLE_CORES: Final = 0.50

# --- Input ----------------------------------------------------------------------------------------
#: A worker's median fetch over that of the others, from which it is slow. Workers of one loader
#: read random parts of one data set: medians of 20 batches with 30% spread differ by 10%.
SLOW_WORKER: Final = 1.5
#: Batches of each worker at least for that.
LEAST_FETCHES: Final = 5
#: Share of a fetch's wall time that is no CPU time, from which it waits for storage.
WAITS: Final = 0.5
#: 90th percentile of a fetch over its median, from which prefetching more evens it out.
UNEVEN_FETCHES: Final = 2.0
#: Loss by input up to which the input is fine.
INPUT_FINE: Final = 0.02
#: Workers over those that are needed, from which they are too many.
SPARE_WORKERS: Final = 2.0
#: Of RAM that is available, below which workers that are not needed are a danger. The kernel
#: reclaims caches before; below a tenth, batches and checkpoints push files out.
RAM_AVAILABLE: Final = 0.10
#: Of RAM that the workers hold for that.
RAM_OF_WORKERS: Final = 0.20
#: Of the copied bytes that come from pageable memory, from which that is the cause.
UNPINNED: Final = 0.5

# --- Host -----------------------------------------------------------------------------------------
#: Idle time of the GPU that the host is to blame for. Less is usual: Python between two steps,
#: with the logging of a healthy loop. TraceML warns of a residual from 10%.
HOST_IDLE: Final = 0.10
#: Share of the steps' time in waiting for the GPU, above which synchronisations take part.
SYNC_SHARE: Final = 0.05
#: Main thread's CPU time over the step's, from which it is at work all the time.
MAIN_THREAD: Final = 0.80
#: Of the host's time, in forward, backward and optimizer, from which the launches dominate.
LAUNCHES: Final = 0.5
#: Of the time, outside all phases, from which it is the script's own code.
OTHER_CODE: Final = 0.25
#: Periods of the CPU quota in which it ran out. Kubernetes' own alert, CPUThrottlingHigh of
#: kubernetes-mixin, fires at 25%; the first tenth is start-up and bursts.
THROTTLED: Final = 0.10
#: Checkpoints and evaluations at least: the share of one alone depends on when the watch ends.
LEAST_EVENTS: Final = 2
#: Share that checkpoints should have; an interval is recommended for it.
CHECKPOINTS_WANTED: Final = 0.02
#: Bytes a second from swap: a page of 4 KiB now and then is the kernel's tidying up.
SWAP_BYTES_PER_S: Final = 1e6
#: Samples with swapping in, at least: paging comes in bursts.
SWAP_SAMPLES: Final = 0.10

# --- GPU, memory, learning -----------------------------------------------------------------------
#: NVML's clock event reasons (nvml.h, nvmlClocksEventReasons): the limit of the power supply, …
POWER_CAP: Final = 0x4
#: … heat (software, hardware) and the hardware's slow-down, and clocks that somebody set.
THERMAL: Final = 0x20 | 0x40 | 0x8
SET_CLOCKS: Final = 0x2
#: Share of the samples of a busy GPU that must show a reason: one alone comes with any change of
#: performance state.
REASON_SHARE: Final = 0.2
#: A GPU is at work in a sample; a starved one lowers its clocks, too.
BUSY_SAMPLE: Final = 0.5
#: Share of the clock that is lost before it is worth saying.
CLOCK_LOSS: Final = 0.05
#: Share of the steps' time in which the GPU has work, from which it is the limit.
GPU_BOUND: Final = 0.8
#: Of the peak of its Tensor cores; published training runs of large models reach 0.3 to 0.6.
LOW_MFU: Final = 0.15
#: Of the GPU's memory at its peak, below which a larger batch has room.
ROOMY: Final = 0.5
#: GPM's share of multiprocessors with work, below which kernels are too small.
SMALL_KERNELS: Final = 0.5
#: Of a step: how much longer than the others' a rank's own work is (TraceML: 0.10 and 0.20).
STRAGGLER: Final = 0.10
#: Of the GPU's memory, what one rank's holds more than the others'.
UNEVEN_MEMORY: Final = 0.05
#: NVML's utilization of one rank's GPU less another's: it is averaged and rounded, and differs by
#: several percent between equal ranks.
UNEVEN_UTILIZATION: Final = 0.2
#: Of the GPU's memory, what processes of others may hold.
OTHERS_MEMORY: Final = 0.05
#: Of the GPU's memory, what is free at the worst moment (TraceML warns at 92%, fails at 97%).
NEAR_LIMIT: Final = 0.08
AT_LIMIT: Final = 0.03
#: Reserved over allocated memory, and the share of the GPU that it must be (TraceML).
RESERVED_RATIO: Final = 2.0
RESERVED_SHARE: Final = 0.3
#: What memory must have grown over the steady steps, in bytes and of what is allocated; fewer
#: steps than these are no trend.
GROWTH_BYTES: Final = 16 * 2**20
GROWTH_SHARE: Final = 0.01
GROWTH_STEPS: Final = 50
#: Of RAM or /dev/shm, what is left at the worst moment.
RAM_LEFT: Final = 0.05
SHM_LEFT: Final = 0.1
#: Of the steady steps; GradScaler skips one in 2000 where all is well (its growth_interval).
SKIPPED: Final = 0.02
