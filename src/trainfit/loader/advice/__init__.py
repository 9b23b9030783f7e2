"""Advice in addition to the settings: threads, cores, other changes, and the reason of each."""
