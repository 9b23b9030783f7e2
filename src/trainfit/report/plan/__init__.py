"""A plan as text: one screen, or the whole report."""
