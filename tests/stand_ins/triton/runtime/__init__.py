"""As ``triton.runtime``: ``driver`` is the object, not the module."""

from triton.runtime.autotuner import Autotuner, Config, Heuristics
from triton.runtime.driver import driver
from triton.runtime.jit import JITFunction

__all__ = ["Autotuner", "Config", "Heuristics", "JITFunction", "driver"]
