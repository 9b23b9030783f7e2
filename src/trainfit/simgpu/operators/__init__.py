"""Operators and libraries with a behaviour of their own on the simulated device."""
