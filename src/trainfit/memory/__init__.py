"""What takes the memory: streams of every batch size, allocator replay, ranges, the largest that fits."""
