"""Rates and bandwidths of a GPU, measured for a calibration profile."""
