"""Options of verbs about saved results."""
