"""Every threshold of the checks, with its reason or source. Nothing else decides good or bad."""

from __future__ import annotations

from typing import Final

from trainfit.results.text import GIB

# --- Processor --------------------------------------------------------------------------------

#: Logical CPUs for each GPU below which the input starves it: a process that launches kernels,
#: its pin-memory thread, and one worker. Colab's two vCPUs with a T4 are the known case
#: (the reason that a T4 trained far slower there than in another cloud).
LEAST_CPUS_PER_GPU: Final = 3

#: A quota of this share of the visible CPUs or more hides nothing worth saying (a runtime
#: rounds: 3.9 of 4).
QUOTA_SHARE: Final = 0.95

#: The clock that a policy allows, as a share of what the core can do. Below it, launches and
#: decoding slow down by more than the noise of a measurement (about 5%).
CLOCK_LIMIT_SHARE: Final = 0.95

#: EPP as a number (0 performance … 255 power; kernel, admin-guide/pm/intel_pstate): the words
#: are 0, 128, 192 and 255. Above "balance_power", clocks rise late under load too.
EPP_WORDS: Final = {
    "performance": 0,
    "balance_performance": 128,
    "default": 128,
    "balance_power": 192,
    "power": 255,
}
EPP_POWER: Final = 192

#: Time to wake from the deepest idle state, in seconds, from which paced calls with several
#: blocking waits lose milliseconds. Intel's client cores take 0.2 to 0.9 ms from C10
#: (linux drivers/idle/intel_idle.c), which one wait a call does not notice.
IDLE_LATENCY_S: Final = 1e-3
#: What `cpupower idle-set -D` is given, in microseconds: C1 (1 to 2) and C1E (4 to 10) stay.
IDLE_KEEP_US: Final = 20

# --- Threads ----------------------------------------------------------------------------------

#: Threads of all workers together, as a multiple of the usable cores, from which they contend:
#: in mmdetection#6867, 16 OpenCV threads in each worker took five times the system time
#: and 9% more time a step, 2 threads cost nothing.
THREADS_PER_CORE: Final = 4.0

#: Cores from which OMP_NUM_THREADS=1 leaves most of the machine to workers only.
SINGLE_THREAD_CORES: Final = 4

# --- Memory -----------------------------------------------------------------------------------

#: Available memory below which the kernel reclaims caches all the time and the next worker may
#: end in the out-of-memory killer: 5% of RAM (systemd-oomd and earlyoom act at 10% and below),
#: never less than 1 GiB (one Python process with PyTorch takes 0.3 to 0.6).
LEAST_AVAILABLE_SHARE: Final = 0.05
LEAST_AVAILABLE_BYTES: Final = GIB

#: Of a cgroup's limit, likewise.
LIMIT_USED_SHARE: Final = 0.95

#: Swap in use counts as much from this share of RAM on, and only where little is available:
#: pages that nobody asks for again do no harm.
SWAP_USED_SHARE: Final = 0.10
SWAP_PRESSURE_SHARE: Final = 0.25

#: /dev/shm that a DataLoader needs at least. One batch of 64 images of 3 x 224 x 224 in float32
#: is 37 MiB; 8 workers with 2 batches each hold 0.6 GiB. Docker's and Kubernetes' default is
#: 64 MiB; NVIDIA's containers say themselves that it is too little for PyTorch.
LEAST_SHM_BYTES: Final = GIB
#: Linux mounts /dev/shm with half of the RAM; what has this share or more was not cut.
SHM_SHARE_OF_RAM: Final = 0.4
#: What the remedy asks for.
SHM_WANTED: Final = "8g"

# --- Limits -----------------------------------------------------------------------------------

#: PyTorch's default strategy holds a file descriptor for each tensor in flight
#: (torch.multiprocessing, "file_descriptor"). A batch of a robot's data set has about 16
#: tensors (cameras, state, action, indices, padding masks); a DataLoader prefetches 2 a worker.
TENSORS_PER_BATCH: Final = 16
PREFETCH: Final = 2
#: What the remedy asks for; as much as the hard limit allows.
FILES_WANTED: Final = 65536

#: Threads and processes of one user below which a job with workers does not start: each worker
#: and each library brings one thread a core.
LEAST_PROCESSES: Final = 1024

# --- Storage ----------------------------------------------------------------------------------

#: Bytes/s below which the disk holds back one GPU: ImageNet's files have 110 kB on average,
#: and ResNet-50 takes 900 images/s on a T4-class and over 2,000 on an A100-class GPU.
LEAST_READ_RATE: Final = 100e6
#: Free bytes below which checkpoints end in "No space left on device": weights and AdamW's
#: moments take 12 bytes a parameter, so two checkpoints of 200 million parameters.
LEAST_FREE_BYTES: Final = 5 * GIB

# --- GPU --------------------------------------------------------------------------------------

#: P-states up to this one are states of work (P0 … P2 under CUDA); idle ones are P5, P8, P12.
#: The link's generation falls in idle ones on purpose (ASPM).
ACTIVE_STATE: Final = 4
#: Below this share of its lanes even a slot wired for two GPUs (x8 of x16) is not the reason.
LANES_SHARE: Final = 0.5
#: Clocks lowered by a setting matter below this share of the maximum.
SETTING_CLOCK_SHARE: Final = 0.95
#: Degrees below the slowdown temperature at which clocks begin to step down.
TEMPERATURE_MARGIN_C: Final = 5.0
#: A power limit below this share of the default costs more than the noise of a measurement.
POWER_SHARE: Final = 0.95
#: Memory of others that matters: 5% of the GPU, the margin that a plan leaves.
OTHERS_SHARE: Final = 0.05
#: Memory in use that no visible process accounts for, in bytes. The driver's own part is
#: 0.3 to 0.6 GiB on current GPUs where NVML counts it as used.
UNSEEN_BYTES: Final = GIB

#: GPUs of one machine from which it is a server, whose driver takes seconds to start.
SERVER_GPUS: Final = 4

# --- Packages ---------------------------------------------------------------------------------

#: torch 1.N goes with torchvision 0.(N+1) from 1.4 on, 2.N with 0.(N+15)
#: (pytorch/vision README, "Installation"; PyTorch wiki, "PyTorch Versions"). A torchvision
#: wheel demands exactly its torch (0.28.0: torch==2.13.0).
TORCHVISION_OFFSET: Final = {1: 1, 2: 15}
TORCHVISION_FIRST: Final = {1: 4, 2: 0}
