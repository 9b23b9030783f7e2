"""Tracebacks, thread stacks, samples and objects, read and put into few words."""
