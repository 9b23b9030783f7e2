"""Processes of our own: forked code, its errors and progress, and what others take meanwhile."""
