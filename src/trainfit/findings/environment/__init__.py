"""What an environment lacks: packages that are missing, do not match, or are of another version."""
