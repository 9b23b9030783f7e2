"""Samples the machine, its GPUs and a run's processes, in a process of its own."""
