"""Diagnoses a machine and a script: what is good, what is bad and why, and how to fix it."""
