"""A user's training command: words, placeholders, its Python, what starts it, arguments."""
