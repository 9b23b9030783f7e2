"""A user's training command: words, placeholders, launchers, libraries' arguments."""
