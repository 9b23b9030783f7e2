"""Reads a script's files: names, loops, gradients, and the values that its statements bind."""
