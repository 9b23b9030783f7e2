"""Steps of recordings: their time on a GPU, at other batch sizes, and at the least."""
