"""What the memory at a peak consists of, and how it grows."""
