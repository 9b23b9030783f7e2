"""Verbs about saved results: one shown as text, several as a page."""
