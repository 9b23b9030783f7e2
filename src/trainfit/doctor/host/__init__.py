"""Checks of the rest of the machine: memory, storage, limits, container, packages."""
