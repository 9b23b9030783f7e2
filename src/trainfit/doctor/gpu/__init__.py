"""Checks of the GPUs: health, modes, sharing, PCIe link."""
