"""A watched run in words: the summary, a line while it runs, the live view."""
