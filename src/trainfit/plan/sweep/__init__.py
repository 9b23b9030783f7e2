"""Sweeps: many plans, of commands, machines and values, each a run of its own; what is best."""
