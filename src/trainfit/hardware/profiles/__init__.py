"""Calibration profiles that trainfit ships: what publications state, each with its source."""
