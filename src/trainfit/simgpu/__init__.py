"""The simulated CUDA device: dispatch, autocast, allocator, clock, torch.cuda's surface."""

from trainfit.simgpu.session import Simulation, simulate

__all__ = ["Simulation", "simulate"]
