"""Options of verbs about watched runs."""
