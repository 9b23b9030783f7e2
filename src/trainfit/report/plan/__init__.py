"""A plan as text: one screen, or the whole report; its launch command, and what was measured."""
