"""Thresholds of all rules, with their reasons."""

from __future__ import annotations

from typing import Final

#: Of the run's time that a finding loses: TraceML warns at 10% and is critical at 20%, SageMaker
#: and Kineto draw lines at 5 to 10%.
WARNING_SHARE: Final = 0.10
CRITICAL_SHARE: Final = 0.25

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
