"""Tunables that the user has not marked: a script's own options, proven by runs."""
