"""What takes the memory: streams of every batch size, replay, ranges, what fits."""
