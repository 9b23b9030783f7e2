"""Batches that differ in shape, as one line."""

from __future__ import annotations

from trainfit.results.format import duration, size
from trainfit.results.plan.configuration import BatchShapes


def shapes_text(shapes: BatchShapes | None) -> str:
    """Typical and longest sample, and what batches of the longest need; empty where none differ."""
    if shapes is None:
        return ""
    if shapes.longest is None:
        why = shapes.reason or "it could not be simulated"
        return f"batches differ in shape, sized by those seen; longest not known: {why}"
    text = "batches differ"
    median, longest = shapes.median_elements, shapes.longest_elements
    if median is not None and longest is not None:
        text = f"samples of {median:,} (median) to {longest:,} elements"
    fits = "" if shapes.longest_fits else ", DOES NOT FIT"
    text += f"; a batch of the longest: {size(shapes.longest.device_bytes)}{fits}"
    if shapes.longest_step_s is not None:
        text += f", {duration(shapes.longest_step_s)}"
    return text
