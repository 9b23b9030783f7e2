"""Judges a machine and a script: what is good, what is bad and why, and what cures it."""
