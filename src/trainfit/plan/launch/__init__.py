"""The launch command and the reason of each part."""
