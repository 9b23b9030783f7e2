"""Checks of the GPUs: why PyTorch sees none, health, modes, sharing, PCIe link."""
