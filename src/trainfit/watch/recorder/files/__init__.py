"""A rank's files: its header, its tables, and rows on their way to them."""
