"""Runs of a script: what is asked of a process, and what came of it."""
