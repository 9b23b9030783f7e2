"""A user's training command: words, options, placeholders, its Python, what starts it."""
