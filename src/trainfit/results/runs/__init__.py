"""Runs of a script, simulated or watched: what is asked of a process, and what came of it."""
