"""Options of what serves the shell."""
