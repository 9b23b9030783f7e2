"""What serves the shell."""
